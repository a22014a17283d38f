"""Client connections: requests in order, with time limits.

A half-closed connection counts as closed: the two look alike, and wasted generation costs more.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from functools import partial
from math import inf
from typing import cast

from proxy.core.model import refusals
from proxy.core.model.refusals import RefusedError
from proxy.core.model.types import Refusal
from proxy.http.headers import CONTINUE
from proxy.http.local_responses import refuse
from proxy.http.request import Request
from proxy.http.request_parser import HttpRequestParser, ParserState
from proxy.wire.client.closing import Closing
from proxy.wire.client.local_endpoints import METRICS, local_response
from proxy.wire.client.metrics_request import MetricsRequest
from proxy.wire.client.upload_deadline import UploadDeadline
from proxy.wire.context import WireContext
from proxy.wire.extension import Conversation
from proxy.wire.settings import WireSettings
from proxy.wire.sockets import socket_of
from proxy.wire.worker.keepalive import enable_keepalive

# Limits on pipelined requests.
MAX_AHEAD_BYTES, MAX_AHEAD_REQUESTS = 256 << 10, 256
MAX_UNSENT_BYTES = 64 << 10  # of responses, before reading from workers stops
# On Linux, a closed peer shows before its data is read.
CLOSED_EVENTS = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ClientConnection(asyncio.Protocol):
    __slots__ = (
        "_ahead_bytes", "_closing", "_deadline_state", "_exchange", "_final_refusal", "_leaving",
        "_reader", "_reading_paused", "_takes_ready", "_transport", "_upload", "_wire", "deadline",
        "writable", "write",
    )  # fmt: skip

    def __init__(self, wire: WireContext) -> None:
        self.deadline = inf
        self.writable = True
        self.write: Callable[[bytes], None]
        self._wire = wire
        self._reader = HttpRequestParser(
            wire.check_head,
            max_head=wire.settings.max_header_bytes,
            max_body=wire.settings.max_body_bytes,
            body_budget=wire.body_budget,
        )
        self._transport: asyncio.Transport
        self._exchange: Conversation | None = None
        self._final_refusal: Refusal | None = None  # sent after earlier responses
        self._leaving = False
        self._closing = Closing()
        self._takes_ready = False
        self._reading_paused = False
        self._ahead_bytes = 0
        self._deadline_state = ParserState.NOTHING  # for which the deadline is
        self._upload = UploadDeadline()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._wire.tls is not None:  # the TLS default is 512 KiB
            self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self.write = partial(self._wire.write_batch.write, self._transport)
        # `idle_s` limits slow readers, so send probes only.
        enable_keepalive(transport)
        self.limit(self._wire.settings)
        self._listen(self._wire.clock())
        raw = socket_of(self._transport)
        self._wire.add_client(self, 0 if raw is None else raw.fileno())

    def limit(self, settings: WireSettings) -> None:
        self._reader.limit(settings.max_header_bytes, settings.max_body_bytes)

    def data_received(self, data: bytes) -> None:
        """Parse requests and serve them in order."""
        if self._leaving or self._final_refusal is not None:
            return
        try:
            self._reader.feed(data)
        except RefusedError as error:
            self._final_refusal = error.refusal
        if self._exchange is None:
            self._upload.record_bytes(len(data))
            self._serve_ready(self._wire.clock())
            return
        self._ahead_bytes += len(data)
        if self._ahead_bytes > MAX_AHEAD_BYTES or len(self._reader.ready) > MAX_AHEAD_REQUESTS:
            self._pause_reading()

    def eof_received(self) -> None:
        """Treat the client as gone."""
        leaves = self._leaving  # its deadline is already set
        self._end_after_loss()
        if not leaves:
            self._limit_closing(self._wire.clock())

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Stop all work for the client."""
        self._wire.remove_client(self)
        self._wire.unread.discard(self)
        self._end_after_loss()

    def pause_writing(self) -> None:
        """Stop reading from both sides, to bound the buffers."""
        self.writable = False
        if self._leaving:
            return
        self.deadline = self._wire.clock() + self._wire.settings.idle_s
        if self._exchange is not None:
            self._exchange.pause()
        else:
            self._pause_reading()

    def resume_writing(self) -> None:
        self.writable = True
        now = self._wire.clock()
        if self._exchange is None:
            self._serve_ready(now)
        else:
            self.deadline = inf
            self._exchange.resume(now)

    def end_response(self, now: float, *, keep_alive: bool) -> None:
        self._exchange = None
        if not keep_alive:
            self.leave(now)
        elif (
            self._reader.ready
            or self._takes_ready
            or self._leaving
            or self._final_refusal is not None
        ):
            self._serve_ready(now)
        elif self.writable:
            self._wait_for_request(now)
        else:
            self._pause_reading()

    def break_off(self) -> None:
        self._leaving = True
        self._exchange = None
        self._reader.drop()
        reset(self._transport)

    def leave(self, now: float) -> None:
        self._leaving = True
        self._reader.drop()
        self._limit_closing(now)
        self._wire.write_batch.flush()
        self._transport.close()

    def close_for_drain(self, now: float) -> None:
        """Close, with a refusal for a partly received request."""
        idle = self._reader.state is ParserState.NOTHING
        if idle or self._leaving or self._exchange is not None:
            self.leave(now)
        else:
            self._refuse_and_close(now, refusals.draining())

    def close_if_idle(self, now: float, min_idle_s: float = -inf) -> None:
        if self._exchange is not None or self._leaving or not self.writable:
            return
        if self.deadline - self._wire.settings.client_idle_s > now - min_idle_s:
            return
        if self._reader.state is ParserState.NOTHING and not has_events(
            self._transport, select.POLLIN
        ):
            self.leave(now)

    def abort(self) -> None:
        self._transport.abort()

    def expire(self, now: float) -> None:
        if self._closing.has_undelivered(now, self._transport):
            self.deadline = now + self._wire.settings.linger_s
        elif self._leaving or self._exchange is not None or not self.writable:
            self._end_after_loss()
            self._transport.abort()
        elif self._reader.state is ParserState.NOTHING:
            self.leave(now)
        else:
            self._refuse_and_close(now, self._upload.too_late(now, self._wire.settings))

    def _limit_closing(self, now: float) -> None:
        """Give a closing connection `idle_s` to deliver its last bytes."""
        self.deadline = now + self._wire.settings.idle_s
        self._closing.begin(self.deadline)
        if self._wire.tls is not None:
            self.deadline = now  # check at the next sweep

    def close_if_gone(self) -> None:
        if has_events(self._transport, CLOSED_EVENTS):
            self._end_after_loss()
            self._transport.abort()

    def _serve_ready(self, now: float) -> None:
        if self._takes_ready:
            return
        self._takes_ready = True
        ready = self._reader.ready
        while ready and not self._has_exchange() and self.writable and not self._leaving:
            request = ready.popleft()
            if self._reading_paused:
                self._reader.request_taken(request)
            self._serve(now, request)
            if ready and not self._has_exchange():
                self._wire.write_batch.flush()  # updates `writable`
        self._takes_ready = False
        if self._exchange is not None or self._leaving:
            if len(ready) > MAX_AHEAD_REQUESTS:
                self._pause_reading()
        elif not self.writable:
            self._pause_reading()
        elif self._final_refusal is not None:
            self._refuse_and_close(now, self._final_refusal)
        else:
            self._wait_for_request(now)

    def _has_exchange(self) -> bool:
        return self._exchange is not None

    def _serve(self, now: float, request: Request) -> None:
        wire, head = self._wire, request.head
        self._deadline_state = ParserState.NOTHING  # restarts its deadline
        arrived_at = self._upload.finish(now)
        if not request.id:
            request.id = wire.new_id()
        if head.edition != wire.router.tenants.edition and not head.lost_body:
            wire.check_head(head)  # the key may have been removed
        if head.route is not None and not wire.draining:
            self.deadline = inf
            self._exchange = wire.begin(self, request, head.route, arrived_at)
            self._exchange.start(now)
            return
        keep_alive = head.keep_alive and not wire.leaving
        if head.path == METRICS and head.refusal is None:
            self.deadline = inf
            self._exchange = MetricsRequest(wire, self, request)
            self._exchange.start(now)
            return
        if head.route is None and head.refusal is None:
            self.write(local_response(wire, request, keep_alive=keep_alive))
        else:
            refusal = head.refusal or refusals.draining()
            response = refuse(refusal, request, keep_alive=keep_alive)
            wire.count_refused(refusal, response, request)
            self.write(response)
        self.end_response(now, keep_alive=keep_alive)

    def _pause_reading(self) -> None:
        self._deadline_state = ParserState.NOTHING  # restarts its deadline
        if not self._reading_paused:
            self._reading_paused = True
            self._wire.unread.add(self)
            self._transport.pause_reading()
            try:
                self._reader.charge_ready()
            except RefusedError as error:
                self._reader.drop()
                self._final_refusal = error.refusal

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._wire.unread.discard(self)
            self._transport.resume_reading()

    def _wait_for_request(self, now: float) -> None:
        """Wait for a request unless the router drains."""
        if self._wire.draining:
            self.close_if_idle(now)
        if not self._leaving:
            self._listen(now)

    def _listen(self, now: float) -> None:
        """Read again, with the parser state's deadline."""
        reader, settings = self._reader, self._wire.settings
        if self._reading_paused:
            self._resume_reading()
        self._ahead_bytes = 0
        if reader.state is ParserState.HEAD:
            if self._deadline_state is not ParserState.HEAD:
                self.deadline = now + settings.client_header_s
        else:
            self.deadline = now + settings.client_idle_s
            if reader.owes_continue():
                self.write(CONTINUE)
        if reader.state is ParserState.NOTHING:
            self._upload.reset()
        else:
            in_body = reader.state is ParserState.BODY
            begins = in_body and self._deadline_state is not ParserState.BODY
            due = self._upload.due(now, settings, in_body=in_body, body_begins=begins)
            self.deadline = min(self.deadline, due)
        self._deadline_state = reader.state

    def _refuse_and_close(self, now: float, refusal: Refusal) -> None:
        """Refuse and close; read on for `linger_s`, as a reset could discard the response."""
        self._leaving = True
        request_id = self._reader.request_id or self._wire.new_id()
        path = self._reader.path
        response = refuse(refusal, request=None, keep_alive=False, request_id=request_id, path=path)
        self._wire.count_refused(refusal, response, request_id=request_id)
        self._reader.drop()
        self._resume_reading()
        self.write(response)
        self.deadline = now + self._wire.settings.linger_s
        self._wire.write_batch.flush()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _end_after_loss(self) -> None:
        self._leaving = True
        self._reader.drop()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_left(self._wire.clock())


def has_events(transport: asyncio.Transport, events: int) -> bool:
    if (raw := socket_of(transport)) is None:
        return False
    poll = select.poll()
    poll.register(raw.fileno(), events)
    return bool(poll.poll(0))


def reset(transport: asyncio.Transport) -> None:
    """Reset a connection: a plain close would be a valid end of an unframed body."""
    if (raw := socket_of(transport)) is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    transport.abort()

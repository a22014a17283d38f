"""The client's side: one connection, its requests in turn, and what it may not keep us waiting for.

A client that closes its sending half is taken to be gone, as one that closes altogether: nothing
tells the two apart, and an engine that writes for nobody costs more.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, cast

from proxy.core.model import refusals
from proxy.core.model.types import Refusal
from proxy.http.headers import CONTINUE, RefusedError
from proxy.http.local_responses import refuse
from proxy.http.request import Request
from proxy.http.request_parser import HttpRequestParser, ParserState
from proxy.wire.client.endpoints import METRICS, local_answer
from proxy.wire.client.metrics_request import MetricsRequest
from proxy.wire.client.upload_deadline import UploadDeadline
from proxy.wire.sockets import socket_of, unacknowledged
from proxy.wire.worker.keepalive import notice_silence

if TYPE_CHECKING:
    from proxy.wire.context import WireContext
    from proxy.wire.extension import Conversation
    from proxy.wire.settings import WireSettings

# Sent ahead of its turn; beyond that the client has to wait.
MAX_AHEAD, MANY_AHEAD = 256 << 10, 256  # bytes, requests
MOST_UNSENT = 64 << 10  # bytes of answers, before no more of them is taken from workers
# That it has closed its end shows while what it sent before is not read yet, on Linux.
LEFT = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_ahead",
        "_arrival",
        "_exchange",
        "_last_words",
        "_leave_by",
        "_leaving",
        "_reader",
        "_reading_paused",
        "_taking",
        "_transport",
        "_unsent",
        "_waits_for",
        "_wire",
        "deadline",
        "writable",
        "write",
    )

    def __init__(self, wire: WireContext) -> None:
        settings = wire.settings
        self.deadline = inf
        self.writable = True
        self.write: Callable[[bytes], None]
        self._wire = wire
        self._reader = HttpRequestParser(
            wire.judge,
            max_head=settings.max_header_bytes,
            max_body=settings.max_body_bytes,
            collecting=wire.collecting,
        )
        self._transport: asyncio.Transport
        self._exchange: Conversation | None = None
        self._last_words: Refusal | None = None  # to say once what came before is answered
        self._leaving = False
        self._leave_by = -inf  # however much of the last answer it has by then
        self._unsent = True  # as far as was seen since it was to leave
        self._taking = False
        self._reading_paused = False
        self._ahead = 0
        self._waits_for = ParserState.NOTHING
        self._arrival = UploadDeadline()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request."""
        self._transport = cast("asyncio.Transport", transport)
        if self._wire.encrypted:  # which keeps eight times as much by itself
            self._transport.set_write_buffer_limits(high=MOST_UNSENT)
        self.write = partial(self._wire.outbox.write, self._transport)
        # How long it may take nothing is for `idle_s` to say: who reads slowly is there.
        notice_silence(transport)
        self._wire.client_came(self)
        self.limit(self._wire.settings)  # there may be new ones since it was accepted
        self._listen(self._wire.clock())

    def limit(self, settings: WireSettings) -> None:
        """Take new bounds for what else the client asks."""
        self._reader.limit(settings.max_header_bytes, settings.max_body_bytes)

    def data_received(self, data: bytes) -> None:
        """Read requests, and take their turns."""
        if self._leaving or self._last_words is not None:
            return
        try:
            self._reader.feed(data)
        except RefusedError as error:
            self._last_words = error.refusal
        if self._exchange is None:
            self._arrival.got(len(data))
            self._take_turns(self._wire.clock())
            return
        self._ahead += len(data)
        if self._ahead > MAX_AHEAD or len(self._reader.ready) > MANY_AHEAD:
            self._read_no_more()

    def eof_received(self) -> None:
        """Take the client for gone; the transport closes itself, once it has nothing to send."""
        leaves = self._leaving  # then it has all the time that it gets
        self._gone()
        if not leaves:
            self._bear_with(self._wire.clock())

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """Drop what was done for the client."""
        self._wire.client_left(self)
        self._wire.reading_resumed(self)
        self._gone()

    def pause_writing(self) -> None:
        """Take no more from the worker than the client takes from us; and no more from the client.

        Who takes no answers would else be answered, or read from, without end.
        """
        self.writable = False
        if self._leaving:
            return
        self.deadline = self._wire.clock() + self._wire.settings.idle_s
        if self._exchange is not None:
            self._exchange.pause()
        else:
            self._read_no_more()

    def resume_writing(self) -> None:
        """Go on."""
        self.writable = True
        now = self._wire.clock()
        if self._exchange is None:
            self._take_turns(now)
        else:
            self.deadline = inf
            self._exchange.resume(now)

    def done(self, now: float, *, keep_alive: bool) -> None:
        """Hear from the exchange that its answer is written."""
        self._exchange = None
        if not keep_alive:
            self.leave(now)
        elif self._reader.ready or self._taking or self._leaving or self._last_words is not None:
            self._take_turns(now)
        elif self.writable:
            self._rest(now)
        else:
            self._read_no_more()

    def break_off(self) -> None:
        """End an answer that can't be completed, so that no reader can take it for a whole one."""
        self._leaving = True
        self._exchange = None
        self._reader.drop()
        # A plain close ends a body whose end is the connection's: as if it were complete.
        if (raw := socket_of(self._transport)) is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._transport.abort()

    def leave(self, now: float) -> None:
        """Close, once everything written is sent."""
        self._leaving = True
        self._reader.drop()
        self._bear_with(now)
        self._wire.outbox.flush()
        self._transport.close()

    def dismiss(self, now: float) -> None:
        """Close, because the router stops; who is in the middle of a request hears why."""
        idle = self._reader.state is ParserState.NOTHING
        if idle or self._leaving or self._exchange is not None:
            self.leave(now)
        else:
            self._part(now, refusals.draining())

    def part_if_idle(self, now: float) -> None:
        """Close, because nothing new is served, unless something is asked, or about to be."""
        if self._exchange is not None or self._leaving or not self.writable:
            return
        if self._reader.state is ParserState.NOTHING and not self._sees(select.POLLIN):
            self.leave(now)

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def expire(self, now: float) -> None:
        """Act on a deadline that has passed."""
        if self._still_takes(now):
            self.deadline = now + self._wire.settings.linger_s
        elif self._leaving or self._exchange is not None or not self.writable:
            self._gone()
            self._transport.abort()
        elif self._reader.state is ParserState.NOTHING:
            self.leave(now)
        else:
            self._part(now, self._arrival.too_late(now, self._wire.settings))

    def _bear_with(self, now: float) -> None:
        """Let a client that is to leave take what it was sent, for as long as it does."""
        self._leave_by = self.deadline = now + self._wire.settings.idle_s
        if self._wire.encrypted:
            self.deadline = now  # for a look

    def _still_takes(self, now: float) -> bool:
        """Whether a client that is to leave has yet to take something, as far as is known.

        TLS waits for its word that it has heard of the end; one that keeps a connection for later
        does not look at it, and says nothing. Two looks: in between the kernel is given what the
        loop still had.
        """
        if now >= self._leave_by:
            return False
        before, self._unsent = self._unsent, unacknowledged(self._transport) != 0
        return before or self._unsent

    def look(self) -> None:
        """See whether a client has left that we don't read from: nobody else would tell us."""
        if self._sees(LEFT):
            self._gone()
            self._transport.abort()

    def _sees(self, events: int) -> bool:
        """Whether any of these has happened to the socket, be it not heard of yet."""
        if (raw := socket_of(self._transport)) is None:
            return False
        poll = select.poll()
        poll.register(raw.fileno(), events)
        return bool(poll.poll(0))

    def _take_turns(self, now: float) -> None:
        """Answer requests that are ready, one after the other."""
        if self._taking:
            return
        self._taking = True
        ready = self._reader.ready
        while ready and not self._answers() and self.writable and not self._leaving:
            request = ready.popleft()
            if self._reading_paused:
                self._reader.waits_no_more(request)
            self._answer(now, request)
            if ready and not self._answers():
                self._wire.outbox.flush()  # or nothing tells whether it takes the answers
        self._taking = False
        if self._exchange is not None or self._leaving:
            if len(ready) > MANY_AHEAD:
                self._read_no_more()
        elif not self.writable:
            self._read_no_more()
        elif self._last_words is not None:
            self._part(now, self._last_words)
        else:
            self._rest(now)

    def _answers(self) -> bool:
        return self._exchange is not None

    def _answer(self, now: float, request: Request) -> None:
        wire, head = self._wire, request.head
        self._waits_for = ParserState.NOTHING  # the next head has a deadline of its own
        came_at = self._arrival.ended(now)
        if not request.id:
            request.id = wire.new_id()
        if head.edition != wire.router.tenants.edition and not head.lost_body:
            wire.judge(head)  # anew: its key may not be one any more
        if head.route is not None and not wire.draining:
            self.deadline = inf
            self._exchange = wire.begin(self, request, head.route, came_at)
            self._exchange.start(now)
            return
        keep_alive = head.keep_alive and not wire.leaving
        if head.path == METRICS and head.refusal is None:
            self.deadline = inf
            self._exchange = MetricsRequest(wire, self, request)
            self._exchange.start(now)
            return
        if head.route is None and head.refusal is None:
            self.write(local_answer(wire, request, keep_alive=keep_alive))
        else:
            refusal = head.refusal or refusals.draining()
            answer = refuse(refusal, request, keep_alive=keep_alive)
            wire.refused(refusal, answer, request)
            self.write(answer)
        self.done(now, keep_alive=keep_alive)

    def _read_no_more(self) -> None:
        """Leave what else comes in the client's socket, until it is its turn."""
        self._waits_for = ParserState.NOTHING  # what is begun of a request has its time anew
        if not self._reading_paused:
            self._reading_paused = True
            self._wire.reading_paused(self)
            self._transport.pause_reading()
            try:
                self._reader.wait()
            except RefusedError as error:
                self._reader.drop()
                self._last_words = error.refusal

    def _read_on(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._wire.reading_resumed(self)
            self._transport.resume_reading()

    def _rest(self, now: float) -> None:
        """Wait for more of the client, unless nothing more would be served."""
        if self._wire.draining:
            self.part_if_idle(now)
        if not self._leaving:
            self._listen(now)

    def _listen(self, now: float) -> None:
        """Wait for it with the patience that is due to what comes next."""
        reader, settings = self._reader, self._wire.settings
        if self._reading_paused:
            self._read_on()
        self._ahead = 0
        if reader.state is ParserState.HEAD:
            if self._waits_for is not ParserState.HEAD:
                self.deadline = now + settings.client_header_s
        else:
            self.deadline = now + settings.client_idle_s
            if reader.owes_continue():
                self.write(CONTINUE)
        if reader.state is ParserState.NOTHING:
            self._arrival.reset()
        else:
            in_body = reader.state is ParserState.BODY
            begins = in_body and self._waits_for is not ParserState.BODY
            due = self._arrival.due(now, settings, in_body=in_body, body_begins=begins)
            self.deadline = min(self.deadline, due)
        self._waits_for = reader.state

    def _part(self, now: float, refusal: Refusal) -> None:
        """Say why, and close; listen a little longer, or the answer may be lost to a reset."""
        self._leaving = True
        request_id = self._reader.request_id or self._wire.new_id()
        path = self._reader.path
        answer = refuse(refusal, None, keep_alive=False, request_id=request_id, path=path)
        self._wire.refused(refusal, answer)
        self._reader.drop()
        self._read_on()
        self.write(answer)
        self.deadline = now + self._wire.settings.linger_s
        self._wire.outbox.flush()
        if self._transport.can_write_eof():  # there is no half of TLS to close
            self._transport.write_eof()

    def _gone(self) -> None:
        self._leaving = True
        self._reader.drop()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.gone(self._wire.clock())

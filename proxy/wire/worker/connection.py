"""One connection to a worker.

A worker may close an idle connection just as a request is put on it. Its kernel confirms no byte of
that request then. Only such a request is sent again on a fresh connection to the same worker, as if
for the first time. A request of which any byte was confirmed may have been read and acted upon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import urlsplit

from proxy.http.response_parser import ResponseError, ResponseHead, ResponseParser
from proxy.wire.sockets import unacknowledged

if TYPE_CHECKING:
    from proxy.core.model.specs import WorkerSpec
    from proxy.wire.exchange.stream_fast_path import StreamFastPath
    from proxy.wire.settings import WireSettings
    from proxy.wire.write_batch import WriteBatch

logger = logging.getLogger(__name__)

# uvicorn closes what was idle for 5 s.
MAX_IDLE_S = 4.0


class WorkerError(StrEnum):
    """How a worker failed a request; a label in metrics."""

    CONNECT = "connect"
    RESET = "reset"
    TIMEOUT = "timeout"
    BROKEN = "broken"  # what it said was no HTTP
    STATUS = "status"  # it answered with a 5xx or 429
    OURS = "ours"  # this machine has no room for another connection


class ResponseReceiver(Protocol):
    """Who waits for a worker's answer. After `received(ended=True)` or `lost` it hears no more."""

    connection: WorkerConnection | None
    patience_s: float  # until its answer begins

    def begun(self, now: float, head: ResponseHead) -> None:
        """Hear that the head of the answer is there."""

    def received(self, now: float, body: bytes, ended: bool) -> None:
        """Take a piece of the body, perhaps empty, perhaps the last."""

    def late(self, now: float) -> float:
        """Hear that its patience is over; return how much more of it there is."""

    def lost(self, now: float, trouble: WorkerError) -> None:
        """Hear that there will be no (more of the) answer."""


class ConnectionOwner:
    """The pool that a connection belongs to, as the connection uses it."""

    def __init__(
        self,
        spec: WorkerSpec,
        settings: WireSettings,
        clock: Callable[[], float],
        outbox: WriteBatch,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.clock = clock
        self.outbox = outbox
        self.host = b"%b\r\n" % urlsplit(spec.url).netloc.encode()  # two headers as sent
        self.idle: list[WorkerConnection] = []

    def open_for(self, now: float, caller: ResponseReceiver, request: tuple[bytes, ...]) -> None:
        """Send a request on a new connection."""
        raise NotImplementedError

    def forget(self, connection: WorkerConnection) -> None:
        """Drop a closed connection from the pool."""
        raise NotImplementedError


class WorkerConnection(asyncio.Protocol):
    """One connection to a worker, from before it is made."""

    __slots__ = (
        "_begun",
        "_paused",
        "_pool",
        "_reader",
        "_request",
        "_transport",
        "_used",
        "caller",
        "deadline",
        "opening",
        "passage",
    )

    def __init__(self, pool: ConnectionOwner) -> None:
        self.caller: ResponseReceiver | None = None
        self.deadline = inf
        self.opening: asyncio.Task[None] | None = None
        self.passage: StreamFastPath | None = (
            None  # while the reader is between two chunks of a stream
        )
        self._pool = pool
        self._reader = ResponseParser()
        self._transport: asyncio.Transport | None = None
        self._request: tuple[bytes, ...] = ()
        self._used = False  # an answer came over it before
        self._begun = False
        self._paused = False

    def send(self, now: float, caller: ResponseReceiver, request: tuple[bytes, ...]) -> None:
        """Put a request on the connection, or keep it until there is one."""
        self.caller = caller
        self._request = request
        if self._transport is None:
            self.deadline = now + self._pool.settings.connect_s
            return
        self.deadline = now + caller.patience_s
        self._pool.outbox.write(self._transport, *request)

    @property
    def is_open(self) -> bool:
        """Whether the worker has taken the connection."""
        return self._transport is not None

    @property
    def has_sent(self) -> bool:
        """Whether all of its request has left this process, so that a worker may act on it."""
        transport = self._transport
        if transport is None or self._pool.outbox.holds(transport):
            return False
        return not transport.get_write_buffer_size()

    def drop(self) -> None:
        """Walk away: whatever the worker does for the caller, it may stop doing."""
        self.caller = self.passage = None
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def pause(self) -> None:
        """Take no more for now; the worker's silence is not its own meanwhile."""
        if self._transport is not None and not self._paused:
            self._paused = True
            self.deadline = inf
            self._transport.pause_reading()

    def resume(self, now: float) -> None:
        """Take more again."""
        if self._transport is not None and self._paused:
            self._paused = False
            # Before its answer begins, the client can only have been slow with another.
            waits = None if self._begun else self.caller
            self.deadline = now + (waits.patience_s if waits else self._pool.settings.idle_s)
            self._transport.resume_reading()

    def expire(self, now: float) -> None:
        """Act on a deadline that has passed."""
        waits = None if self._begun or self._transport is None else self.caller
        if waits is not None and (more_s := waits.late(now)) > 0:
            self.deadline = now + more_s
        else:
            self.fail(now, WorkerError.TIMEOUT)

    def fail(self, now: float, trouble: WorkerError) -> None:
        """Close, and tell the caller if there is one."""
        caller, self.caller = self.caller, None
        self.drop()
        if caller is not None:
            caller.lost(now, trouble)

    def open_passage(self, passage: StreamFastPath) -> None:
        """Have whole chunks of a stream pass by, if its reader is between two of them."""
        if self._reader.between_chunks:
            self.passage = passage

    def is_usable(self) -> bool:
        """Whether an idle connection may serve again."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what waits."""
        self._transport = cast("asyncio.Transport", transport)
        self.opening = None
        if self.caller is None:
            self._transport.abort()
        else:
            self.send(self._pool.clock(), self.caller, self._request)

    def data_received(self, data: bytes) -> None:
        """Pass on what the worker says."""
        caller, reader = self.caller, self._reader
        now = self._pool.clock()
        if (passage := self.passage) is not None:
            if not self._paused:
                self.deadline = now + self._pool.settings.idle_s
            if passage.take(now, data):
                return
            self.passage = None
        if caller is None:
            self.drop()  # it speaks though nobody asked
            return
        try:
            reader.feed(data)
        except ResponseError:
            self.fail(now, WorkerError.BROKEN)
            return
        self._tell(now, caller)

    def eof_received(self) -> None:
        """Take it for the end, whatever of the request may still wait to be sent."""
        if self._used and self._reader.untouched and self._has_delivered_nothing():
            self._send_afresh()
        else:
            self._ended(proper=True)
        self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        """See whether that was the end, an accident, or nothing to anybody.

        TLS announces its end, and that is heard before: what ends otherwise may have been cut off.
        """
        self._ended(proper=error is None and self._pool.spec.tls is None)

    def _ended(self, *, proper: bool) -> None:
        self._pool.forget(self)
        caller = self.caller
        if caller is None:
            return
        now = self._pool.clock()
        if proper and self._reader.finish():
            self._tell(now, caller)
        else:
            self.fail(now, WorkerError.RESET)

    def _has_delivered_nothing(self) -> bool:
        """Whether the worker's machine has not taken a byte of the request.

        The segment that ends a connection confirms all that came before it. A reset confirms
        nothing, so after one this is not known.
        """
        transport, pool = self._transport, self._pool
        if self.caller is None or transport is None:
            return False
        if pool.outbox.holds(transport):
            return True
        left = unacknowledged(transport)
        return left is not None and left >= sum(map(len, self._request))

    def _send_afresh(self) -> None:
        caller, self.caller = self.caller, None
        if caller is not None:
            self._pool.forget(self)
            self._pool.open_for(self._pool.clock(), caller, self._request)

    def _tell(self, now: float, caller: ResponseReceiver) -> None:
        """Hand over what was read; whoever can't make anything of it hears that it is broken.

        Else a mistake of ours would leave a client waiting for ever, for nobody would tell it.
        """
        try:
            self._hand_over(now, caller)
        except Exception:
            logger.exception("an answer of %s could not be dealt with", self._pool.host.decode())
            self.drop()
            caller.connection = None
            caller.lost(now, WorkerError.BROKEN)

    def _hand_over(self, now: float, caller: ResponseReceiver) -> None:
        """Hand over what was read. In between, the caller may drop the connection."""
        reader = self._reader
        head = reader.head
        if head is None:
            return
        body = b"".join(reader.pieces) if reader.pieces else b""
        ended = reader.ended
        reader.pieces = []
        if not self._begun:
            self._begun = True
            self._request = ()
            caller.begun(now, head)
            if self.caller is not caller:
                return
        if ended:
            # Before the caller hears of it: what waits for room will want this connection.
            self._release(now)
        elif body and not self._paused:
            self.deadline = now + self._pool.settings.idle_s
        if body or ended:
            caller.received(now, body, ended)

    def _release(self, now: float) -> None:
        transport = self._transport
        self.caller = None
        # A worker that answered before it had read all may never read the rest.
        if not self._reader.reusable or transport is None or transport.get_write_buffer_size():
            self.drop()
            return
        if self._paused:
            self.resume(now)
        self._used = True
        self._begun = False
        self._reader.expect()
        self.deadline = now + MAX_IDLE_S
        self._pool.idle.append(self)

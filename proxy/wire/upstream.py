"""Connections to workers: kept open, reused last-in first-out, given up before the worker does.

A worker may close an idle connection just as a request is put on it. Such a request was never
read, so it goes out again at once on a fresh connection, and nobody calls the worker failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import urlsplit

from proxy.wire.response import AnswerError, AnswerReader, Head

if TYPE_CHECKING:
    from proxy.core.worker import Worker, WorkerSpec
    from proxy.wire.settings import WireSettings

# uvicorn closes what was idle for 5 s.
MAX_IDLE_S = 4.0
# A request unanswered for longer was read: what killed the connection then was no old age.
STALE_S = 1.0


class Trouble(StrEnum):
    """How a worker failed a request; a label in metrics."""

    CONNECT = "connect"
    RESET = "reset"
    TIMEOUT = "timeout"
    BROKEN = "broken"  # what it said was no HTTP
    STATUS = "status"  # it answered with a 5xx or 429


class Caller(Protocol):
    """Who waits for a worker's answer. After `received(ended=True)` or `lost` it hears no more."""

    connection: WorkerConnection | None

    def begun(self, now: float, head: Head) -> None:
        """Hear that the head of the answer is there."""

    def received(self, now: float, body: bytes, ended: bool) -> None:
        """Take a piece of the body, perhaps empty, perhaps the last."""

    def lost(self, now: float, trouble: Trouble) -> None:
        """Hear that there will be no (more of the) answer."""


class WorkerConnection(asyncio.Protocol):
    """One connection to a worker, from before it is made."""

    __slots__ = (
        "_begun",
        "_paused",
        "_pool",
        "_reader",
        "_request",
        "_sent_at",
        "_transport",
        "_used",
        "caller",
        "deadline",
        "opening",
    )

    def __init__(self, pool: Pool) -> None:
        self.caller: Caller | None = None
        self.deadline = inf
        self.opening: asyncio.Task[None] | None = None
        self._pool = pool
        self._reader = AnswerReader()
        self._transport: asyncio.Transport | None = None
        self._request: tuple[bytes, ...] = ()
        self._sent_at = 0.0
        self._used = False  # an answer came over it before
        self._begun = False
        self._paused = False

    def send(self, now: float, caller: Caller, request: tuple[bytes, ...]) -> None:
        """Put a request on the connection, or keep it until there is one."""
        self.caller = caller
        self._request = request
        self._sent_at = now
        settings = self._pool.settings
        if self._transport is None:
            self.deadline = now + settings.connect_s
            return
        self.deadline = now + settings.first_byte_s
        for piece in request:
            self._transport.write(piece)

    def drop(self) -> None:
        """Walk away: whatever the worker does for the caller, it may stop doing."""
        self.caller = None
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
            self.deadline = now + self._pool.settings.idle_s
            self._transport.resume_reading()

    def expire(self, now: float) -> None:
        """Act on a deadline that has passed."""
        self.fail(now, Trouble.TIMEOUT)

    def fail(self, now: float, trouble: Trouble) -> None:
        """Close, and tell the caller if there is one."""
        caller, self.caller = self.caller, None
        self.drop()
        if caller is not None:
            caller.lost(now, trouble)

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
        if caller is None:
            self.drop()  # it speaks though nobody asked
            return
        try:
            reader.feed(data)
        except AnswerError:
            self.fail(now, Trouble.BROKEN)
            return
        self._tell(now, caller)

    def eof_received(self) -> None:
        """Let the transport close."""

    def connection_lost(self, error: Exception | None) -> None:
        """See whether that was the end, an accident, or nothing to anybody."""
        self._pool.forget(self)
        caller = self.caller
        if caller is None:
            return
        now = self._pool.clock()
        if error is None and self._reader.finish():
            self._tell(now, caller)
        elif self._used and not self._begun and now - self._sent_at < STALE_S:
            self.caller = None
            self._pool.open_for(now, caller, self._request)
        else:
            self.fail(now, Trouble.RESET)

    def _tell(self, now: float, caller: Caller) -> None:
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
        reusable = self._reader.reusable
        self.caller = None
        if not reusable:
            self.drop()
            return
        if self._paused:
            self.resume(now)
        self._used = True
        self._begun = False
        self._reader.expect()
        self.deadline = now + MAX_IDLE_S
        self._pool.idle.append(self)


class Pool:
    """The connections to one worker."""

    def __init__(
        self, spec: WorkerSpec, settings: WireSettings, clock: Callable[[], float]
    ) -> None:
        address = urlsplit(spec.url)
        self.spec = spec
        self.settings = settings
        self.clock = clock
        self.host = b"%b\r\n" % address.netloc.encode()  # two headers as sent; may be none
        key = spec.api_key
        self.authorization = b"Authorization: Bearer %b\r\n" % key.encode() if key else b""
        self.idle: list[WorkerConnection] = []
        self.open: set[WorkerConnection] = set()  # and being opened
        self._where = address.hostname or "", address.port or 80

    def send(self, now: float, caller: Caller, request: tuple[bytes, ...]) -> None:
        """Send a request on the connection that was used last, or on a new one."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_usable():
                caller.connection = connection
                connection.send(now, caller, request)
                return
        self.open_for(now, caller, request)

    def open_for(self, now: float, caller: Caller, request: tuple[bytes, ...]) -> None:
        """Send a request on a new connection."""
        connection = WorkerConnection(self)
        caller.connection = connection
        self.open.add(connection)
        connection.send(now, caller, request)
        connection.opening = asyncio.get_running_loop().create_task(self._open(connection))

    def forget(self, connection: WorkerConnection) -> None:
        """Let a closed connection go."""
        self.open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Act on deadlines that have passed."""
        for connection in [each for each in self.open if each.deadline < now]:
            connection.expire(now)

    async def _open(self, connection: WorkerConnection) -> None:
        host, port = self._where
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection, host, port)
        except OSError:
            connection.fail(self.clock(), Trouble.CONNECT)


class Pools:
    """A pool for each worker."""

    def __init__(self, settings: WireSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._pools: dict[str, Pool] = {}
        self._retired: list[Pool] = []  # of workers that left or moved, with requests in flight

    def of(self, worker: Worker) -> Pool:
        """Return the pool of this worker, a new one if its address or key has changed."""
        pool = self._pools.get(worker.name)
        spec = worker.spec
        if pool is not None and pool.spec is spec:
            return pool
        if pool is None or (pool.spec.url, pool.spec.api_key) != (spec.url, spec.api_key):
            if pool is not None:
                self._retire(pool)
            pool = self._pools[worker.name] = Pool(spec, self._settings, self._clock)
        pool.spec = spec
        return pool

    def sweep(self, now: float) -> None:
        """Act on deadlines that have passed, and forget pools that nobody uses."""
        for pool in self._retired:
            pool.sweep(now)
        for name, pool in list(self._pools.items()):
            pool.sweep(now)
            if not pool.open:
                del self._pools[name]
        self._retired = [pool for pool in self._retired if pool.open]

    def reconfigure(self, settings: WireSettings) -> None:
        """Take new limits."""
        self._settings = settings
        for pool in [*self._pools.values(), *self._retired]:
            pool.settings = settings

    def counts(self) -> Iterator[tuple[str, str, int]]:
        """Count connections by worker and state."""
        for name, pool in self._pools.items():
            yield name, "idle", len(pool.idle)
            yield name, "busy", len(pool.open) - len(pool.idle)

    def close(self) -> None:
        """Close all connections; nobody hears of it."""
        for pool in [*self._pools.values(), *self._retired]:
            for connection in list(pool.open):
                connection.drop()

    def _retire(self, pool: Pool) -> None:
        for connection in list(pool.idle):
            connection.drop()
        self._retired.append(pool)

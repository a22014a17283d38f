"""The connections to one worker.

A worker may close an idle connection as a request is sent. The request is sent again only if the
worker's kernel confirmed no byte: otherwise the worker may have acted on it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from enum import StrEnum
from math import inf
from typing import Protocol, cast
from urllib.parse import urlsplit

from proxy.core.model.specs import WorkerSpec
from proxy.http.response_parser import ResponseError, ResponseHead, ResponseParser
from proxy.net.resolver import NoAddressAnswersError, connect
from proxy.net.tls import TlsError, to_worker
from proxy.transfer.types import Side
from proxy.wire.exchange.stream_fast_path import StreamFastPath
from proxy.wire.settings import WireSettings
from proxy.wire.sockets import unacknowledged
from proxy.wire.worker.keepalive import PROBES_AND_TIMEOUT, enable_keepalive
from proxy.wire.write_batch import WriteBatch

logger = logging.getLogger(__name__)

# uvicorn closes connections after 5 s idle.
MAX_IDLE_S = 4.0
PORTS = {"http": 80, "https": 443}
# No file descriptors or socket memory.
LOCAL_ERRNOS = frozenset([errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
# No local port left, or no route, as to ::1 without IPv6.
NO_PORT = errno.EADDRNOTAVAIL
NO_ROUTE = frozenset([errno.ENETUNREACH, errno.EAFNOSUPPORT])  # unrelated to ports
MAX_HANDSHAKE_S = 60.0


class WorkerError(StrEnum):
    """How a request to a worker failed; a metric label."""

    CONNECT = "connect"
    RESET = "reset"
    TIMEOUT = "timeout"
    BROKEN = "broken"  # invalid HTTP
    STATUS = "status"  # a 5xx or 429
    OURS = "ours"  # no local resources
    DRAINED = "drained"  # it failed nothing: its requests go elsewhere
    LATE_TOKENS = "late_tokens"  # it got too few of a stream that it continues


class ResponseReceiver(Protocol):
    """The receiver of a response; `connection_failed` or the end of the body is the last call."""

    connection: WorkerConnection | None
    timeout_s: float  # until the response begins

    def response_begun(self, now: float, head: ResponseHead) -> None: ...

    def body_received(self, now: float, body: bytes, ended: bool) -> None:
        """Handle a piece of the body; may be empty."""

    def extra_wait_s(self, now: float) -> float:
        """Return the extra seconds to wait after `timeout_s`."""

    def connection_failed(self, now: float, error: WorkerError) -> None: ...


class ConnectionPool:
    """The connections to one worker; the latest used is reused first."""

    def __init__(
        self,
        spec: WorkerSpec,
        settings: WireSettings,
        clock: Callable[[], float],
        write_batch: WriteBatch,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.clock = clock
        self.write_batch = write_batch
        address = urlsplit(spec.url)
        self.host = b"%b\r\n" % address.netloc.encode()  # ends its line
        key = spec.api_key
        self.authorization = b"Authorization: Bearer %b\r\n" % key.encode() if key else b""
        self.idle: list[WorkerConnection] = []
        self.open: set[WorkerConnection] = set()  # or opening
        self._where = address.hostname or "", address.port or PORTS.get(address.scheme, 80)
        self.side = Side(spec.name, self._where[0])

    def send(self, now: float, caller: ResponseReceiver, request: tuple[bytes, ...]) -> None:
        while self.idle:
            connection = self.idle.pop()
            if connection.is_usable():
                caller.connection = connection
                connection.send(now, caller, request)
                return
        self.open_for(now, caller, request)

    def open_for(self, now: float, caller: ResponseReceiver, request: tuple[bytes, ...]) -> None:
        """Send a request on a new connection."""
        connection = WorkerConnection(self)
        caller.connection = connection
        self.open.add(connection)
        connection.send(now, caller, request)
        connection.opening = asyncio.get_running_loop().create_task(self._open(connection))

    def forget(self, connection: WorkerConnection) -> None:
        self.open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def sweep(self, now: float) -> None:
        for connection in [c for c in self.open if c.deadline < now]:
            connection.expire(now)

    async def _open(self, connection: WorkerConnection) -> None:
        host, port = self._where
        try:
            tls = to_worker(self.spec.tls)
            transport, _ = await connect(lambda: connection, host, port, tls, MAX_HANDSHAKE_S)
            enable_keepalive(transport, PROBES_AND_TIMEOUT)
        except (OSError, UnicodeError, TlsError) as error:  # UnicodeError: invalid host name
            connection.fail(
                self.clock(), WorkerError.OURS if is_local_failure(error) else WorkerError.CONNECT
            )


def is_local_failure(error: Exception) -> bool:
    """Return True if this machine lacks resources for a connection."""
    if not isinstance(error, NoAddressAnswersError):
        return isinstance(error, OSError) and (
            error.errno in LOCAL_ERRNOS or error.errno == NO_PORT
        )
    errnos = {failure.errno for failure in error.errors}
    return not LOCAL_ERRNOS.isdisjoint(errnos) or errnos - NO_ROUTE == {NO_PORT}


class WorkerConnection(asyncio.Protocol):
    """One connection to a worker, perhaps not open yet."""

    __slots__ = (
        "_begun", "_paused", "_pool", "_reader", "_request", "_transport", "_used", "caller",
        "deadline", "fast_path", "opening",
    )  # fmt: skip

    def __init__(self, pool: ConnectionPool) -> None:
        self.caller: ResponseReceiver | None = None
        self.deadline = inf
        self.opening: asyncio.Task[None] | None = None
        self.fast_path: StreamFastPath | None = None  # while the reader is between two chunks
        self._pool = pool
        self._reader = ResponseParser()
        self._transport: asyncio.Transport | None = None
        self._request: tuple[bytes, ...] = ()
        self._used = False  # has carried a response
        self._begun = False
        self._paused = False

    def send(self, now: float, caller: ResponseReceiver, request: tuple[bytes, ...]) -> None:
        self.caller = caller
        self._request = request
        if self._transport is None:
            self.deadline = now + self._pool.settings.connect_s
            return
        self.deadline = now + caller.timeout_s
        self._pool.write_batch.write(self._transport, *request)

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    @property
    def has_sent(self) -> bool:
        """True if the whole request has left this process."""
        transport = self._transport
        if transport is None or self._pool.write_batch.has_pending(transport):
            return False
        return not transport.get_write_buffer_size()

    def drop(self) -> None:
        """Close without a call to the caller."""
        self.caller = self.fast_path = None
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def pause(self) -> None:
        """Stop reading, and suspend the deadline."""
        if self._transport is not None and not self._paused:
            self._paused = True
            self.deadline = inf
            self._transport.pause_reading()

    def resume(self, now: float) -> None:
        if self._transport is not None and self._paused:
            self._paused = False
            # Without a response yet, an earlier response caused the pause.
            waits = None if self._begun else self.caller
            self.deadline = now + (waits.timeout_s if waits else self._pool.settings.idle_s)
            self._transport.resume_reading()

    def expire(self, now: float) -> None:
        waits = None if self._begun or self._transport is None else self.caller
        if waits is not None and (more_s := waits.extra_wait_s(now)) > 0:
            self.deadline = now + more_s
        else:
            self.fail(now, WorkerError.TIMEOUT)

    def fail(self, now: float, error: WorkerError) -> None:
        caller, self.caller = self.caller, None
        self.drop()
        if caller is not None:
            caller.connection_failed(now, error)

    def open_fast_path(self, fast_path: StreamFastPath) -> None:
        if self._reader.between_chunks:
            self.fast_path = fast_path

    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.opening = None
        if self.caller is None:
            self._transport.abort()
        else:
            self.send(self._pool.clock(), self.caller, self._request)

    def data_received(self, data: bytes) -> None:
        caller, reader = self.caller, self._reader
        now = self._pool.clock()
        if (fast_path := self.fast_path) is not None:
            if not self._paused:
                self.deadline = now + self._pool.settings.idle_s
            if fast_path.pass_on(now, data):
                return
            self.fast_path = None
        if caller is None:
            self.drop()  # unsolicited data
            return
        try:
            reader.feed(data)
        except ResponseError:
            self.fail(now, WorkerError.BROKEN)
            return
        self._pass_on(now, caller)

    def eof_received(self) -> None:
        if self._used and self._reader.untouched and self._is_unconfirmed():
            self._send_again()
        else:
            self._handle_end(proper=True)
        self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        """End or fail the response; TLS without `eof_received` may be truncated."""
        self._handle_end(proper=error is None and self._pool.spec.tls is None)

    def _handle_end(self, *, proper: bool) -> None:
        self._pool.forget(self)
        caller = self.caller
        if caller is None:
            return
        now = self._pool.clock()
        if proper and self._reader.finish():
            self._pass_on(now, caller)
        else:
            self.fail(now, WorkerError.RESET)

    def _is_unconfirmed(self) -> bool:
        """Return True if no byte of the request was confirmed.

        A FIN confirms all data before it; a reset confirms nothing.
        """
        transport, pool = self._transport, self._pool
        if self.caller is None or transport is None:
            return False
        if pool.write_batch.has_pending(transport):
            return True
        left = unacknowledged(transport)
        return left is not None and left >= sum(map(len, self._request))

    def _send_again(self) -> None:
        caller, self.caller = self.caller, None
        if caller is not None:
            self._pool.forget(self)
            self._pool.open_for(self._pool.clock(), caller, self._request)

    def _pass_on(self, now: float, caller: ResponseReceiver) -> None:
        """Pass on the parsed data; an exception fails the request, or its client would hang."""
        try:
            self._pass_parsed(now, caller)
        except Exception:
            logger.exception("cannot process a response from %s", self._pool.host.decode())
            self.drop()
            caller.connection = None
            caller.connection_failed(now, WorkerError.BROKEN)

    def _pass_parsed(self, now: float, caller: ResponseReceiver) -> None:
        """Pass on the parsed data; the caller may drop the connection."""
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
            caller.response_begun(now, head)
            if self.caller is not caller:
                return
        if ended:
            # Release first, for the next queued request.
            self._release(now)
        elif body and not self._paused:
            self.deadline = now + self._pool.settings.idle_s
        if body or ended:
            caller.body_received(now, body, ended)

    def _release(self, now: float) -> None:
        transport = self._transport
        self.caller = None
        # A worker that responds early may never read the rest.
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

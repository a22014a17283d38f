"""Pools of connections to workers; the latest used is reused first."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.net.resolver import NoAddressAnswersError, connect
from proxy.net.tls import TlsError, to_worker
from proxy.transfer.types import Side
from proxy.wire.worker.connection import (
    ConnectionOwner,
    ResponseReceiver,
    WorkerConnection,
    WorkerError,
)
from proxy.wire.worker.keepalive import PROBES_AND_TIMEOUT, enable_keepalive

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker
    from proxy.core.model.specs import WorkerSpec
    from proxy.wire.settings import WireSettings
    from proxy.wire.write_batch import WriteBatch


PORTS = {"http": 80, "https": 443}
# No file descriptors or socket memory.
LOCAL_ERRNOS = frozenset([errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
# No local port left, or no route, as to ::1 without IPv6.
NO_PORT = errno.EADDRNOTAVAIL
NO_ROUTE = frozenset([errno.ENETUNREACH, errno.EAFNOSUPPORT])  # unrelated to ports
MAX_HANDSHAKE_S = 60.0


class ConnectionPool(ConnectionOwner):
    """The connections to one worker."""

    def __init__(
        self,
        spec: WorkerSpec,
        settings: WireSettings,
        clock: Callable[[], float],
        outbox: WriteBatch,
    ) -> None:
        super().__init__(spec, settings, clock, outbox)
        address = urlsplit(spec.url)
        key = spec.api_key
        self.authorization = b"Authorization: Bearer %b\r\n" % key.encode() if key else b""
        self.open: set[WorkerConnection] = set()  # or opening
        self._where = address.hostname or "", address.port or PORTS.get(address.scheme, 80)
        self.side = Side(spec.name, self._where[0])

    def send(self, now: float, caller: ResponseReceiver, request: tuple[bytes, ...]) -> None:
        """Send a request on an idle connection or a new one."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_usable():
                caller.connection = connection
                connection.send(now, caller, request)
                return
        self.open_for(now, caller, request)

    def open_for(self, now: float, caller: ResponseReceiver, request: tuple[bytes, ...]) -> None:
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


def connection_key(spec: WorkerSpec) -> tuple[object, ...]:
    """Return the parts of a spec that connections depend on."""
    return spec.url, spec.api_key, spec.tls


class ConnectionPools:
    """The pools of all workers."""

    def __init__(
        self, settings: WireSettings, clock: Callable[[], float], outbox: WriteBatch
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._outbox = outbox
        self._pools: dict[str, ConnectionPool] = {}
        self._retired: list[ConnectionPool] = []  # removed or moved, with requests in flight

    def pool_for(self, worker: Worker) -> ConnectionPool:
        """Return the worker's pool; replace it if the address or key has changed."""
        pool = self._pools.get(worker.name)
        spec = worker.spec
        if pool is not None and pool.spec is spec:
            return pool
        if pool is None or connection_key(pool.spec) != connection_key(spec):
            if pool is not None:
                self._retire(pool)
            pool = self._pools[worker.name] = ConnectionPool(
                spec, self._settings, self._clock, self._outbox
            )
        pool.spec = spec
        return pool

    def sweep(self, now: float) -> None:
        """Expire connections and remove empty pools."""
        for pool in self._retired:
            pool.sweep(now)
        for name, pool in list(self._pools.items()):
            pool.sweep(now)
            # A timeout may have led to a new pool of this name.
            if not pool.open and self._pools.get(name) is pool:
                del self._pools[name]
        self._retired = [pool for pool in self._retired if pool.open]

    def reconfigure(self, settings: WireSettings) -> None:
        self._settings = settings
        for pool in [*self._pools.values(), *self._retired]:
            pool.settings = settings

    def counts(self) -> Iterator[tuple[str, str, int]]:
        """Return the connections by worker and state."""
        for name, pool in self._pools.items():
            yield name, "idle", len(pool.idle)
            yield name, "busy", len(pool.open) - len(pool.idle)

    def close(self) -> None:
        for pool in [*self._pools.values(), *self._retired]:
            for connection in list(pool.open):
                connection.drop()

    def _retire(self, pool: ConnectionPool) -> None:
        for connection in list(pool.idle):
            connection.drop()
        self._retired.append(pool)

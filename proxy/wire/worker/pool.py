"""The pools of connections to all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from proxy.core.fleet.worker import Worker
from proxy.core.model.specs import WorkerSpec
from proxy.wire.settings import WireSettings
from proxy.wire.worker.connection import ConnectionPool
from proxy.wire.write_batch import WriteBatch


def connection_key(spec: WorkerSpec) -> tuple[object, ...]:
    return spec.url, spec.api_key, spec.tls


class ConnectionPools:
    def __init__(
        self, settings: WireSettings, clock: Callable[[], float], write_batch: WriteBatch
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._write_batch = write_batch
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
                spec, self._settings, self._clock, self._write_batch
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
        for name, pool in self._pools.items():
            yield name, "idle", len(pool.idle)
            yield name, "busy", len(pool.open) - len(pool.idle)

    def busy(self) -> int:
        """Return the number of connections with a request."""
        return sum(len(pool.open) - len(pool.idle) for pool in self._pools.values())

    def close_idle(self) -> None:
        for pool in self._pools.values():
            drop_idle(pool)

    def close(self) -> None:
        for pool in [*self._pools.values(), *self._retired]:
            for connection in list(pool.open):
                connection.drop()

    def _retire(self, pool: ConnectionPool) -> None:
        drop_idle(pool)
        self._retired.append(pool)


def drop_idle(pool: ConnectionPool) -> None:
    for connection in list(pool.idle):
        connection.drop()

"""Adds discovered workers to the fleet and removes workers that are gone.

A worker that leaves or is not ready gets no new requests. A removed worker finishes its requests in
flight. `reconcile` decides which changes to believe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from pydantic import ValidationError

from proxy.config import DiscoveryConfig, FleetConfig, PoolConfig, WorkerConfig
from proxy.core.fleet.roster import Roster
from proxy.core.fleet.worker import Worker
from proxy.core.model.specs import WorkerSpec
from proxy.discovery.dns import DnsSource
from proxy.discovery.endpoints import Endpoints
from proxy.discovery.reconcile import DiscoveredPool

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5  # of pools, and of workers that are kept without being found


class AddressSource(Protocol):
    """A source of a pool's endpoints, such as DNS."""

    async def run(self, listener: DiscoveredPool) -> None:
        """Update the listener until cancelled."""


class DiscoveredWorker(NamedTuple):
    config: WorkerConfig
    takes_requests: bool


class Discovery:
    """Keeps a fleet in step with its discovered pools."""

    def __init__(
        self,
        roster: Roster,
        config: FleetConfig,
        keys: Mapping[str, str | None],
        spec_of: Callable[[WorkerConfig, FleetConfig], WorkerSpec],
        source_of: Callable[[DiscoveryConfig, PoolConfig], AddressSource] | None = None,
    ) -> None:
        self._roster = roster
        self._spec_of = spec_of
        self._source_of = source_of or source
        self._config = config
        self._added: dict[str, Worker] = {}
        self._drained: set[Worker] = set()  # here; an operator's drains stay
        self._refused: set[str] = set()  # already logged
        self._sources: dict[DiscoveredPool, AddressSource] = {}
        self._tasks: dict[DiscoveredPool, asyncio.Task[None]] = {}
        self._configure(config, keys)

    @property
    def pools(self) -> tuple[DiscoveredPool, ...]:
        return tuple(self._sources)

    def counts(self) -> list[tuple[str, bool, int]]:
        """Return each pool's name, whether its source works, and its number of workers."""
        return [
            (pool.config.name, pool.updated_at is not None and pool.why is None, len(pool.known))
            for pool in self.pools
        ]

    def pool_of(self, name: str) -> str:
        """Return the name of the pool in which a worker was found; empty for other workers."""
        pools = (pool.config.name for pool in self.pools if name in pool.known)
        return next(pools, "") if name in self._added else ""

    def endpoints_by_pool(self) -> dict[str, Endpoints]:
        """Return the endpoints of each pool, for a process that takes over."""
        return {pool.config.name: pool.known for pool in self.pools}

    def adopt(self, endpoints: Mapping[str, Endpoints]) -> None:
        """Take over endpoints and fleet from another process."""
        for pool in self.pools:
            pool.known = dict(endpoints.get(pool.config.name, {}))
        for name, found in self._discovered_workers().items():
            worker = self._roster.get(name)
            if worker is not None and worker.url == found.config.url:
                self._added[name] = worker
                if worker.draining and not found.takes_requests:
                    self._drained.add(worker)

    async def run(self) -> None:
        try:
            while True:
                self._update_tasks()
                self._drop_silent()
                await asyncio.sleep(CHECK_INTERVAL_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def reconfigure(self, config: FleetConfig, keys: Mapping[str, str | None]) -> list[WorkerSpec]:
        """Apply a new fleet file and keys; return the specs of all discovered workers.

        Pools with an unchanged source keep their workers. Raises `ProxyError` without any change.
        """
        self._configure(config, keys)
        return [
            self._spec_of(found.config, config) for found in self._discovered_workers().values()
        ]

    def reloaded(self) -> None:
        """Adopt the fleet after a reload, which has added all discovered workers."""
        workers = {name: self._roster.get(name) for name in self._discovered_workers()}
        self._added = {name: worker for name, worker in workers.items() if worker is not None}
        self._drained &= set(self._added.values())
        self._refused.clear()
        self.sync()

    def _configure(self, config: FleetConfig, keys: Mapping[str, str | None]) -> None:
        sources = []
        if (discovery := config.discovery) is not None:
            sources = [(pool, self._find_source(discovery, pool)) for pool in discovery.pools]
        # Nothing below can fail.
        for pool, (discovered, _) in sources:
            discovered.config, discovered.key = pool, keys[pool.name]
        self._sources = dict(source for _, source in sources)
        self._config = config
        # Requests for a model without workers, such as removed ones, get 503 instead of 404.
        named = [pool.model for pool, _ in sources] + [worker.model for worker in config.workers]
        self._roster.expect(model or config.model for model in named)

    def _find_source(
        self, discovery: DiscoveryConfig, pool: PoolConfig
    ) -> tuple[DiscoveredPool, AddressSource]:
        for discovered, source in self._sources.items():
            if self._is_same_source(discovered.config, pool, discovery):
                return discovered, source
        return DiscoveredPool(pool, self.sync), self._source_of(discovery, pool)

    def _is_same_source(self, old: PoolConfig, new: PoolConfig, discovery: DiscoveryConfig) -> bool:
        before = self._config.discovery
        return (
            before is not None
            and (before.kubernetes, before.dns_every_s)
            == (discovery.kubernetes, discovery.dns_every_s)
            and (old.name, old.selector, old.dns, old.port)
            == (new.name, new.selector, new.dns, new.port)
        )

    def _update_tasks(self) -> None:
        for pool in self._tasks.keys() - self._sources.keys():
            self._tasks.pop(pool).cancel()
        for pool, source in self._sources.items():
            task = self._tasks.get(pool)
            if task is None or task.done():
                if task is not None and not task.cancelled() and (error := task.exception()):
                    logger.error("discovery of pool %s failed", pool.config.name, exc_info=error)
                self._tasks[pool] = asyncio.create_task(source.run(pool), name="discovery")

    def _drop_silent(self) -> None:
        for pool in self.pools:
            silent = set()
            for name in pool.kept:
                worker = self._added.get(name)
                if worker is None or (worker.probed and not worker.up):
                    silent.add(name)
            if silent:
                pool.give_up(frozenset(silent))

    def sync(self) -> None:
        """Add, drain and remove workers as the pools require."""
        wanted = self._discovered_workers()
        for name, worker in list(self._added.items()):
            if name in wanted and wanted[name].config.url == worker.url:
                continue
            del self._added[name]
            self._drained.discard(worker)
            self._roster.remove(name)
            logger.info("worker %s at %s is gone", name, worker.url)
        for name, found in wanted.items():
            if (added := self._added.get(name) or self._add(found.config)) is not None:
                self._set_journal(added, found.config.journal)
                self._drain(added, draining=not found.takes_requests)

    def _add(self, config: WorkerConfig) -> Worker | None:
        for other in self._roster:
            if other.name == config.name or other.url == config.url:
                why = f"worker {other.name} at {other.url} is already in the fleet"
                self._refuse(f"{config.name} at {config.url}", why)
                return None
        worker = self._added[config.name] = self._roster.add(self._spec_of(config, self._config))
        logger.info("worker %s discovered at %s, role %s", worker.name, worker.url, config.role)
        return worker

    def _set_journal(self, worker: Worker, journal: tuple[str, ...]) -> None:
        if worker.spec.journal != journal:
            self._roster.respecify(worker, replace(worker.spec, journal=journal))

    def _drain(self, worker: Worker, *, draining: bool) -> None:
        if draining and not worker.draining:
            self._roster.drain(worker.name, starts=True)
            self._drained.add(worker)
        elif not draining and worker in self._drained:
            self._drained.discard(worker)
            self._roster.drain(worker.name, draining=False)

    def _discovered_workers(self) -> dict[str, DiscoveredWorker]:
        """Return the discovered workers by name; the file's workers win."""
        wanted: dict[str, DiscoveredWorker] = {}
        taken = {worker.url: worker.name for worker in self._config.workers}
        names = {worker.name for worker in self._config.workers}
        for pool in self.pools:
            for endpoint, useful in pool.members():
                if endpoint.leaving and endpoint.name not in self._added:
                    continue
                if endpoint.name in names or endpoint.url in taken:
                    continue
                name, url = endpoint.name, endpoint.url
                try:
                    worker = pool.config.worker(name, url, pool.key, endpoint.journal)
                except ValidationError as error:
                    self._refuse(f"{name} at {url}", str(error.errors()[0]["msg"]))
                    continue
                taken[url] = name
                names.add(name)
                wanted[name] = DiscoveredWorker(worker, useful)
        return wanted

    def _refuse(self, worker: str, why: str) -> None:
        if worker not in self._refused:
            self._refused.add(worker)
            logger.warning("discovered worker %s is not added: %s", worker, why)


def source(discovery: DiscoveryConfig, pool: PoolConfig) -> AddressSource:
    if pool.dns is not None:
        return DnsSource(discovery.dns_every_s, pool)
    from proxy.discovery.kubernetes import KubernetesSource  # the client library is 10 MB

    return KubernetesSource(discovery.kubernetes, pool)

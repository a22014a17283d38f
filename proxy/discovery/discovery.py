"""Keep the fleet what discovery says it is.

A worker that is found joins, one that leaves or isn't ready gets nothing new, one that is gone is
taken out; what it has in flight, it finishes. What is not believed is in `discovered`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from pydantic import ValidationError

from proxy.config import DiscoveryConfig, FleetConfig, PoolConfig, WorkerConfig
from proxy.discovery.dns import DnsSource
from proxy.discovery.endpoints import EndpointListener, Endpoints
from proxy.discovery.reconcile import DiscoveredPool

if TYPE_CHECKING:
    from proxy.core.fleet.charges import Fleet
    from proxy.core.fleet.worker import Worker
    from proxy.core.model.specs import WorkerSpec

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # at pools that came or went, and whether those that are kept still answer


class AddressSource(Protocol):
    """Somebody who knows where a pool's workers are."""

    async def run(self, listener: EndpointListener) -> None:
        """Tell the listener until cancelled."""


class Discovery:
    """Brings a fleet and its pools together."""

    def __init__(
        self,
        fleet: Fleet,
        config: FleetConfig,
        keys: Mapping[str, str | None],
        spec_of: Callable[[WorkerConfig, FleetConfig], WorkerSpec],
        source_of: Callable[[DiscoveryConfig, PoolConfig], AddressSource] | None = None,
    ) -> None:
        self._fleet = fleet
        self._spec_of = spec_of
        self._source_of = source_of or source
        self._config = config
        self._mine: dict[str, Worker] = {}  # as they were added; an operator may have removed some
        self._drained: set[Worker] = set()  # by us: what an operator drained stays so
        self._refused: set[str] = set()  # names and why, as they were logged
        self._sources: dict[DiscoveredPool, AddressSource] = {}
        self._tasks: dict[DiscoveredPool, asyncio.Task[None]] = {}
        self._take(config, keys)

    @property
    def pools(self) -> tuple[DiscoveredPool, ...]:
        """What is known of each."""
        return tuple(self._sources)

    def counts(self) -> list[tuple[str, bool, int]]:
        """Name every pool, say whether its workers are told now, and how many there are."""
        return [
            (pool.config.name, pool.heard_at is not None and pool.why is None, len(pool.known))
            for pool in self.pools
        ]

    def known(self) -> dict[str, Endpoints]:
        """Tell who is in each pool, for another process that may have to go on from here."""
        return {pool.config.name: pool.known for pool in self.pools}

    def adopt(self, known: Mapping[str, Endpoints]) -> None:
        """Go on from what another process knew; the fleet is as that one left it."""
        for pool in self.pools:
            pool.known = dict(known.get(pool.config.name, {}))
        for name, (config, useful) in self._wanted().items():
            worker = self._fleet.get(name)
            if worker is not None and worker.url == config.url:
                self._mine[name] = worker
                if worker.draining and not useful:
                    self._drained.add(worker)

    async def run(self) -> None:
        """Look for workers until cancelled."""
        try:
            while True:
                self._tend()
                self._doubt()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def reconfigure(self, config: FleetConfig, keys: Mapping[str, str | None]) -> list[WorkerSpec]:
        """Take a new fleet file, and each pool's key; return the workers found, as it has them.

        Pools that are looked for as before keep their workers. Raises `ProxyError` if the file
        can't be used, and then nothing has changed.
        """
        self._take(config, keys)
        return [self._spec_of(worker, config) for worker, _ in self._wanted().values()]

    def reloaded(self) -> None:
        """Go on with the fleet as it is after a reload: it has all that were found."""
        workers = {name: self._fleet.get(name) for name in self._wanted()}
        self._mine = {name: worker for name, worker in workers.items() if worker is not None}
        self._drained &= set(self._mine.values())
        self._refused.clear()
        self.sync()

    def _take(self, config: FleetConfig, keys: Mapping[str, str | None]) -> None:
        taken = []
        if (discovery := config.discovery) is not None:
            taken = [(pool, self._known(discovery, pool)) for pool in discovery.pools]
        # Nothing can fail any more.
        for pool, (known, _) in taken:
            known.config, known.key = pool, keys[pool.name]
        self._sources = dict(known for _, known in taken)
        self._config = config
        # To somebody who asks while nobody is there: 503, and not that there is no such model.
        self._fleet.expect(pool.model or config.model for pool, _ in taken)

    def _known(
        self, discovery: DiscoveryConfig, pool: PoolConfig
    ) -> tuple[DiscoveredPool, AddressSource]:
        """Find a pool among those that were, or begin to look for it."""
        for known, made in self._sources.items():
            if self._same(known.config, pool, discovery):
                return known, made
        return DiscoveredPool(pool, self.sync), self._source_of(discovery, pool)

    def _same(self, old: PoolConfig, new: PoolConfig, discovery: DiscoveryConfig) -> bool:
        before = self._config.discovery
        return (
            before is not None
            and (before.kubernetes, before.dns_every_s)
            == (discovery.kubernetes, discovery.dns_every_s)
            and (old.name, old.selector, old.dns, old.port)
            == (new.name, new.selector, new.dns, new.port)
        )

    def _tend(self) -> None:
        """Have a task for each pool, and for no other."""
        for pool in self._tasks.keys() - self._sources.keys():
            self._tasks.pop(pool).cancel()
        for pool, made in self._sources.items():
            task = self._tasks.get(pool)
            if task is None or task.done():
                if task is not None and not task.cancelled() and (error := task.exception()):
                    logger.error("discovery of pool %s failed", pool.config.name, exc_info=error)
                self._tasks[pool] = asyncio.create_task(made.run(pool), name="discovery")

    def _doubt(self) -> None:
        """Give up those that are kept and do not answer."""
        for pool in self.pools:
            silent = set()
            for name in pool.kept:
                worker = self._mine.get(name)
                if worker is None or (worker.probed and not worker.up):
                    silent.add(name)
            if silent:
                pool.give_up(frozenset(silent))

    # The fleet

    def sync(self) -> None:
        """Make the fleet what the pools say."""
        wanted = self._wanted()
        for name, worker in list(self._mine.items()):
            if name in wanted and wanted[name][0].url == worker.url:
                continue
            del self._mine[name]
            self._drained.discard(worker)
            if self._fleet.get(name) is worker:
                self._fleet.remove(name)
                logger.info("worker %s at %s is gone", name, worker.url)
        for name, (config, useful) in wanted.items():
            known = self._mine.get(name) or self._add(config)
            if known is not None:
                self._drain(known, draining=not useful)

    def _add(self, config: WorkerConfig) -> Worker | None:
        for other in self._fleet:
            if other.name == config.name or other.url == config.url:
                why = f"worker {other.name} at {other.url} is in the fleet already"
                self._refuse(f"{config.name} at {config.url}", why)
                return None
        worker = self._mine[config.name] = self._fleet.add(self._spec_of(config, self._config))
        logger.info("worker %s found at %s, for %s", worker.name, worker.url, config.role)
        return worker

    def _drain(self, worker: Worker, *, draining: bool) -> None:
        if self._fleet.get(worker.name) is not worker:
            return  # an operator took it out
        if draining and not worker.draining:
            self._fleet.drain(worker.name, starts=True)
            self._drained.add(worker)
        elif not draining and worker in self._drained:
            self._drained.discard(worker)
            self._fleet.drain(worker.name, draining=False)

    def _wanted(self) -> dict[str, tuple[WorkerConfig, bool]]:
        """Return each worker found, and whether it may be given anything; the file's come first."""
        wanted: dict[str, tuple[WorkerConfig, bool]] = {}
        taken = {worker.url: worker.name for worker in self._config.workers}
        names = {worker.name for worker in self._config.workers}
        for pool in self.pools:
            for endpoint, useful in pool.members():
                if endpoint.leaving and endpoint.name not in self._mine:
                    continue
                if endpoint.name in names or endpoint.url in taken:
                    continue
                try:
                    worker = pool.config.worker(endpoint.name, endpoint.url, pool.key)
                except ValidationError as error:
                    self._refuse(
                        f"{endpoint.name} at {endpoint.url}", str(error.errors()[0]["msg"])
                    )
                    continue
                taken[endpoint.url] = endpoint.name
                names.add(endpoint.name)
                wanted[endpoint.name] = worker, useful
        return wanted

    def _refuse(self, who: str, why: str) -> None:
        """Say once that somebody can't be taken in."""
        if who not in self._refused:
            self._refused.add(who)
            logger.warning("worker %s, found by discovery, is not taken in: %s", who, why)


def source(discovery: DiscoveryConfig, pool: PoolConfig) -> AddressSource:
    """Find who knows of a pool."""
    if pool.dns is not None:
        return DnsSource(discovery.dns_every_s, pool)
    from proxy.discovery.kubernetes import KubernetesSource  # the client library is 10 MB

    return KubernetesSource(discovery.kubernetes, pool)

"""What can be read of a fleet file in which something is wrong.

So that all of it is told at once: what is wrong in one place hides as little as can be of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from proxy.config.models import (
    FleetConfig,
    PoolConfig,
    RouterConfig,
    RoutingConfig,
    TransferConfig,
    WorkerConfig,
)
from proxy.config.tenants import TenantConfig
from proxy.config.tls import WorkerTlsConfig
from proxy.errors import Problem

Place = tuple[int | str, ...]  # as ("workers", 0, "url")
POOLS: Place = ("discovery", "pools")


class ProblemPaths:
    """The places in a file where something is wrong."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self._at = frozenset(places)
        self._above = frozenset(p[:n] for p in self._at for n in range(1, len(p) + 1))

    def about(self, place: Place) -> bool:
        """Whether anything is wrong with a place, in it, or with what it is in."""
        return place in self._above or any(place[:n] in self._at for n in range(1, len(place)))

    def about_any(self, blocks: Place, fields: Collection[str]) -> bool:
        """Whether these fields of any block in a list are in doubt, or the list itself."""
        size = len(blocks)
        for place in self._at:
            if place[:size] == blocks[: len(place)]:
                rest = place[size + 1 :]
                if not rest or rest[0] in fields:
                    return True
        return False


@dataclass(frozen=True, slots=True)
class PartialConfig:
    """The parts of a fleet file that can be read, without what is wrong in them.

    Workers by their place in it: all those that are legible, and among them those in which nothing
    is wrong by which another block is judged.
    """

    workers: Mapping[int, WorkerConfig] = field(default_factory=dict)
    legible_workers: Mapping[int, WorkerConfig] = field(default_factory=dict)
    router: RouterConfig | None = None
    routing: RoutingConfig | None = None
    transfer: TransferConfig | None = None
    worker_tls: WorkerTlsConfig | None = None
    moves: bool = False  # whether the file says anything of a transfer
    pools: Mapping[int, PoolConfig] = field(default_factory=dict)  # those that are discovered
    tenants: Mapping[int, TenantConfig] = field(default_factory=dict)
    has_tenants: bool = False  # whether the file names any
    model: str | None = None  # of workers that name none
    doubts: ProblemPaths = field(default_factory=ProblemPaths)

    @classmethod
    def of(cls, config: FleetConfig) -> PartialConfig:
        """Take all of a file that is right."""
        workers = dict(enumerate(config.workers))
        return cls(
            workers=workers,
            legible_workers=workers,
            router=config.router,
            routing=config.routing,
            transfer=config.transfer,
            worker_tls=config.worker_tls,
            moves=config.transfer is not None,
            pools=dict(enumerate(config.discovery.pools if config.discovery else ())),
            tenants=dict(enumerate(config.tenants)),
            has_tenants=bool(config.tenants),
            model=config.model,
        )

    def sure(self, place: Place, *fields: str) -> bool:
        """Whether fields of a block are what the file says, or what holds where it says nothing."""
        return not any(self.doubts.about((*place, each)) for each in fields)

    def sure_of_all(self, *fields: str) -> bool:
        """Whether that is so for every worker and pool, legible or not."""
        about_any = self.doubts.about_any
        return not about_any(("workers",), fields) and not about_any(POOLS, fields)

    def model_of(self, worker: WorkerConfig | PoolConfig) -> str | None:
        """Name what it serves."""
        return worker.model or self.model

    @property
    def everyone(self) -> list[WorkerConfig]:
        """Those that it names, and one for each pool of those that are discovered."""
        found = (pool.worker(pool.name, None) for pool in self.pools.values())
        return [*self.legible_workers.values(), *found]


Check = Callable[[PartialConfig], Iterable[Problem]]

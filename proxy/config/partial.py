"""The valid parts of a fleet file that has errors.

Checks run on these parts, so that one error hides few others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from proxy.config.fleet_file import RouterConfig, RoutingConfig, TransferConfig
from proxy.config.tenants import TenantConfig
from proxy.config.tls import WorkerTlsConfig
from proxy.config.workers import PoolConfig, WorkerConfig
from proxy.errors import Problem

Place = tuple[int | str, ...]  # a path in the file, as in ("workers", 0, "url")
POOLS: Place = ("discovery", "pools")


class ProblemPaths:
    """The places in a file that have errors."""

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self._at = frozenset(places)
        self._above = frozenset(p[:n] for p in self._at for n in range(1, len(p) + 1))

    def concerns(self, place: Place) -> bool:
        """Return whether a place, its contents or its surroundings have an error."""
        return place in self._above or any(place[:n] in self._at for n in range(1, len(place)))

    def concerns_any(self, blocks: Place, fields: Collection[str]) -> bool:
        """Return whether one of these fields has an error in any block of a list."""
        size = len(blocks)
        for place in self._at:
            if place[:size] == blocks[: len(place)]:
                rest = place[size + 1 :]
                if not rest or rest[0] in fields:
                    return True
        return False


@dataclass(frozen=True, slots=True)
class PartialConfig:
    """The valid parts of a fleet file; invalid fields have defaults.

    `workers` leaves out those with an error in a field that other checks use.
    """

    workers: Mapping[int, WorkerConfig] = field(default_factory=dict)
    legible_workers: Mapping[int, WorkerConfig] = field(default_factory=dict)
    router: RouterConfig | None = None
    routing: RoutingConfig | None = None
    transfer: TransferConfig | None = None
    worker_tls: WorkerTlsConfig | None = None
    has_transfer: bool = False  # even with errors
    pools: Mapping[int, PoolConfig] = field(default_factory=dict)  # by index in discovery.pools
    tenants: Mapping[int, TenantConfig] = field(default_factory=dict)
    has_tenants: bool = False  # even with errors
    model: str | None = None  # of workers without their own
    doubts: ProblemPaths = field(default_factory=ProblemPaths)

    def has_valid(self, place: Place, *fields: str) -> bool:
        """Return whether these fields of a block have no error."""
        return not any(self.doubts.concerns((*place, name)) for name in fields)

    def all_have_valid(self, *fields: str) -> bool:
        """Return whether these fields have no error in every worker and pool."""
        about_any = self.doubts.concerns_any
        return not about_any(("workers",), fields) and not about_any(POOLS, fields)

    def model_of(self, worker: WorkerConfig | PoolConfig) -> str | None:
        return worker.model or self.model

    @property
    def all_workers(self) -> list[WorkerConfig]:
        discovered = (pool.worker(pool.name, url=None) for pool in self.pools.values())
        return [*self.legible_workers.values(), *discovered]


Check = Callable[[PartialConfig], Iterable[Problem]]

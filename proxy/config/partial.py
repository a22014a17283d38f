"""A fleet file without its errors, and where they are.

Checks run on what is valid, so that one error hides few others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from proxy.config.fleet_file import FleetConfig
from proxy.config.workers import WorkerConfig
from proxy.errors import Problem

Place = tuple[int | str, ...]  # a path in the file, as in ("workers", 0, "url")
POOLS: Place = ("discovery", "pools")
# Fields that checks of other blocks depend on.
SHARED_FIELDS = frozenset([
    "name", "role", "model", "url", "host", "port", "args", "policies", "max_model_len",
    "connector", "mode", "path", "addresses", "selector", "dns", "policy", "short_limit",
    "models", "key_file", "keys", "tls",
])  # fmt: skip


class ProblemPaths:
    """The places in a file that have errors."""

    def __init__(self, places: Iterable[Place]) -> None:
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

    def concerns_shared(self, block: Place) -> bool:
        """Return whether a block, or a field in it that other checks use, has an error."""
        below = (place[len(block) :] for place in self._at if place[: len(block)] == block)
        return any(not inner or not SHARED_FIELDS.isdisjoint(inner) for inner in below)


@dataclass(frozen=True, slots=True)
class PartialConfig:
    """What is valid in a fleet file: fields with errors have their defaults."""

    config: FleetConfig
    doubts: ProblemPaths

    @property
    def workers(self) -> dict[int, WorkerConfig]:
        """The workers without an error in a field that other checks use."""
        workers = enumerate(self.config.workers)
        return {i: w for i, w in workers if not self.doubts.concerns_shared(("workers", i))}

    @property
    def all_workers(self) -> list[WorkerConfig]:
        """The workers of the file, and one for each pool."""
        discovered = (pool.worker(pool.name, url=None) for pool in self.config.pools)
        return [*self.config.workers, *discovered]

    @property
    def has_transfer(self) -> bool:
        """Whether the file has a transfer, even with errors."""
        return self.config.transfer is not None or self.doubts.concerns(("transfer",))

    def has_valid(self, place: Place, *fields: str) -> bool:
        """Return whether these fields of a block have no error."""
        return not any(self.doubts.concerns((*place, name)) for name in fields)

    def all_have_valid(self, *fields: str) -> bool:
        """Return whether these fields have no error in every worker and pool."""
        about_any = self.doubts.concerns_any
        return not about_any(("workers",), fields) and not about_any(POOLS, fields)


Check = Callable[[PartialConfig], Iterable[Problem]]

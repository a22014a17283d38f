"""The running requests of each lane."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class RunningLanes:
    """The lane and the admission time of each running request."""

    def __init__(self, lanes: Iterable[str]) -> None:
        self.counts = dict.fromkeys(lanes, 0)
        self._requests: dict[str, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, name: object) -> bool:
        return name in self._requests

    def get(self, name: str) -> tuple[str, float] | None:
        return self._requests.get(name)

    def add(self, name: str, lane: str, now: float) -> None:
        if name not in self._requests:
            self._requests[name] = (lane, now)
            self.counts[lane] += 1

    def discard(self, name: str) -> None:
        if (found := self._requests.pop(name, None)) is not None:
            self.counts[found[0]] -= 1

    def keep(self, names: Collection[str]) -> None:
        """Remove all other requests, which were preempted."""
        for name in self._requests.keys() - names:
            self.discard(name)

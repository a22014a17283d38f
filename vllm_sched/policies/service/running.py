"""The running requests of each lane."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class RunningLanes:
    """The running requests: lane and admission time of each, and their number by lane."""

    def __init__(self, lanes: Iterable[str]) -> None:
        self.counts = dict.fromkeys(lanes, 0)
        self.requests: dict[str, tuple[str, float]] = {}

    def add(self, name: str, lane: str, now: float) -> None:
        if name not in self.requests:
            self.requests[name] = (lane, now)
            self.counts[lane] += 1

    def discard(self, name: str) -> None:
        if (found := self.requests.pop(name, None)) is not None:
            self.counts[found[0]] -= 1

    def keep(self, names: Collection[str]) -> None:
        """Remove all other requests, which were preempted."""
        for name in self.requests.keys() - names:
            self.discard(name)

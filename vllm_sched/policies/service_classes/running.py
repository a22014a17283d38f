"""The running requests of each lane."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class RunningRequest(NamedTuple):
    lane: str
    admitted_at: float


class RunningLanes:
    """The running requests, and their number by lane."""

    def __init__(self, lanes: Iterable[str]) -> None:
        self.counts = dict.fromkeys(lanes, 0)
        self.requests: dict[str, RunningRequest] = {}

    def add(self, name: str, lane: str, now: float) -> None:
        if name not in self.requests:
            self.requests[name] = RunningRequest(lane, now)
            self.counts[lane] += 1

    def discard(self, name: str) -> None:
        if (request := self.requests.pop(name, None)) is not None:
            self.counts[request.lane] -= 1

    def discard_all_except(self, names: Collection[str]) -> None:
        """Remove the requests that were preempted."""
        for name in self.requests.keys() - names:
            self.discard(name)

"""The running requests of each lane."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class RunningRequest(NamedTuple):
    lane: str
    admitted_at: float


class RunningLanes:
    def __init__(self, lanes: Iterable[str]) -> None:
        self.counts = dict.fromkeys(lanes, 0)
        self.requests: dict[str, RunningRequest] = {}

    def add(self, request_id: str, lane: str, now: float) -> None:
        if request_id not in self.requests:
            self.requests[request_id] = RunningRequest(lane, now)
            self.counts[lane] += 1

    def discard(self, request_id: str) -> None:
        if (request := self.requests.pop(request_id, None)) is not None:
            self.counts[request.lane] -= 1

    def discard_all_except(self, request_ids: Collection[str]) -> None:
        """Remove the requests that were preempted."""
        for request_id in self.requests.keys() - request_ids:
            self.discard(request_id)

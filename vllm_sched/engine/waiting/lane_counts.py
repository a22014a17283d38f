"""Counts of waiting and held requests by lane, and the times of holds."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final

from vllm_sched.policies.types import LaneCount

LaneKey = tuple[str, ...]  # the lanes of a request, by policy

# With twice as many points, every other one of this many oldest is dropped.
OLD_POINTS: Final = 256


class HeldTime:
    """How long a policy held a lane: the sum over time, at both ends of each hold."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._sums: list[float] = []

    def add(self, start: float, end: float) -> None:
        """Add a hold; an overlap counts once."""
        times, sums = self._times, self._sums
        start = max(start, times[-1]) if times else start
        if end <= start:
            return
        if times and times[-1] == start:
            times[-1] = end
            sums[-1] += end - start
            return
        before = sums[-1] if sums else 0.0
        times += start, end
        sums += before, before + end - start
        if len(times) > 2 * OLD_POINTS:
            for points in (times, sums):
                del points[1:OLD_POINTS:2]

    def seconds_since(self, when: float) -> float:
        """Return the seconds of holds after `when`."""
        times, sums = self._times, self._sums
        after = bisect_right(times, when)
        if after == len(times):
            return 0.0
        if not after:
            return sums[-1] - sums[0]
        share = (when - times[after - 1]) / (times[after] - times[after - 1])
        return sums[-1] - sums[after - 1] - share * (sums[after] - sums[after - 1])


class LaneCounts:
    def __init__(self, num_policies: int) -> None:
        # For each policy, by its own lanes.
        self.by_policy: list[defaultdict[str, LaneCount]] = [
            defaultdict(LaneCount) for _ in range(num_policies)
        ]
        # Requests by the lanes of all policies.
        self.waiting: Counter[LaneKey] = Counter()
        # The first policy whose gate was closed to a lane's head.
        self.held_by: dict[LaneKey, int] = {}

    def add(self, lane_key: LaneKey, requests: int, tokens: int) -> None:
        """Add requests to a lane; negative numbers remove."""
        self.waiting[lane_key] += requests
        if not self.waiting[lane_key]:
            del self.waiting[lane_key]
        for counts, name in zip(self.by_policy, lane_key, strict=True):
            count = counts[name]
            count.requests += requests
            count.tokens += tokens

    def record_gate(self, lane_key: LaneKey, closed_by: int | None) -> None:
        if closed_by is None:
            self.held_by.pop(lane_key, None)
        else:
            self.held_by[lane_key] = closed_by

    def set_waits(self, heads: Iterable[tuple[LaneKey, float]]) -> None:
        for counts in self.by_policy:
            for count in counts.values():
                count.waited = 0.0
        for lane_key, waited in heads:
            for counts, name in zip(self.by_policy, lane_key, strict=True):
                count = counts[name]
                if waited > count.waited:
                    count.waited = waited

    def set_held(self, barred: Counter[LaneKey]) -> None:
        """Count held requests, and other requests that cannot begin."""
        for counts in self.by_policy:
            for count in counts.values():
                count.num_held = count.num_barred = 0
        for lane_key in self.held_by.keys() | barred.keys():
            held_by = self.held_by.get(lane_key)
            for number, (counts, name) in enumerate(zip(self.by_policy, lane_key, strict=True)):
                if held_by is None or held_by == number:
                    counts[name].num_barred += barred[lane_key]
                else:
                    counts[name].num_held += self.waiting[lane_key]

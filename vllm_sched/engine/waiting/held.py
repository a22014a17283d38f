"""How many requests wait in each lane, which of them are held, and for how long a lane was held.

A request is held while its lane is, and each request came at another time. What is kept of a lane's
holds is the sum over time, as a line with a point where a hold began and where it ended. Old points
are thinned out, so that a lane takes no more room however long requests wait in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final

from vllm_sched.policies.types import LaneCount

LaneKey = tuple[str, ...]  # a lane for each policy

# So many of the oldest points are thinned out, once there are twice as many.
MOST: Final = 256


class HeldTime:
    """Of one lane, by one policy."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._sums: list[float] = []

    def add(self, start: float, end: float) -> None:
        """Hear that it was held from then till then; what is known already counts once."""
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
        if len(times) > 2 * MOST:
            for kept in (times, sums):
                del kept[1:MOST:2]

    def since(self, when: float) -> float:
        """Return the time that it was held from then on."""
        times, sums = self._times, self._sums
        after = bisect_right(times, when)
        if after == len(times):
            return 0.0
        if not after:
            return sums[-1] - sums[0]
        share = (when - times[after - 1]) / (times[after] - times[after - 1])
        return sums[-1] - sums[after - 1] - share * (sums[after] - sums[after - 1])


class LaneCounts:
    """The requests that wait, counted by lane."""

    def __init__(self, num_policies: int) -> None:
        # For each policy, by its own lanes.
        self.by_policy: list[defaultdict[str, LaneCount]] = [
            defaultdict(LaneCount) for _ in range(num_policies)
        ]
        # How many wait where all policies' lanes meet, which is what a gate is asked for.
        self.here: Counter[LaneKey] = Counter()
        # The first policy whose gate was closed to a lane's front when it was asked last.
        self.held_by: dict[LaneKey, int] = {}

    def add(self, lane: LaneKey, requests: int, tokens: int) -> None:
        """Count requests that came into a lane; negative numbers count those that left."""
        self.here[lane] += requests
        if not self.here[lane]:
            del self.here[lane]
        for counts, name in zip(self.by_policy, lane, strict=True):
            count = counts[name]
            count.requests += requests
            count.tokens += tokens

    def held(self, lane: LaneKey, by: int | None) -> None:
        """Note which policy's gate was closed to this lane's front, if one was."""
        if by is None:
            self.held_by.pop(lane, None)
        else:
            self.held_by[lane] = by

    def note_waits(self, fronts: Iterable[tuple[LaneKey, float]]) -> None:
        """Take the longest wait of each lane from its fronts' waits."""
        for counts in self.by_policy:
            for count in counts.values():
                count.waited = 0.0
        for lane, waited in fronts:
            for counts, name in zip(self.by_policy, lane, strict=True):
                count = counts[name]
                if waited > count.waited:
                    count.waited = waited

    def note_held(self, barred: Counter[LaneKey]) -> None:
        """Count the held requests anew, and the rest that cannot begin: `barred`, by lane."""
        for counts in self.by_policy:
            for count in counts.values():
                count.held = count.barred = 0
        for lane in self.held_by.keys() | barred.keys():
            by = self.held_by.get(lane)
            for number, (counts, name) in enumerate(zip(self.by_policy, lane, strict=True)):
                if by is None or by == number:
                    counts[name].barred += barred[lane]
                else:
                    counts[name].held += self.here[lane]

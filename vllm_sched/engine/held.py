"""For how long a lane was held, between any time of the past and now.

A request is held while its lane is, and each came at another time: what is kept is the sum over
time, as a line with a point where a hold began and where it ended. Of long ago it is only rough, so
that a lane takes no more room however long anybody waits in it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

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

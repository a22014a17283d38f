"""Draw lengths from a table of quantiles."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

PERCENTS: Final = (5, 25, 50, 75, 90, 95, 99)
# The unpublished ends continue the table's slope, up to this factor.
MAX_TAIL_RATIO: Final = 1.5


class Quantiles:
    """A distribution given by a few quantiles, with geometric interpolation.

    The logarithm of lengths is uniform between two quantiles. Means are within a few percent of the
    published ones; a lognormal through p50 and p99 misses them by half.
    """

    def __init__(self, *values: float, percents: tuple[int, ...] = PERCENTS) -> None:
        """Take the values at `percents`, ascending."""
        low = max(1.0, values[0] ** 2 / values[1])
        high = values[-1] * min(MAX_TAIL_RATIO, values[-1] / values[-2])
        self._at = (0.0, *(percent / 100 for percent in percents), 1.0)
        self._values = (low, *values, high)
        self._logs = tuple(math.log(value) for value in self._values)

    def at(self, share: float) -> int:
        above = min(bisect_right(self._at, share), len(self._at) - 1)
        left, right = self._at[above - 1], self._at[above]
        low, high = self._logs[above - 1], self._logs[above]
        return max(1, round(math.exp(low + (high - low) * (share - left) / (right - left))))

    @property
    def mean(self) -> float:
        """The mean before rounding."""
        total = 0.0
        for i in range(len(self._at) - 1):
            low, high = self._values[i], self._values[i + 1]
            logs = self._logs[i + 1] - self._logs[i]
            total += (self._at[i + 1] - self._at[i]) * ((high - low) / logs if logs else low)
        return total

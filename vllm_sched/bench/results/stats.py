"""Percentiles, confidence intervals of a mean, and the growth of a queue."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

# Student's t at 97.5 % by degrees of freedom; above that the normal distribution is close enough.
T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
NORMAL_975: Final = 1.96


def percentile(samples: Iterable[float], percent: float) -> float | None:
    """Return a percentile with linear interpolation, as numpy does; None without samples."""
    ordered = sorted(samples)
    return percentile_of_sorted(ordered, percent) if ordered else None


def percentile_of_sorted(ordered: Sequence[float], percent: float) -> float:
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval, which is 0 for one sample.

    It uses Student's t, because seeds are few.
    """
    if len(samples) < 2:
        return (samples[0] if samples else math.nan), 0.0
    freedom = len(samples) - 1
    t = T_975[freedom - 1] if freedom <= len(T_975) else NORMAL_975
    return statistics.fmean(samples), t * statistics.stdev(samples) / math.sqrt(len(samples))


class Trend:
    """A linear fit of values over time from five sums."""

    __slots__ = ("_both", "_count", "_first", "_square", "_times", "_values")

    def __init__(self) -> None:
        self._count = 0
        self._first = 0.0  # the first time, subtracted from all others
        self._times = self._values = self._square = self._both = 0.0

    def add(self, at: float, value: float) -> None:
        if not self._count:
            self._first = at
        at -= self._first
        self._count += 1
        self._times += at
        self._values += value
        self._square += at * at
        self._both += at * value

    @property
    def growth(self) -> float:
        """The slope in seconds per second; 0 if it is negative or unknown."""
        count = self._count
        spread = count * self._square - self._times**2
        if count < 2 or spread <= 0:
            return 0.0
        return max((count * self._both - self._times * self._values) / spread, 0.0)

"""Whether a queue grows: how much longer requests take, the later they arrive.

The growth is the slope of a linear fit. If a queue grows by `growth` seconds per second, one in
`1 + growth` requests is served, even if few requests are late so far.
"""

from __future__ import annotations


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

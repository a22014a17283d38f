"""How much longer requests wait, the later they arrive: whether a queue grows.

The slope of a straight line through all of them, by five sums. A fleet that serves what arrives
has none; where a queue grows by so many seconds a second, one in `1 + growth` requests is served,
however few of them are late before the run ends.
"""

from __future__ import annotations


class Trend:
    """See the module's text."""

    __slots__ = ("_both", "_count", "_first", "_square", "_times", "_values")

    def __init__(self) -> None:
        self._count = 0
        self._first = 0.0  # time, from which the others are counted
        self._times = self._values = self._square = self._both = 0.0

    def add(self, at: float, value: float) -> None:
        """Count what was seen of a request that came at that time."""
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
        """Seconds a second; 0 of what falls, and of too few to tell."""
        count = self._count
        spread = count * self._square - self._times**2
        if count < 2 or spread <= 0:
            return 0.0
        return max((count * self._both - self._times * self._values) / spread, 0.0)

"""An event queue in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TypeAlias

Call: TypeAlias = Callable[[float], None]
# At equal times arrivals come before engine steps.
ARRIVAL_RANK, STEP_RANK = 0, 1


class EventQueue:
    """Scheduled calls, ordered by time, rank and insertion."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, int, Call]] = []
        self._numbers = count()

    def at(self, when: float, call: Call, *, rank: int = 0) -> None:
        """Schedule a call; a time in the past means now."""
        heappush(self._entries, (max(when, self.now), rank, next(self._numbers), call))

    def next_at(self) -> float:
        return self._entries[0][0] if self._entries else inf

    def step(self) -> None:
        self.now, _, _, call = heappop(self._entries)
        call(self.now)

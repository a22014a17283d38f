"""What is to happen when, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TypeAlias

Call: TypeAlias = Callable[[float], None]


class EventQueue:
    """Calls at their times; of one time those of a lower rank first, then as they were entered."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, int, Call]] = []
        self._numbers = count()

    def at(self, when: float, call: Call, *, rank: int = 0) -> None:
        """Enter a call; one that is late is made at once."""
        heappush(self._entries, (max(when, self.now), rank, next(self._numbers), call))

    def next_at(self) -> float:
        """When something happens next; inf if nothing does."""
        return self._entries[0][0] if self._entries else inf

    def step(self) -> None:
        """Make the next call."""
        self.now, _, _, call = heappop(self._entries)
        call(self.now)

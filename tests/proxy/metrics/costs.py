"""What something costs, by a measure that is as fast or slow as the machine itself."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from math import inf

ROUNDS, STEPS = 20, 1000


class Book:
    """Counts under keys, as simple as can be."""

    def __init__(self) -> None:
        self.lines = 0
        self.sums: dict[tuple[str, int], float] = {}

    def add(self, key: tuple[str, int], more: float) -> None:
        """Count once."""
        self.lines += 1
        self.sums[key] = (self.sums.get(key) or 0.0) + more


def in_steps(what: Callable[[], object], number: int) -> float:
    """Return how many times as long it takes as a small step of Python.

    The best of several rounds of so many, the two in turn: what else goes on costs both.
    """
    book = Book()

    def step() -> None:
        book.add(("a", 1), 0.5)

    it, one = inf, inf
    for _ in range(ROUNDS):
        it = min(it, timeit.timeit(what, number=number) / number)
        one = min(one, timeit.timeit(step, number=STEPS) / STEPS)
    return it / one

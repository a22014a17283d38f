"""The progress of a plan, in parts of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

Tell: TypeAlias = Callable[[str, float], None]  # activity, overall progress
T = TypeVar("T")


class PlanProgress:
    def __init__(self, tell: Tell | None = None) -> None:
        self.done = 0.0
        self._begin, self._width = 0.0, 1.0  # of the current part
        self._tell = tell

    def note(self, what: str) -> None:
        if self._tell is not None:
            self._tell(what, self.done)

    @contextmanager
    def part(self, begin: float, end: float) -> Iterator[None]:
        """Run the block as this part of the current part."""
        outer = self._begin, self._width
        self._begin += begin * self._width
        self._width *= end - begin
        self.done = max(self.done, self._begin)  # a repeated part does not go back
        yield
        self.done = max(self.done, self._begin + self._width)
        self._begin, self._width = outer

    def each(self, items: Sequence[T]) -> Iterator[T]:
        """Yield the items, each as an equal part of the current part."""
        for number, item in enumerate(items):
            with self.part(number / len(items), (number + 1) / len(items)):
                yield item

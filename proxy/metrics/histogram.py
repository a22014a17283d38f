"""Histograms; one observation takes a quarter of a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeVar

TTFT_BOUNDS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 3.0, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 120.0,
)  # fmt: skip
GAP_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
DURATION_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0,
    600.0, 1800.0,
)  # fmt: skip
PHASE_BOUNDS = (
    0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
# For clients that left without a token: dashboard targets and common timeouts.
LEFT_BOUNDS = (0.5, 1.0, 2.5, 3.0, 5.0, 10.0, 30.0, 60.0)
LAG_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
WAIT_BOUNDS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip

Labels = TypeVar("Labels")


class Histogram:
    """Counts per bucket, and the sum; a value equal to a bound belongs to the bucket below."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        # Last traced request by bucket: value, trace id and time.
        self.exemplars: dict[int, tuple[float, str, float]] | None = None

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def exemplify(self, value: float, trace: str, at: float) -> None:
        if self.exemplars is None:
            self.exemplars = {}
        self.exemplars[bisect_left(self.bounds, value)] = value, trace, at

    def cumulative(self) -> list[int]:
        """Return the counts at or below each bound; the last is the total."""
        return list(accumulate(self.counts))


class Histograms(dict[Labels, Histogram]):
    """Histograms by label values; a missing one is created."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        super().__init__()
        self.bounds = bounds

    def __missing__(self, labels: Labels) -> Histogram:
        created = self[labels] = Histogram(self.bounds)
        return created


def forget(table: dict[Labels, Any], is_gone: Callable[[Labels], bool]) -> None:
    """Remove the series of removed workers or models from a table."""
    for labels in [labels for labels in table if is_gone(labels)]:
        del table[labels]

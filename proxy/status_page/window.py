"""Growth of counters and histograms during the last minute.

A copy is taken every five seconds even without a viewer, so that a new page shows a whole minute.
It takes about 20 us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from proxy.metrics.histogram import Histogram

COPY_INTERVAL_S = 5.0
WINDOW_S = 60.0

Counts = dict[Hashable, int]
Histograms = dict[Hashable, list[int]]


class CountsCopy(NamedTuple):
    at: float
    counts: Counts
    histograms: Histograms


class Window:
    """Copies of the last minute, oldest first."""

    def __init__(self) -> None:
        self._copies: deque[CountsCopy] = deque()

    def copy(
        self, now: float, counts: Mapping[Any, int], histograms: Mapping[Any, Histogram]
    ) -> None:
        counted = {key: [*histogram.counts] for key, histogram in histograms.items()}
        self._copies.append(CountsCopy(now, dict(counts), counted))
        while len(self._copies) > 1 and self._copies[1].at <= now - WINDOW_S:
            self._copies.popleft()

    @property
    def since(self) -> float | None:
        return self._copies[0].at if self._copies else None

    def count(self, key: Hashable, now: int) -> int:
        before = self._copies[0].counts.get(key, 0) if self._copies else 0
        return max(now - before, 0)

    def of(self, key: Hashable, histogram: Histogram) -> list[int]:
        before = self._copies[0].histograms.get(key) if self._copies else None
        if before is None:
            return [*histogram.counts]
        # A histogram that was dropped and created again has lower counts.
        return [max(now - then, 0) for now, then in zip(histogram.counts, before, strict=True)]


def quantile(share: float, counts: Sequence[int], bounds: Sequence[float]) -> float | None:
    """Estimate a quantile from counts per bucket.

    Values above the last bound count as that bound. Values are assumed uniform within a bucket,
    as in PromQL's `histogram_quantile`.
    """
    total = sum(counts)
    if not total:
        return None
    rank, before = share * total, 0
    for index, count in enumerate(counts[: len(bounds)]):
        if count and before + count >= rank:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * max(rank - before, 0.0) / count
        before += count
    return bounds[-1]

"""Requests of which no first token is ever seen, so that no time to first token tells of them.

Clients that leave before there is one, and answers that are not streamed. A fleet whose worker
hangs looks as quick as ever to whoever asks those that stayed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from proxy.core.model.types import NONE
from proxy.metrics.exposition import OTHER, Family, MetricsPage
from proxy.metrics.histogram import DURATION_BOUNDS, LEFT_BOUNDS, Histogram

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker

# More of these than so many, and those of workers that left are dropped. Where nobody has, workers
# that are new have one name.
MOST = 1000
LOOK_EVERY_S = 60.0

LEFT = Family(
    "proxy_left_seconds",
    "histogram",
    "How long clients had waited that left before there was any of their answer, by the worker "
    "that they waited for; of a hand-over the one whose leg it was.",
    ("worker", "pool", "model", "class", "stream"),
)
WHOLE = Family(
    "proxy_whole_answer_seconds",
    "histogram",
    "From a request's arrival to the end of its answer, of answers that are not streamed.",
    ("pool", "model", "class"),
)
Key = tuple[str, str, str, str, str]


class NoFirstToken:
    """What is counted of them; models have the names that all families show."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.left: dict[tuple[str, ...], Histogram] = {}
        self.whole: dict[tuple[str, ...], Histogram] = {}
        self._workers = workers
        self._next_look = 0.0

    def gone(
        self, worker: str, pool: str, model: str, size: str, seconds: float, *, stream: bool
    ) -> None:
        """Count a client that left with nothing."""
        key = worker, pool, model, size, "true" if stream else "false"
        found = self.left.get(key) or self._new(key)
        found.observe(seconds)
        if not stream:
            self._whole(pool, model, size)  # or its share of such answers would be of nothing

    def answered(self, pool: str, model: str, size: str, seconds: float) -> None:
        """Count an answer that came in one piece."""
        self._whole(pool, model, size).observe(seconds)

    def forget_models(self, gone: set[str]) -> None:
        """Drop what was counted of models."""
        self.left = {key: each for key, each in self.left.items() if key[2] not in gone}
        self.whole = {key: each for key, each in self.whole.items() if key[1] not in gone}

    def show(self, page: MetricsPage) -> None:
        """Write all of it."""
        page.histograms(LEFT, self.left.items())
        page.histograms(WHOLE, self.whole.items())

    def _whole(self, pool: str, model: str, size: str) -> Histogram:
        key = pool, model, size
        if (found := self.whole.get(key)) is None:
            found = self.whole[key] = Histogram(DURATION_BOUNDS)
        return found

    def _new(self, key: Key) -> Histogram:
        if len(self.left) >= MOST and (now := time.monotonic()) >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            stay = {worker.name for worker in self._workers} | {NONE, OTHER}
            self.left = {each: found for each, found in self.left.items() if each[0] in stay}
        if len(self.left) >= MOST and key[0] != NONE:
            key = (OTHER, *key[1:])
        if (found := self.left.get(key)) is None:
            found = self.left[key] = Histogram(LEFT_BOUNDS)
        return found

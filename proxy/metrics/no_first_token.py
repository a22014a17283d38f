"""Histograms of requests without an observed first token.

Their client left before the first token, or their response is not streamed. Without these
histograms, a fleet with a hung worker would look fast.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from proxy.core.fleet.worker import Worker
from proxy.core.model.types import NONE
from proxy.metrics.exposition import OTHER, MetricsPage, histogram
from proxy.metrics.histogram import DURATION_BOUNDS, LEFT_BOUNDS, Histogram, Histograms, forget

# Above this many series, those of removed workers are dropped. If none can be dropped, new workers
# share the label `other`.
MAX_SERIES = 1000
CLEANUP_INTERVAL_S = 60.0

LEFT = histogram(
    "proxy_left_seconds",
    "Waiting time of clients that left before their response began, by the worker that they "
    "waited for; for a hand-over, the worker of the current leg.",
    ("worker", "pool", "model", "class", "stream"),
)
WHOLE = histogram(
    "proxy_whole_answer_seconds",
    "Time from arrival to the end of the response, for responses that are not streamed.",
    ("pool", "model", "class"),
)
Key = tuple[str, str, str, str, str]


class NoFirstToken:
    """Histograms of these requests, with the model labels of all metrics."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.left: Histograms[tuple[str, ...]] = Histograms(LEFT_BOUNDS)
        self.whole: Histograms[tuple[str, ...]] = Histograms(DURATION_BOUNDS)
        self._workers = workers
        self._next_cleanup = 0.0

    def observe_disconnect(
        self, worker: str, pool: str, model: str, size: str, seconds: float, *, stream: bool
    ) -> None:
        key = worker, pool, model, size, "true" if stream else "false"
        left = self.left.get(key) or self._new(key)
        left.observe(seconds)
        if not stream:
            # Creates the series, so that a share of such responses has a divisor.
            self.whole[pool, model, size]

    def observe_unstreamed(self, pool: str, model: str, size: str, seconds: float) -> None:
        self.whole[pool, model, size].observe(seconds)

    def forget_models(self, models: set[str]) -> None:
        forget(self.left, lambda key: key[2] in models)
        forget(self.whole, lambda key: key[1] in models)

    def show(self, page: MetricsPage) -> None:
        page.histograms(LEFT, self.left.items())
        page.histograms(WHOLE, self.whole.items())

    def _new(self, key: Key) -> Histogram:
        if len(self.left) >= MAX_SERIES and (now := time.monotonic()) >= self._next_cleanup:
            self._next_cleanup = now + CLEANUP_INTERVAL_S
            stay = {worker.name for worker in self._workers} | {NONE, OTHER}
            forget(self.left, lambda other: other[0] not in stay)
        if len(self.left) >= MAX_SERIES and key[0] != NONE:
            key = (OTHER, *key[1:])
        return self.left[key]

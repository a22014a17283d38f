"""How the router fares just now, as the status page shows it: written once a second."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from proxy.control.histogram import Histogram
from proxy.control.live_window import EVERY_S, Window, quantile
from proxy.control.scrape import VERSION
from proxy.control.shapes import state

if TYPE_CHECKING:
    from proxy.control.metrics import Metrics
    from proxy.core.worker import Worker

MOST_WORKERS = 500
MOST_LINES = 60  # of latencies
QUANTILES = (0.5, 0.99)
ANY = "all"


class LiveState:
    """What is counted, and how much of it is of the last minute."""

    def __init__(self, metrics: Metrics, draining: Callable[[], bool] = lambda: False) -> None:
        self._metrics = metrics
        self._draining = draining
        self._window = Window()

    async def run(self, clock: Callable[[], float]) -> None:
        """Remember the last minute, for ever."""
        while True:
            self.copy(clock())
            await asyncio.sleep(EVERY_S)

    def copy(self, now: float) -> None:
        """Keep what is counted by now."""
        self._window.copy(now, dict(self._counts()), dict(self._histograms()))

    def __call__(self, now: float) -> dict[str, Any]:
        """Describe everything."""
        metrics, since = self._metrics, self._window.since
        router = metrics.router
        workers = list(islice(router.fleet, MOST_WORKERS))
        queue = router.queue
        return {
            "version": VERSION,
            "policy": router.settings.policy,
            "draining": self._draining(),
            "covers_s": None if since is None else round(min(now - since, 60.0), 1),
            "clients": metrics.client_connections,
            "queue": {"requests": len(queue), "limit": queue.most, "bytes": queue.bytes},
            "workers": [_worker(worker, now) for worker in workers],
            "more_workers": max(len(router.fleet) - MOST_WORKERS, 0),
            "decisions": self._grown("decision"),
            "handovers": self._grown("handover"),
            "retries": self._grown("retry"),
            "latencies": list(islice(self._latencies(), MOST_LINES)),
        }

    def _counts(self) -> Iterator[tuple[Hashable, int]]:
        """Yield counters, each with what it is of and the name it is shown by."""
        metrics = self._metrics
        decisions: Counter[str] = Counter()
        for (_, reason), count in metrics.router.decisions.items():
            decisions[reason.value] += count
        retries: Counter[str] = Counter()
        for (_, why), count in metrics.retries.items():
            retries[why] += count
        for kind, table in (
            ("decision", decisions),
            ("handover", metrics.handovers.ends),
            ("retry", retries),
        ):
            for name, count in table.items():
                yield (kind, name), count

    def _histograms(self) -> Iterator[tuple[Hashable, Histogram]]:
        """Yield histograms by what they measure, pool, model and class."""
        metrics = self._metrics
        for kind, table in (("TTFT", metrics.ttft), ("TPOT", metrics.tpot)):
            for key, histogram in table.items():
                yield (kind, *key), histogram
        for pool, histogram in metrics.gaps.items():
            yield ("ITL", pool, ANY, ANY), histogram

    def _grown(self, kind: str) -> list[tuple[str, int, int]]:
        """List counters of a kind: name, since the start, in the last minute; most first."""
        found = [
            (key[1], count, self._window.count(key, count))
            for key, count in self._counts()
            if isinstance(key, tuple) and key[0] == kind
        ]
        return sorted(found, key=lambda each: (-each[2], -each[1], each[0]))

    def _latencies(self) -> Iterator[dict[str, Any]]:
        for key, histogram in self._histograms():
            counts = self._window.of(key, histogram)
            if not any(counts) or not isinstance(key, tuple):
                continue
            kind, pool, model, size = key
            p50, p99 = (quantile(share, counts, histogram.bounds) for share in QUANTILES)
            yield {
                "what": kind, "pool": pool, "model": model, "size": size,
                "count": sum(counts), "p50_s": p50, "p99_s": p99,
            }  # fmt: skip


def _worker(worker: Worker, now: float) -> dict[str, Any]:
    gauges = worker.gauges
    return {
        "name": worker.name,
        "role": worker.role.value,
        "model": worker.model,
        "state": state(worker),
        "breaker": worker.breaker.state(now).value,
        "requests": worker.requests,
        "most": worker.max_requests,
        "prefill_tokens": worker.prefill_tokens,
        "decode_tokens": worker.decode_tokens,
        "wait_s": round(worker.wait_s(now, for_long=True), 3),
        "running": None if gauges is None else gauges.running,
        "waiting": None if gauges is None else gauges.waiting,
        "kv_usage": None if gauges is None else round(gauges.kv_usage, 4),
    }

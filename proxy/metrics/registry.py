"""The router's counters.

The data path feeds plain integers: `count_request` takes 1 us, 2 us for a stream with phases, and
a gap between tokens 0.2 us. A metrics library's label lookup alone takes longer. Values that other
objects keep (decisions, charges, breakers) are read at each scrape.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from proxy.core.fleet.leases import Lease
from proxy.core.model.finished_request import FinishedRequest
from proxy.core.model.route_table import BY_NAME
from proxy.core.model.types import NONE, Reason, RequestInfo
from proxy.core.router import Router
from proxy.core.tenants.tenants import Rank
from proxy.http.trace import Trace
from proxy.metrics.batch_counts import BatchCounts
from proxy.metrics.exposition import OTHER
from proxy.metrics.handovers import HandoverCounters
from proxy.metrics.histogram import (
    DURATION_BOUNDS,
    GAP_BOUNDS,
    LAG_BOUNDS,
    TTFT_BOUNDS,
    WAIT_BOUNDS,
    Histogram,
    Histograms,
    forget,
)
from proxy.metrics.journal_counts import JournalCount
from proxy.metrics.no_first_token import NoFirstToken
from proxy.metrics.observed import ObservedRequest, Recorder
from proxy.metrics.phases import Phases
from proxy.metrics.recent import RecentRequests
from proxy.metrics.target_counts import TargetCounts
from proxy.metrics.tenant_counts import TenantCounts

MAX_MODELS = 100
# Above this, series of removed workers are dropped; if there are none, new workers become `other`.
MAX_SERIES = 20_000
CLEANUP_INTERVAL_S = 60.0  # the search for removed workers takes milliseconds

# Route, model, worker, pool, reason, status, class.
RequestKey = tuple[str, str, str, str, str, int, str]
ConnectionCount = tuple[str, str, int]  # worker, state (`idle` or `busy`), how many
PoolCount = tuple[str, bool, int]  # a discovered pool, whether discovery works, number of workers
# Class labels of requests.
SHORT, LONG, BATCH = "short", "long", "batch"
BATCHES = Rank.BATCH
CLIENT_GONE = 499  # nginx's code for a client disconnect; used in metrics only
FAULTY = 400


@dataclass(slots=True)
class Series:
    """Requests that share all labels, and the histograms that they feed."""

    model: str  # the label of all families
    ttft: Histogram
    predicted: Histogram
    tpot: Histogram
    duration: Histogram
    wait: Histogram
    phases: Phases
    count: int = 0


def class_of(info: RequestInfo | None) -> str:
    """Return the class label of a request; `none` if unparsed."""
    if info is None:
        return NONE
    if info.rank is BATCHES:
        return BATCH
    return LONG if info.long else SHORT


class Metrics:
    def __init__(self, router: Router) -> None:
        self.router = router
        self.recent = RecentRequests()
        self.live: Recorder | None = None  # set while the status page is open
        self.keeps_prompts = False  # True if an observer of finished requests needs the prompts
        self.begin_trace: Callable[[bytes | None], Trace] | None = None  # set if tracing is on
        # Called for each finished request: the log, traces.
        self.at_end: tuple[Callable[[ObservedRequest, float, str, int, Reason], None], ...] = ()
        self.client_connections = 0
        self.connects_failed = 0  # because this machine had no free files, ports or memory
        # Replaced by their owners.
        self.upstream_connections: Callable[[], Iterable[ConnectionCount]] = tuple
        self.under_way: Callable[[], Iterable[ObservedRequest]] = tuple
        self.log_lines_dropped: Callable[[], int] = int
        self.discovered: Callable[[], Iterable[PoolCount]] = tuple
        self.limits_shared: Callable[[], bool] = lambda: True
        self.journals: Callable[[], Iterable[JournalCount]] = tuple
        self.batches: BatchCounts | None = None  # set if batches are on
        self.loop_lag = Histogram(LAG_BOUNDS)
        self.requests: dict[RequestKey, Series] = {}
        self.retries: Counter[tuple[str, str]] = Counter()
        self.continuations: Counter[str] = Counter()  # by the worker that failed
        self.lost_streams: Counter[str] = Counter()  # by reason
        self.gaps: Histograms[tuple[str, ...]] = Histograms(GAP_BOUNDS)
        self.ttft: Histograms[tuple[str, ...]] = Histograms(TTFT_BOUNDS)
        self.predicted: Histograms[tuple[str, ...]] = Histograms(TTFT_BOUNDS)
        self.tpot: Histograms[tuple[str, ...]] = Histograms(GAP_BOUNDS)
        self.durations: Histograms[tuple[str, ...]] = Histograms(DURATION_BOUNDS)
        self.waits: Histograms[tuple[str, ...]] = Histograms(WAIT_BOUNDS)
        self.phases: dict[tuple[str, ...], Phases] = {}
        self.handovers = HandoverCounters(self.model_label)
        self.tenants = TenantCounts(router.tenants)
        self.targets = TargetCounts()
        self.no_first_token = NoFirstToken(router.fleet.roster)
        self._models: set[str] = set()
        self._next_cleanup = 0.0

    def count_request(self, finished: FinishedRequest) -> None:
        worker, pool, size, status = finished.worker, finished.pool, finished.size, finished.status
        key = finished.route, finished.model, worker, pool, finished.reason, status, size
        duration_s, queue_s, ttft_s = finished.duration_s, finished.queue_s, finished.ttft_s
        series = self.requests.get(key) or self._series(key)
        series.count += 1
        series.duration.observe(duration_s)
        series.wait.observe(queue_s)
        if ttft_s is not None:
            series.ttft.observe(ttft_s)
            if (predicted := finished.predicted_ttft_s) is not None:
                series.predicted.observe(predicted)
            if (tpot_s := finished.tpot_s) is not None:
                series.tpot.observe(tpot_s)
            series.phases.observe(finished)
        elif (stream := finished.stream) is not None:
            if status == CLIENT_GONE:
                worker, pool = finished.leg or (worker, pool)
                self.no_first_token.observe_disconnect(
                    worker, pool, series.model, size, duration_s, stream=stream
                )
            elif not stream and status < FAULTY:
                self.no_first_token.observe_unstreamed(pool, series.model, size, duration_s)

    def attach_trace(self, finished: FinishedRequest, trace: str) -> None:
        """Attach a trace id to the time to first token of a counted request."""
        series = self.ttft.get((finished.pool, self.model_label(finished.model), finished.size))
        if series is not None and finished.ttft_s is not None:
            series.exemplify(finished.ttft_s, trace, round(time.time(), 3))

    def gaps_of(self, pool: str, size: str) -> Histogram:
        return self.gaps[pool, size]

    def count_retry(self, worker: str, why: str) -> None:
        """Count a leg that failed on `worker` and is retried; `why` has few values."""
        self.retries[worker, why] += 1

    def count_continuation(self, worker: str) -> None:
        """Count a stream that goes on from another worker than this one, which failed."""
        self.continuations[worker] += 1

    def count_lost_stream(self, why: str) -> None:
        """Count a stream that could not be continued; `why` has few values."""
        self.lost_streams[why] += 1

    def count_failed_handover(self, lease: Lease, *, sent_to_decode: bool) -> None:
        """Count a hand-over that failed before the client got a byte."""
        after = "decode_failed" if sent_to_decode else "given_up"
        self.handovers.count_end(after if lease.sent else "prefill_failed")

    def count_left_handover(self, lease: Lease) -> None:
        self.handovers.count_end("client_left_decode" if lease.sent else "client_left_prefill")

    def model_label(self, model: str) -> str:
        """Return the label of a model; `other` for models that no worker serves."""
        models = self._models
        if model in models:
            return model
        serves = self.router.fleet.roster.serves
        if not serves(model):
            return OTHER
        if len(models) >= MAX_MODELS and self._cleanup_due():
            self._forget_models({name for name in models if not serves(name)})
        if len(models) >= MAX_MODELS:
            return OTHER
        models.add(model)
        return model

    def _series(self, key: RequestKey) -> Series:
        """Return or create a series; names that clients invent become `other`."""
        route, model, worker, pool, reason, status, size = key
        model = self.model_label(model)
        route = route if route in BY_NAME else OTHER
        key = route, model, worker, pool, str(reason), status, size
        if key not in self.requests and len(self.requests) >= MAX_SERIES:
            if self._cleanup_due():
                self._drop_removed_workers()
            if len(self.requests) >= MAX_SERIES:
                worker = OTHER if worker != NONE else NONE
                key = route, model, worker, pool, str(reason), status, size
        if (series := self.requests.get(key)) is None:
            series = self.requests[key] = Series(
                model,
                self.ttft[pool, model, size],
                self.predicted[pool, model, size],
                self.tpot[pool, model, size],
                self.durations[pool, route, size],
                self.waits[pool, model, size],
                self.phases.setdefault((pool, model, size), Phases()),
            )
        return series

    def _cleanup_due(self) -> bool:
        if (now := time.monotonic()) < self._next_cleanup:
            return False
        self._next_cleanup = now + CLEANUP_INTERVAL_S
        return True

    def _drop_removed_workers(self) -> None:
        stay = {worker.name for worker in self.router.fleet.roster} | {NONE, OTHER}
        forget(self.requests, lambda key: _worker_of(key) not in stay)
        forget(self.retries, lambda key: key[0] not in stay)
        forget(self.continuations, lambda worker: worker not in stay)

    def _forget_models(self, models: set[str]) -> None:
        self._models -= models
        router = self.router
        # Replaced, not changed, because a scrape may be iterating over them. Otherwise the counts
        # would become `other`.
        router.placer.decisions = {
            key: n for key, n in router.placer.decisions.items() if key[0] not in models
        }
        router.placer.handovers = {
            key: n for key, n in router.placer.handovers.items() if key[0] not in models
        }
        self.handovers.forget_models(models)
        self.no_first_token.forget_models(models)
        forget(self.requests, lambda key: _model_of(key) in models)
        tables: tuple[dict[tuple[str, ...], Any], ...] = (
            self.ttft, self.predicted, self.tpot, self.waits, self.phases
        )  # fmt: skip
        for table in tables:
            forget(table, lambda key: key[1] in models)


def _model_of(key: RequestKey) -> str:
    return key[1]


def _worker_of(key: RequestKey) -> str:
    return key[2]

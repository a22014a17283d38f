"""What the router counts while it works.

Fed from the data path, so plain integers in plain tables: `request_done` takes 1 us, 2 where a
stream has phases, and a gap between tokens 0.2 us, where a label lookup of a metrics library alone
takes more. What others count already (decisions, charges, breakers) is read from them when somebody
scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from proxy.core.model.route_table import BY_NAME
from proxy.core.model.types import NONE
from proxy.core.tenants.tenants import Rank
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
)
from proxy.metrics.no_first_token import NoFirstToken
from proxy.metrics.phases import Phases
from proxy.metrics.recent import RecentRequests
from proxy.metrics.tenant_counts import TenantCounts

if TYPE_CHECKING:
    from proxy.core.fleet.leases import Lease
    from proxy.core.model.types import Reason, RequestInfo
    from proxy.core.router import Router
    from proxy.http.trace import Trace
    from proxy.metrics.observed import ObservedRequest, Recorder

MAX_MODELS = 100
# More series of this kind than so many, and those of workers that left are dropped. Where nobody
# has, workers that are new have one name.
MAX_SERIES = 20_000
LOOK_EVERY_S = 60.0  # whether somebody has left; to look takes milliseconds

# route, model, worker, pool, reason, status, class
RequestKey = tuple[str, str, str, str, str, int, str]
ConnectionCount = tuple[str, str, int]  # worker, state (`idle` or `busy`), how many
PoolCount = tuple[str, bool, int]  # a pool that is discovered, whether that works, how many
# The class of a request: of those that are meant to wait, neither that of shorts nor that of longs.
SHORT, LONG, BATCH = "short", "long", "batch"
BATCHES = Rank.BATCH
CLIENT_GONE = 499  # as nginx calls it; in metrics alone
FAULTY = 400


class Series:
    """Requests that share all their labels, and the histograms that they feed."""

    __slots__ = ("count", "duration", "model", "phases", "predicted", "tpot", "ttft", "wait")

    def __init__(
        self,
        model: str,
        ttft: Histogram,
        predicted: Histogram,
        tpot: Histogram,
        duration: Histogram,
        wait: Histogram,
        phases: Phases,
    ) -> None:
        self.count = 0
        self.model = model  # as all families show it
        self.ttft = ttft
        self.predicted = predicted
        self.tpot = tpot
        self.duration = duration
        self.wait = wait
        self.phases = phases


def class_of(ask: RequestInfo | None) -> str:
    """Return the class of a request; of one that was never read there is none."""
    if ask is None:
        return NONE
    if ask.rank is BATCHES:
        return BATCH
    return LONG if ask.long else SHORT


def histogram(
    table: dict[tuple[str, ...], Histogram], key: tuple[str, ...], bounds: tuple[float, ...]
) -> Histogram:
    """Find or make the histogram of these labels."""
    if (found := table.get(key)) is None:
        found = table[key] = Histogram(bounds)
    return found


class Metrics:
    """All counts of one router."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.recent = RecentRequests()
        self.live: Recorder | None = None  # while somebody looks at the status page
        self.keeps_prompts = False  # whether whoever is told of ends wants them
        self.begin_trace: Callable[[bytes | None], Trace] | None = None  # where there is tracing
        # Who is told of each request that is over: the log, traces.
        self.at_end: tuple[Callable[[ObservedRequest, float, str, int, Reason], None], ...] = ()
        self.client_connections = 0
        self.connects_failed = 0  # because this machine had no room
        # Replaced by whoever owns the connections.
        self.upstream_connections: Callable[[], Iterable[ConnectionCount]] = tuple
        self.under_way: Callable[[], Iterable[ObservedRequest]] = tuple
        self.log_lines_dropped: Callable[[], int] = int  # replaced by whoever writes the log
        # Replaced by whoever looks for workers.
        self.discovered: Callable[[], Iterable[PoolCount]] = tuple
        self.batches: BatchCounts | None = None  # set where batches are on
        self.loop_lag = Histogram(LAG_BOUNDS)
        self.requests: dict[RequestKey, Series] = {}
        self.retries: dict[tuple[str, str], int] = {}
        self.gaps: dict[tuple[str, ...], Histogram] = {}
        self.ttft: dict[tuple[str, ...], Histogram] = {}
        self.predicted: dict[tuple[str, ...], Histogram] = {}
        self.tpot: dict[tuple[str, ...], Histogram] = {}
        self.durations: dict[tuple[str, ...], Histogram] = {}
        self.waits: dict[tuple[str, ...], Histogram] = {}
        self.phases: dict[tuple[str, ...], Phases] = {}
        self.handovers = HandoverCounters(self.model_label)
        self.tenants = TenantCounts(router.tenants)
        self.unseen = NoFirstToken(router.fleet)
        self._models: set[str] = set()
        self._next_look = 0.0

    def request_done(
        self,
        route: str,
        model: str,
        worker: str,
        reason: str,
        status: int,
        ttft_s: float | None,
        duration_s: float,
        queue_s: float,
        pool: str = NONE,
        predicted_ttft_s: float | None = None,
        size: str = NONE,
        tpot_s: float | None = None,
        stream: bool | None = None,
        leg: tuple[str, str] | None = None,
        placed_s: float | None = None,
        leg_s: float | None = None,
        *,
        fetched: bool = False,
    ) -> None:
        """Count a request that was answered.

        `worker` and `pool` (its role) are `none` if it was refused, `size` (its class) if it was
        never read. `ttft_s`, from its arrival, is None where no first token was seen; the
        prediction, counted from there too, counts only beside a real one. `tpot_s` is the mean
        time between its tokens, None where there were not two. `stream` is None where nothing was
        to be computed; `leg` is another worker and pool than these that a client waited for.
        The rest is for `Phases`.
        """
        key = route, model, worker, pool, reason, status, size
        series = self.requests.get(key) or self._series(key)
        series.count += 1
        series.duration.observe(duration_s)
        series.wait.observe(queue_s)
        if ttft_s is not None:
            series.ttft.observe(ttft_s)
            if predicted_ttft_s is not None:
                series.predicted.observe(predicted_ttft_s)
            if tpot_s is not None:
                series.tpot.observe(tpot_s)
            if placed_s is not None:
                series.phases.ended(placed_s, queue_s, leg_s, ttft_s, duration_s, fetched=fetched)
        elif stream is not None:
            if status == CLIENT_GONE:
                worker, pool = leg or (worker, pool)
                self.unseen.gone(worker, pool, series.model, size, duration_s, stream=stream)
            elif not stream and status < FAULTY:
                self.unseen.answered(pool, series.model, size, duration_s)

    def traced(self, pool: str, model: str, size: str, ttft_s: float, trace: str) -> None:
        """Name the trace of a request that was counted, beside its time to first token."""
        if (found := self.ttft.get((pool, self.model_label(model), size))) is not None:
            found.exemplify(ttft_s, trace, round(time.time(), 3))

    def gaps_of(self, pool: str, size: str) -> Histogram:
        """Find what is to be fed with the times between two events of a stream."""
        return histogram(self.gaps, (pool, size), GAP_BOUNDS)

    def retried(self, worker: str, why: str) -> None:
        """Count a leg that failed on `worker` and is tried elsewhere; `why` is of a fixed few."""
        key = worker, why
        self.retries[key] = self.retries.get(key, 0) + 1

    def handover_failed(self, lease: Lease, *, was_asked: bool) -> None:
        """Count a hand-over that failed before the client got anything.

        `was_asked`: a decode worker. Between the legs it is given up without that.
        """
        after = "decode_failed" if was_asked else "given_up"
        self.handovers.ended(after if lease.sent else "prefill_failed")

    def handover_left(self, lease: Lease) -> None:
        """Count a hand-over whose client left."""
        self.handovers.ended("client_left_decode" if lease.sent else "client_left_prefill")

    def handover_ended(self, how: str) -> None:
        """Count what became of a hand-over, or of what one left behind; `how` is of a few."""
        self.handovers.ended(how)

    def model_label(self, model: str) -> str:
        """Return a model's name as all families show it; those that clients make up are `other`."""
        known = self._models
        if model in known:
            return model
        serves = self.router.fleet.serves
        if not serves(model):
            return OTHER
        if len(known) >= MAX_MODELS and self._may_look():
            self._forget_models({each for each in known if not serves(each)})
        if len(known) >= MAX_MODELS:
            return OTHER
        known.add(model)
        return model

    def _series(self, key: RequestKey) -> Series:
        """Find or make a series, with names that a client made up folded into `other`."""
        route, model, worker, pool, reason, status, size = key
        model = self.model_label(model)
        route = route if route in BY_NAME else OTHER
        key = route, model, worker, pool, str(reason), status, size
        if (series := self.requests.get(key)) is not None:
            return series
        if len(self.requests) >= MAX_SERIES and self._may_look():
            self._drop_workers_that_left()
        if len(self.requests) >= MAX_SERIES:
            worker = OTHER if worker != NONE else NONE
            key = route, model, worker, pool, str(reason), status, size
            if (series := self.requests.get(key)) is not None:
                return series
        series = Series(
            model,
            histogram(self.ttft, (pool, model, size), TTFT_BOUNDS),
            histogram(self.predicted, (pool, model, size), TTFT_BOUNDS),
            histogram(self.tpot, (pool, model, size), GAP_BOUNDS),
            histogram(self.durations, (pool, route, size), DURATION_BOUNDS),
            histogram(self.waits, (pool, model, size), WAIT_BOUNDS),
            self.phases.setdefault((pool, model, size), Phases()),
        )
        self.requests[key] = series
        return series

    def _may_look(self) -> bool:
        """Whether it is time to look who has left."""
        if (now := time.monotonic()) < self._next_look:
            return False
        self._next_look = now + LOOK_EVERY_S
        return True

    def _drop_workers_that_left(self) -> None:
        stay = {worker.name for worker in self.router.fleet} | {NONE, OTHER}
        self.requests = {key: series for key, series in self.requests.items() if key[2] in stay}
        self.retries = {key: count for key, count in self.retries.items() if key[0] in stay}

    def _forget_models(self, gone: set[str]) -> None:
        """Drop what was counted of models that nobody serves any more."""
        self._models -= gone
        router = self.router
        # Replaced, for somebody may be reading them; left there, they were `other` from now on.
        router.decisions = {key: n for key, n in router.decisions.items() if key[0] not in gone}
        router.handovers = {key: n for key, n in router.handovers.items() if key[0] not in gone}
        self.handovers.forget_models(gone)
        self.unseen.forget_models(gone)
        self.requests = {key: each for key, each in self.requests.items() if key[1] not in gone}
        tables: tuple[dict[tuple[str, ...], Any], ...] = (
            self.ttft, self.predicted, self.tpot, self.waits, self.phases
        )  # fmt: skip
        for table in tables:
            for key in [key for key in table if key[1] in gone]:
                del table[key]

"""Where the time of streamed requests goes, as the router sees it.

The phases of a pool, model and class sum up to its time to first token and, with `decode`, to the
whole duration. An engine's queue looks like prefill from outside. Without a stream, prefill and
decode cannot be told apart.
"""

from __future__ import annotations

from proxy.core.model.finished_request import FinishedRequest
from proxy.metrics.exposition import MetricsPage, histogram
from proxy.metrics.histogram import PHASE_BOUNDS, Histograms

QUEUE, RETRY, PREFILL = "queue", "retry", "prefill"
PREFILL_LEG, TRANSFER, DECODE = "prefill_leg", "transfer", "decode"

PHASES = histogram(
    "proxy_phase_seconds",
    "Phases of requests whose first token was seen; every such request has a `queue` phase.",
    ("pool", "model", "class", "phase"),
)


class Phases:
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: Histograms[str] = Histograms(PHASE_BOUNDS)

    def observe(self, finished: FinishedRequest) -> None:
        """Observe the phases of a request that has a first token from a worker."""
        placed_s, queue_s, leg_s = finished.placed_s, finished.queue_s, finished.leg_s
        ttft_s = finished.ttft_s
        if placed_s is None or ttft_s is None:
            return
        seen = self.seen
        seen[QUEUE].observe(queue_s)
        if (lost_s := placed_s - queue_s) > 0.0:
            seen[RETRY].observe(lost_s)
        if leg_s is None:
            seen[PREFILL].observe(ttft_s - placed_s)
        else:
            seen[PREFILL_LEG].observe(leg_s)
            seen[TRANSFER if finished.fetched else PREFILL].observe(ttft_s - placed_s - leg_s)
        seen[DECODE].observe(finished.duration_s - ttft_s)


def show(page: MetricsPage, table: dict[tuple[str, ...], Phases]) -> None:
    page.histograms(
        PHASES,
        (
            ((*key, phase), seen)
            for key, phases in table.items()
            for phase, seen in phases.seen.items()
        ),
    )

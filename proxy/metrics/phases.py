"""Where the time of streamed requests goes, as the router sees it.

The phases of a pool, model and class sum up to its time to first token and, with `decode`, to the
whole duration. An engine's queue looks like prefill from outside. Without a stream, prefill and
decode cannot be told apart.
"""

from __future__ import annotations

from proxy.metrics.exposition import Family, MetricsPage
from proxy.metrics.histogram import PHASE_BOUNDS, Histogram

QUEUE, RETRY, PREFILL = "queue", "retry", "prefill"
PREFILL_LEG, TRANSFER, DECODE = "prefill_leg", "transfer", "decode"

PHASES = Family(
    "proxy_phase_seconds",
    "histogram",
    "Phases of requests whose first token was seen; every such request has a `queue` phase.",
    ("pool", "model", "class", "phase"),
)


class Phases:
    """Phase histograms of one pool, model and class."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: dict[str, Histogram] = {}

    def observe(
        self,
        placed_s: float,
        queue_s: float,
        leg_s: float | None,
        ttft_s: float,
        duration_s: float,
        *,
        fetched: bool,
    ) -> None:
        """Observe a request's phases.

        `placed_s` (until the answering worker got it), `ttft_s` and `duration_s` count from the
        arrival; `queue_s` and `leg_s` are durations. `leg_s` is the prefill leg, None without a
        hand-over. `fetched` is False if the decode worker had no blocks to fetch and prefilled
        itself.
        """
        self._of(QUEUE).observe(queue_s)
        if (lost_s := placed_s - queue_s) > 0.0:
            self._of(RETRY).observe(lost_s)
        if leg_s is None:
            self._of(PREFILL).observe(ttft_s - placed_s)
        else:
            self._of(PREFILL_LEG).observe(leg_s)
            self._of(TRANSFER if fetched else PREFILL).observe(ttft_s - placed_s - leg_s)
        self._of(DECODE).observe(duration_s - ttft_s)

    def _of(self, phase: str) -> Histogram:
        if (found := self.seen.get(phase)) is None:
            found = self.seen[phase] = Histogram(PHASE_BOUNDS)
        return found


def show(page: MetricsPage, table: dict[tuple[str, ...], Phases]) -> None:
    page.histograms(
        PHASES,
        (
            ((*key, phase), seen)
            for key, phases in table.items()
            for phase, seen in phases.seen.items()
        ),
    )

"""Where the time of streamed requests goes, as far as a router sees it.

The phases of one pool, model and class add up to its times to first token and, with `decode`, to
the whole of its requests. An engine's own queue is in none alone: from outside, a request that
waits there looks like one that is prefilled. Of what is not streamed no first token is seen, so
that nobody can say when it was prefilled.
"""

from __future__ import annotations

from proxy.metrics.exposition import Family, MetricsPage
from proxy.metrics.histogram import PHASE_BOUNDS, Histogram

QUEUE, RETRY, PREFILL = "queue", "retry", "prefill"
PREFILL_LEG, TRANSFER, DECODE = "prefill_leg", "transfer", "decode"

PHASES = Family(
    "proxy_phase_seconds",
    "histogram",
    "Phases of requests whose first token was seen; every one of these has a `queue`.",
    ("pool", "model", "class", "phase"),
)


class Phases:
    """Of requests that share pool, model and class."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: dict[str, Histogram] = {}

    def ended(
        self,
        placed_s: float,
        queue_s: float,
        leg_s: float | None,
        ttft_s: float,
        duration_s: float,
        *,
        fetched: bool,
    ) -> None:
        """Count a request; times are from its arrival, but those of its queue and prefill leg.

        `placed_s`: until it was given to the worker that answered. `leg_s` is None where that one
        did all of it; where it did not, `fetched` says whether there were blocks to fetch, or it
        had to prefill all the same.
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
    """Write them."""
    page.histograms(
        PHASES,
        (((*key, phase), seen) for key, each in table.items() for phase, seen in each.seen.items()),
    )

"""What is counted of batches, and how a scrape shows it."""

from __future__ import annotations

from collections import Counter

from proxy.metrics.exposition import Family, MetricsPage

ACTIVE = Family("proxy_batches", "gauge", "Batches that are not over, by state.", ("status",))
LINES = Family(
    "proxy_batch_lines",
    "counter",
    "Lines of batches by what became of them; sent_again counts tries.",
    ("outcome",),
)
IN_FLIGHT = Family("proxy_batch_lines_in_flight", "gauge", "Lines of batches on their way.")
PAUSED = Family(
    "proxy_batches_paused", "gauge", "Whether no line is begun because results can't be kept."
)
COMPLETED, FAILED, SENT_AGAIN = "completed", "failed", "sent_again"


class BatchCounts:
    """Of the one lane that runs for a folder; elsewhere all of it stays at zero."""

    def __init__(self) -> None:
        self.active: Counter[str] = Counter()
        self.lines = Counter({COMPLETED: 0, FAILED: 0, SENT_AGAIN: 0})
        self.in_flight = 0
        self.paused = False

    def show(self, page: MetricsPage) -> None:
        """Write all of it."""
        page.values(ACTIVE, (((status,), count) for status, count in self.active.items()))
        page.values(LINES, (((outcome,), count) for outcome, count in self.lines.items()))
        page.values(IN_FLIGHT, [((), self.in_flight)])
        page.values(PAUSED, [((), self.paused)])

"""Counters of batches and their metrics."""

from __future__ import annotations

from collections import Counter

from proxy.metrics.exposition import MetricsPage, counter, gauge

ACTIVE = gauge("proxy_batches", "Active batches, by status.", ("status",))
LINES = counter(
    "proxy_batch_lines",
    "Batch lines by outcome; sent_again counts repeated attempts.",
    ("outcome",),
)
IN_FLIGHT = gauge("proxy_batch_lines_in_flight", "Batch lines in flight.")
PAUSED = gauge("proxy_batches_paused", "1 while no line is sent because results cannot be stored.")
COMPLETED, FAILED, SENT_AGAIN = "completed", "failed", "sent_again"


class BatchCounts:
    """Counters of the process that schedules the folder; zero in other processes."""

    def __init__(self) -> None:
        self.active: Counter[str] = Counter()
        self.lines = Counter({COMPLETED: 0, FAILED: 0, SENT_AGAIN: 0})
        self.in_flight = 0
        self.paused = False

    def show(self, page: MetricsPage) -> None:
        page.values(ACTIVE, (((status,), count) for status, count in self.active.items()))
        page.values(LINES, (((outcome,), count) for outcome, count in self.lines.items()))
        page.values(IN_FLIGHT, [((), self.in_flight)])
        page.values(PAUSED, [((), self.paused)])

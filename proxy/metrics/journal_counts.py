"""The metrics of the engines' journals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from proxy.metrics.exposition import MetricsPage, counter, gauge

UP = gauge(
    "proxy_journal_up",
    "1 while the router reads the journals of all engines of the worker.",
    ("worker",),
)
GAPS = counter(
    "proxy_journal_gaps",
    "Times that a snapshot was needed: a message was missed or malformed, or the journal was lost.",
    ("worker",),
)
BAD_SIGNATURES = counter(
    "proxy_journal_bad_signatures",
    "Messages of the journal that were dropped because their signature is wrong.",
    ("worker",),
)
REQUESTS = gauge(
    "proxy_journal_requests",
    "Requests in the journal: running, or with blocks in the KV cache.",
    ("worker",),
)


class JournalCount(NamedTuple):
    worker: str
    up: bool
    gaps: int
    bad_signatures: int
    requests: int


def show(page: MetricsPage, counts: Iterable[JournalCount]) -> None:
    rows = [((count.worker,), count) for count in counts]
    page.values(UP, ((labels, count.up) for labels, count in rows))
    page.values(GAPS, ((labels, count.gaps) for labels, count in rows))
    page.values(BAD_SIGNATURES, ((labels, count.bad_signatures) for labels, count in rows))
    page.values(REQUESTS, ((labels, count.requests) for labels, count in rows))

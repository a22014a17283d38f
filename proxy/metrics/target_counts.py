"""Counts of met and missed targets.

A response without a stream shows no first token: only refusals count.
"""

from __future__ import annotations

from collections import Counter
from math import inf

from proxy.core.model.finished_request import FinishedRequest
from proxy.core.model.types import RequestInfo
from proxy.core.queue.latency_admission import NO_TARGETS, AdmissionSettings
from proxy.metrics.exposition import MetricsPage, counter

TARGETS = counter(
    "proxy_targets",
    "Requests with a target, by tenant class, target (ttft and tpot, or deadline if the client "
    "gave one) and result: met, missed or refused.",
    ("class", "target", "result"),
)
REFUSED = frozenset([429, 503])


class TargetCounts:
    def __init__(self) -> None:
        self._results: Counter[tuple[str, str, str]] = Counter()

    def count(
        self,
        info: RequestInfo,
        finished: FinishedRequest,
        settings: AdmissionSettings | None,
        started: float,
    ) -> float | None:
        """Count a request; return its target for the first token."""
        targets = settings or NO_TARGETS
        ttft_s, tpot_s, target = targets.ttft_of(info), targets.tpot_of(info), "ttft"
        if info.deadline < inf:
            ttft_s, target = info.deadline - started, "deadline"
        if ttft_s is not None:
            if finished.ttft_s is not None:
                self._count(info, target, "met" if finished.ttft_s <= ttft_s else "missed")
            elif finished.status in REFUSED:
                self._count(info, target, "refused")
            elif finished.stream and finished.duration_s > ttft_s:  # the client left
                self._count(info, target, "missed")
        if tpot_s is not None and finished.tpot_s is not None:
            self._count(info, "tpot", "met" if finished.tpot_s <= tpot_s else "missed")
        return ttft_s

    def _count(self, info: RequestInfo, target: str, result: str) -> None:
        self._results[info.rank.name.lower(), target, result] += 1

    def show(self, page: MetricsPage) -> None:
        page.values(TARGETS, self._results.items())

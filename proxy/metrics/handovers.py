"""Counters of hand-overs: outcomes, and durations of legs and transfers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.core.routing.handover_cost import HandoverVerdict
from proxy.metrics.histogram import TTFT_BOUNDS, Histogram

if TYPE_CHECKING:
    from proxy.core.fleet.leases import HandoverDecision, Lease
    from proxy.core.router import Router

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
ANY = "any"  # decode worker; in metrics


class HandoverCounters:
    """Counters of one router process."""

    def __init__(self, label: Callable[[str], str]) -> None:
        self.ends: dict[str, int] = {}
        self.warmups: dict[str, int] = {}
        self.bars: dict[tuple[str, str], int] = {}  # by prefill and decode worker
        self.legs: dict[str, int] = {}  # completed prefill legs, by prefill worker
        self.tokens: dict[str, int] = {}  # transferred tokens, by model, if known
        self.prefills: dict[str, Histogram] = {}  # by model, like the next two
        self.transfers: dict[str, Histogram] = {}
        self.predicted: dict[str, Histogram] = {}
        self._label = label

    def count_end(self, outcome: str) -> None:
        self.ends[outcome] = self.ends.get(outcome, 0) + 1

    def count_barred(self, prefill: str, decode: str) -> None:
        """Count that a link or a prefill worker is excluded for a while."""
        key = prefill, decode
        self.bars[key] = self.bars.get(key, 0) + 1

    def forget(self, stay: set[str]) -> None:
        """Drop the counters of removed workers; in Kubernetes every new pod has a new name."""
        if not stay.issuperset(self.legs):
            self.legs = {worker: n for worker, n in self.legs.items() if worker in stay}
        stay = {*stay, ANY}
        if not all(stay.issuperset(pair) for pair in self.bars):
            self.bars = {p: n for p, n in self.bars.items() if stay.issuperset(p)}

    def forget_models(self, gone: set[str]) -> None:
        for table in (self.tokens, self.prefills, self.transfers, self.predicted):
            for model in gone & table.keys():
                del table[model]

    def count_warmup(self, outcome: str) -> None:
        self.warmups[outcome] = self.warmups.get(outcome, 0) + 1

    def count_prefill(self, lease: Lease, now: float, *, bare: bool) -> None:
        outcome = "prefilled_bare" if bare else "prefilled"
        self.ends[outcome] = self.ends.get(outcome, 0) + 1
        if (first := lease.prefill) is not None:
            seen = self.prefills.get(lease.ask.model) or self._of(self.prefills, lease)
            seen.observe(now - first.charged_at)
            name = first.worker.name
            self.legs[name] = self.legs.get(name, 0) + 1

    def observe_transfer(self, lease: Lease, now: float) -> None:
        """Count a decode leg's first token and observe the transfer time.

        The transfer time is the time to the first token minus one decode step.
        """
        handover = self.count_transfer(lease)
        if handover is None:
            return
        step_s = lease.worker.pace.step_s(lease.worker.decoding)
        seconds = handover.transferred_s = max(now - lease.charged_at - step_s, 0.0)
        self._of(self.transfers, lease).observe(seconds)
        self._of(self.predicted, lease).observe(handover.transfer_s)

    def count_transfer(self, lease: Lease) -> HandoverDecision | None:
        """Count a transfer.

        Without a stream its duration is unknown.
        """
        handover = lease.decision.handover
        if handover is None or not handover.tokens:
            return None
        model = self._label(lease.ask.model)
        self.tokens[model] = self.tokens.get(model, 0) + handover.tokens
        self.count_end("transferred")
        return handover

    def _of(self, table: dict[str, Histogram], lease: Lease) -> Histogram:
        model = self._label(lease.ask.model)
        found = table.get(model)
        if found is None:
            found = table[model] = Histogram(TTFT_BOUNDS)
        return found


class FallbackLog:
    """Logs how many requests were not handed over for lack of a prefill worker."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._logged = 0
        self._next = 0.0

    def log_new(self, now: float) -> None:
        """Log new fallbacks since the last log line."""
        if now < self._next:
            return
        counts = self._router.placer.handovers
        total = sum(
            counts.get((model, HandoverVerdict.NO_PREFILL), 0)
            for model in self._router.fleet.roster.models()
        )
        if total > self._logged:
            logger.warning(
                "no prefill worker is up: %d requests were served without a hand-over",
                total - self._logged,
            )
            self._logged = total
            self._next = now + LOG_INTERVAL_S

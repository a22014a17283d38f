"""Counters of hand-overs: outcomes, and durations of legs and transfers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from proxy.core.fleet.leases import HandoverDecision, Lease
from proxy.core.router import Router
from proxy.core.routing.handover_cost import HandoverVerdict
from proxy.metrics.histogram import TTFT_BOUNDS, Histograms, forget

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
ANY = "any"  # decode worker; in metrics


class HandoverCounters:
    def __init__(self, label: Callable[[str], str]) -> None:
        self.ends: Counter[str] = Counter()
        self.warmups: Counter[str] = Counter()
        self.bars: Counter[tuple[str, str]] = Counter()  # by prefill and decode worker
        self.legs: Counter[str] = Counter()  # completed prefill legs, by prefill worker
        self.tokens: Counter[str] = Counter()  # transferred tokens, by model, if known
        self.prefills: Histograms[str] = Histograms(TTFT_BOUNDS)  # by model, like the next two
        self.transfers: Histograms[str] = Histograms(TTFT_BOUNDS)
        self.predicted: Histograms[str] = Histograms(TTFT_BOUNDS)
        self._label = label

    def count_end(self, outcome: str) -> None:
        self.ends[outcome] += 1

    def count_barred(self, prefill: str, decode: str) -> None:
        """Count that a link or a prefill worker is excluded for a while."""
        self.bars[prefill, decode] += 1

    def forget(self, stay: set[str]) -> None:
        """Drop the counters of removed workers; in Kubernetes every new pod has a new name."""
        stay = {*stay, ANY}
        forget(self.legs, lambda worker: worker not in stay)
        forget(self.bars, lambda pair: not stay.issuperset(pair))

    def forget_models(self, models: set[str]) -> None:
        for table in (self.tokens, self.prefills, self.transfers, self.predicted):
            forget(table, models.__contains__)

    def count_warmup(self, outcome: str) -> None:
        self.warmups[outcome] += 1

    def count_prefill(self, lease: Lease, now: float, *, without_params: bool) -> None:
        self.count_end("prefilled_bare" if without_params else "prefilled")
        if (first := lease.prefill) is not None:
            self.prefills[self._label(lease.info.model)].observe(now - first.charged_at)
            self.legs[first.worker.name] += 1

    def observe_transfer(self, lease: Lease, now: float) -> None:
        """Count a decode leg's first token and observe the transfer time.

        The transfer time is the time to the first token minus one decode step.
        """
        handover = self.count_transfer(lease)
        if handover is None:
            return
        step_s = lease.worker.pace.step_s(lease.worker.num_decoding)
        seconds = handover.transferred_s = max(now - lease.charged_at - step_s, 0.0)
        model = self._label(lease.info.model)
        self.transfers[model].observe(seconds)
        self.predicted[model].observe(handover.transfer_s)

    def count_transfer(self, lease: Lease) -> HandoverDecision | None:
        """Count a transfer.

        Without a stream its duration is unknown.
        """
        handover = lease.decision.handover
        if handover is None or not handover.tokens:
            return None
        self.tokens[self._label(lease.info.model)] += handover.tokens
        self.count_end("transferred")
        return handover


class FallbackLog:
    """Logs how many requests were not handed over for lack of a prefill worker."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._logged = 0
        self._next = 0.0

    def log_new(self, now: float) -> None:
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

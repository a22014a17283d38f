"""What is counted of hand-overs: how they end, how long their legs and transfers take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.control.histogram import TTFT_BOUNDS, Histogram

if TYPE_CHECKING:
    from proxy.core.types import Lease


class Handovers:
    """All counts of one router's."""

    def __init__(self, label: Callable[[str], str]) -> None:
        self.ends: dict[str, int] = {}
        self.warmups: dict[str, int] = {}
        self.tokens: dict[str, int] = {}  # transferred, by model, as far as is known
        self.prefills: dict[str, Histogram] = {}  # by model, as those that follow
        self.transfers: dict[str, Histogram] = {}
        self.predicted: dict[str, Histogram] = {}
        self._label = label

    def ended(self, how: str) -> None:
        """Count an end."""
        self.ends[how] = self.ends.get(how, 0) + 1

    def warmed(self, how: str) -> None:
        """Count a warm-up."""
        self.warmups[how] = self.warmups.get(how, 0) + 1

    def prefilled(self, lease: Lease, now: float, *, bare: bool) -> None:
        """Count a prefill leg that is done."""
        self.ended("prefilled_bare" if bare else "prefilled")
        if (first := lease.prefill) is not None:
            self._of(self.prefills, lease).observe(now - first.charged_at)

    def transferred(self, lease: Lease, now: float) -> None:
        """Count a decode leg whose first token has come: the transfer, less a step of decoding."""
        handover = lease.decision.handover
        if handover is None:
            return
        model = self._label(lease.ask.model)
        self.tokens[model] = self.tokens.get(model, 0) + handover.tokens
        self.ended("transferred")
        step_s = lease.worker.pace.step_s(lease.worker.decoding)
        self._of(self.transfers, lease).observe(max(now - lease.charged_at - step_s, 0.0))
        self._of(self.predicted, lease).observe(handover.transfer_s)

    def _of(self, table: dict[str, Histogram], lease: Lease) -> Histogram:
        model = self._label(lease.ask.model)
        found = table.get(model)
        if found is None:
            found = table[model] = Histogram(TTFT_BOUNDS)
        return found

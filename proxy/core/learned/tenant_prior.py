"""First rates of a tenant: the median of other tenants.

Tenants learn from their own requests only. The median is over tenants, so a flood counts once. The
first values vote too, so no single tenant decides.

Cost: a median of sixteen at most.

How it fails: several languages have no common median.
"""

from __future__ import annotations

from proxy.core.learned.bytes_per_token import LearnedSizes
from proxy.core.learned.media_tokens import KINDS

MAX_PRIOR_TENANTS = 15  # the latest
MAX_UPDATES_BETWEEN_MEDIANS = 64


class TenantPrior:
    def __init__(self) -> None:
        self.base = LearnedSizes()  # first values, or without tenants
        self._tenants: dict[str, LearnedSizes] = {}
        self._updates = 0
        self._due = 1
        self._common = self.base

    def update(self, tenant: str, own: LearnedSizes) -> None:
        tenants = self._tenants
        tenants.pop(tenant, None)
        tenants[tenant] = own
        if len(tenants) > MAX_PRIOR_TENANTS:
            del tenants[next(iter(tenants))]
        self._updates += 1

    def median(self) -> LearnedSizes:
        """Return the median. Read-only."""
        if self._updates >= self._due:
            self._due = self._updates + min(self._updates // 8 + 1, MAX_UPDATES_BETWEEN_MEDIANS)
            self._common = self._compute_median()
        return self._common

    def new_sizes(self) -> LearnedSizes:
        return _copy(self.median())

    @property
    def bytes_per_token(self) -> float | None:
        """Return the text rate, if known."""
        if self.base.weight or any(sizes.weight for sizes in self._tenants.values()):
            return self.median().bytes_per_token
        return None

    def _compute_median(self) -> LearnedSizes:
        base = self.base
        prompts = [rates for rates in self._tenants.values() if rates.seen]
        outputs = [rates for rates in self._tenants.values() if rates.outputs]
        median = _copy(base)
        median.fixed = _middle([rates.fixed for rates in prompts], base.fixed)
        median.per_byte = _middle([rates.per_byte for rates in prompts], base.per_byte)
        median.per_tool = _middle([rates.per_tool for rates in prompts], base.per_tool)
        median.output = _middle([rates.output for rates in outputs], base.output)
        for kind in KINDS:
            media = [rates.media for rates in self._tenants.values() if rates.media.seen[kind]]
            sizes = [counts.means[kind] for counts in media]
            median.media.set_mean(kind, _middle(sizes, base.media.means[kind]))
        return median


def _copy(learned: LearnedSizes) -> LearnedSizes:
    copied = LearnedSizes(learned.fixed, learned.per_byte, learned.per_tool)
    copied.output = learned.output
    copied.media = learned.media.copy()
    return copied


def _middle(values: list[float], base: float) -> float:
    ordered = sorted([*values, *[base] * (1 + len(values) % 2)])
    return ordered[len(ordered) // 2]

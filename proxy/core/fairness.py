"""Fair shares of the fleet, by tokens.

Idea: virtual token counters (VTC, Sheng et al., OSDI 2024). Each tenant has a counter of the tokens
it was served, over its weight; whose counter is the least goes first. Nobody is held back while
there is room, so nothing is lost by it. One who comes back after it had nothing waiting is lifted
to the least of those that wait: what it did not use is not saved up. What it had while nobody
waited for that is not held against it, be it before others came or at workers of another model or
size. Each class has standings of its own: one's batches change nothing for one's chats.

A request is charged when it is placed, with its prompt, less what is cached, and the output that it
is likely to write; tokens beyond that as they pass, and what was too much is given back at its end.
Who leaves an answer that is not streamed pays for what was likely written by then.
So between two tenants that always have something waiting, services differ by at most what one
request may cost, and what the estimates of those in flight are off by, however long that goes on.

Cost: nothing where nobody waits but an addition per request. How it fails: it rules the router's
queue alone. Workers that take all they are given must be told how much that may be
(`max_requests`), or the queue is theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType

from proxy.core.tenants import Rank, Tenant
from proxy.core.types import Ask

INTERACTIVE, STANDARD, BATCH = Rank


@dataclass(frozen=True, slots=True)
class FairnessSettings:
    """What the operator chose."""

    output_weight: float = 2.0  # of a token written, against one of prompt
    cached_weight: float = 0.0  # of a token of prompt that should be cached
    standard_age_s: float = 10.0  # waited for, a class goes before those above it
    batch_age_s: float = 300.0
    batch_wait_s: float = 600.0  # that one of batch may wait at most
    batch_reserve: float = 0.125  # of a worker's places and cache, that batch leaves free
    batch_gap_s: float = 0.5  # of prefill that a worker may have ahead of one of batch
    ages: Mapping[Rank, float] = field(init=False)

    def __post_init__(self) -> None:
        """Put the ages where they are looked up."""
        ages = {INTERACTIVE: inf, STANDARD: self.standard_age_s, BATCH: self.batch_age_s}
        object.__setattr__(self, "ages", MappingProxyType(ages))


def charge(settings: FairnessSettings, tenant: Tenant, ask: Ask, cached: int) -> None:
    """Charge a request that is placed."""
    output = ask.expected_output * ask.samples
    ask.paid = max(ask.prompt_tokens - cached, 0) + settings.cached_weight * cached
    ask.prepaid = output
    tenant.charge(ask.paid + settings.output_weight * output, ask.rank, free=ask.free)


def charge_output(settings: FairnessSettings, ask: Ask, tokens: float) -> None:
    """Charge output tokens beyond those that were, or give back where it is less than nothing."""
    if (tenant := ask.tenant) is not None:
        tenant.charge(settings.output_weight * tokens, ask.rank, free=ask.free)


def give_back(tenant: Tenant, ask: Ask) -> None:
    """Give back what a prompt cost that came to nothing."""
    tenant.charge(-ask.paid, ask.rank, free=ask.free)
    ask.paid = 0.0


class Turns:
    """Whose counter starts where, among those who wait."""

    def __init__(self) -> None:
        self._waiting: dict[Rank, set[Tenant]] = {rank: set() for rank in Rank}
        # Who has something in the queues of other processes.
        self.elsewhere: dict[Rank, set[Tenant]] = {rank: set() for rank in Rank}
        # Of the one who went last, here or there, should nobody be left.
        self.floors = dict.fromkeys(Rank, 0.0)

    def waiting(self, rank: Rank) -> Collection[Tenant]:
        """Who has something in the queue."""
        return self._waiting[rank]

    def came(self, tenant: Tenant, rank: Rank) -> None:
        """Count one more that waits; lift who comes back."""
        tenant.waiting += 1
        waiting, elsewhere = self._waiting[rank], self.elsewhere[rank]
        if tenant not in waiting:
            if tenant not in elsewhere:
                there = waiting | elsewhere if elsewhere else waiting
                standings = (each.standings[rank] for each in there)
                tenant.lift(rank, min(standings, default=self.floors[rank]))
            waiting.add(tenant)
            tenant.waits |= 1 << rank

    def went(self, tenant: Tenant, rank: Rank, *, last: bool) -> None:
        """Count one that waits no more; `last`: it was the tenant's last of that rank."""
        tenant.waiting -= 1
        if last:
            self._waiting[rank].discard(tenant)
            tenant.waits &= ~(1 << rank)
            self.floors[rank] = max(self.floors[rank], tenant.standings[rank])

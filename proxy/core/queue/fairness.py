"""Fair shares of the fleet, by tokens.

Idea: virtual token counters (VTC, Sheng et al., OSDI 2024). Each tenant has a counter of the tokens
it was served, over its weight; whose counter is the least goes first. Nobody is held back while
there is room, so nothing is lost by it. A tenant that comes back with nothing waiting is lifted
to the least counter of the tenants that wait: what it did not use is not saved up. The lift
compares settled counters, without the estimates of requests in flight: an estimate that is too
high is given back to its own tenant alone, and a lift is for ever. What it had while nobody
waited for that is not held against it, be it before others came or at workers of another model or
size. Each class has standings of its own: one's batches change nothing for one's chats.

A request is charged when it is placed, with its prompt, less what is cached, and the output that it
is likely to write; tokens beyond that as they pass. At its end it pays for what usage tells, and is
given back what was too much.
Who leaves early pays for what was likely written by then, or for what was seen if that is more.
A stream's usage is asked for where its client doesn't: events are not tokens.
So between two tenants that always have something waiting, services differ by at most what one
request may cost, and what the estimates of those in flight are off by, however long that goes on.

Cost: nothing where nobody waits but an addition per request; else whoever's counter has changed is
put where it belongs in a sorted list (`order`), however many wait. How it fails: it rules the
router's queue alone. Workers that take all they are given must be told how much that may be
(`max_requests`), or the queue is theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from types import MappingProxyType

from proxy.core.model.types import RequestInfo
from proxy.core.tenants.tenants import ChangedTenants, Rank, Tenant

INTERACTIVE, STANDARD, BATCH = Rank
SPARE = 64  # old entries of a heap, before it is swept


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


def charge(settings: FairnessSettings, tenant: Tenant, ask: RequestInfo, cached: int) -> None:
    """Charge a request that is placed."""
    output = ask.expected_output * ask.samples
    ask.bill.paid = max(ask.prompt_tokens - cached, 0) + settings.cached_weight * cached
    ask.bill.prepaid = output
    tokens = ask.bill.paid + settings.output_weight * output
    tenant.charge(tokens, ask.rank, free=ask.bill.free)
    if not ask.bill.free:
        ask.bill.unsettled = tenant.estimate(tokens, ask.rank)


def charge_output(settings: FairnessSettings, ask: RequestInfo, tokens: float) -> None:
    """Charge output tokens beyond those that were, or give back where it is less than nothing."""
    if (tenant := ask.tenant) is not None:
        tenant.charge(settings.output_weight * tokens, ask.rank, free=ask.bill.free)


def charge_prompt(tenant: Tenant, ask: RequestInfo, tokens: float) -> None:
    """Charge what a prompt turned out to have beyond its estimate, or give that back."""
    tokens = max(tokens, -ask.bill.paid)
    tenant.charge(tokens, ask.rank, free=ask.bill.free)
    ask.bill.paid += tokens


def give_back(tenant: Tenant, ask: RequestInfo) -> None:
    """Give back what a prompt cost that came to nothing."""
    tenant.charge(-ask.bill.paid, ask.rank, free=ask.bill.free)
    ask.bill.paid = 0.0


class ShareFloor:
    """The lowest settled standing of a class; an old entry leaves the heap at its top."""

    def __init__(self) -> None:
        self._standings: dict[Tenant, float] = {}
        self._heap: list[tuple[float, int, Tenant]] = []
        self._numbers = count()

    def put(self, tenant: Tenant, standing: float) -> None:
        """Count one in, or say that it stands elsewhere."""
        standings, heap = self._standings, self._heap
        if standings.get(tenant) == standing:
            return
        standings[tenant] = standing
        heappush(heap, (standing, next(self._numbers), tenant))
        if len(heap) > 2 * len(standings) + SPARE:
            self._heap = [(at, next(self._numbers), each) for each, at in standings.items()]
            heapify(self._heap)

    def drop(self, tenant: Tenant) -> None:
        """Count one out."""
        self._standings.pop(tenant, None)
        if not self._standings:
            self._heap.clear()

    def __contains__(self, tenant: Tenant) -> bool:
        """Whether one is counted."""
        return tenant in self._standings

    def least(self, default: float) -> float:
        """Return the lowest standing, or else this."""
        heap, standings = self._heap, self._standings
        while heap:
            standing, _, tenant = heap[0]
            if standings.get(tenant) == standing:
                return standing
            heappop(heap)
        return default


class ShareCounters:
    """Whose counter starts where, among those who wait."""

    def __init__(self) -> None:
        self._waiting: dict[Rank, set[Tenant]] = {rank: set() for rank in Rank}
        # Who has something in the queues of other processes: a bit for each class.
        self._elsewhere: dict[Tenant, int] = {}
        self._lows = {rank: ShareFloor() for rank in Rank}  # of all who wait, here or there
        self._watch = ChangedTenants()
        # Settled standings of the tenants that waited last, here or there.
        self.floors = dict.fromkeys(Rank, 0.0)

    def waiting(self, rank: Rank) -> Collection[Tenant]:
        """Who has something in the queue."""
        return self._waiting[rank]

    def came(self, tenant: Tenant, rank: Rank) -> None:
        """Count one more that waits; lift who comes back."""
        tenant.waiting += 1
        if tenant not in self._waiting[rank]:
            if not self._elsewhere.get(tenant, 0) >> rank & 1:
                tenant.lift(rank, self._lowest(rank))
            self._waiting[rank].add(tenant)
            tenant.waits |= 1 << rank
            self._count(tenant, rank)
            tenant.change()

    def went(self, tenant: Tenant, rank: Rank, *, last: bool) -> None:
        """Count one that waits no more; `last`: it was the tenant's last of that rank."""
        tenant.waiting -= 1
        if last:
            self._waiting[rank].discard(tenant)
            tenant.waits &= ~(1 << rank)
            self.floors[rank] = max(self.floors[rank], tenant.settled(rank))
            self._count(tenant, rank)
            tenant.change()

    def waits_elsewhere(self, tenant: Tenant, ranks: int) -> None:
        """Take in which classes one waits in other processes, a bit for each."""
        if ranks == self._elsewhere.get(tenant, 0):
            return
        self._elsewhere[tenant] = ranks
        for rank in Rank:
            self._count(tenant, rank)
        if not ranks:
            del self._elsewhere[tenant]

    def _lowest(self, rank: Rank) -> float:
        for tenant in self._watch.take():
            for each, lows in self._lows.items():
                if tenant in lows:
                    lows.put(tenant, tenant.settled(each))
        return self._lows[rank].least(self.floors[rank])

    def _count(self, tenant: Tenant, rank: Rank) -> None:
        waits = tenant.waits | self._elsewhere.get(tenant, 0)
        if waits >> rank & 1:
            self._lows[rank].put(tenant, tenant.settled(rank))
        else:
            self._lows[rank].drop(tenant)
        if waits:
            tenant.watches.add(self._watch)
        else:
            tenant.watches.discard(self._watch)

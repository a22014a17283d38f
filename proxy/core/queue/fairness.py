"""Fair shares of the fleet, by tokens.

Idea: virtual token counters (VTC, Sheng et al., OSDI 2024). Each tenant has a counter per class:
tokens served over its weight. The least goes first. A returning tenant is lifted to the least
counter of the waiting tenants: unused share is not saved. A lift is permanent, so it compares
settled counters, without estimates of running requests.

A placed request is charged for uncached prompt and expected output, then for further tokens. The
reported usage corrects the charge. After a disconnect the larger of expected and seen output
counts. Two waiting tenants differ by at most one request's cost plus estimation errors.

Cost: one addition per request; with a queue, one move in a sorted list. How it fails: it orders
only the router's queue. Without `max_requests`, requests queue inside the workers.
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
SPARE_HEAP_ENTRIES = 64  # outdated heap entries before a sweep


@dataclass(frozen=True, slots=True)
class FairnessSettings:
    output_weight: float = 2.0  # per output token; a prompt token is 1
    cached_weight: float = 0.0  # per cached prompt token
    standard_age_s: float = 10.0  # of waiting, before a class goes ahead
    batch_age_s: float = 300.0
    batch_wait_s: float = 600.0  # longest wait of batch
    batch_reserve: float = 0.125  # share of slots and KV cache kept from batch
    batch_gap_s: float = 0.5  # of prefill that batch may wait for or cause
    ages: Mapping[Rank, float] = field(init=False)

    def __post_init__(self) -> None:
        ages = {INTERACTIVE: inf, STANDARD: self.standard_age_s, BATCH: self.batch_age_s}
        object.__setattr__(self, "ages", MappingProxyType(ages))


def charge(settings: FairnessSettings, tenant: Tenant, info: RequestInfo, cached: int) -> None:
    output = info.expected_output * info.samples
    info.bill.paid_prompt = max(info.prompt_tokens - cached, 0) + settings.cached_weight * cached
    info.bill.prepaid_output = output
    tokens = info.bill.paid_prompt + settings.output_weight * output
    tenant.charge(tokens, info.rank, free=info.bill.free)
    if not info.bill.free:
        info.bill.unsettled = tenant.estimate(tokens, info.rank)


def charge_output(settings: FairnessSettings, info: RequestInfo, tokens: float) -> None:
    """Charge further output tokens; negative: refund."""
    if (tenant := info.tenant) is not None:
        tenant.charge(settings.output_weight * tokens, info.rank, free=info.bill.free)


def charge_prompt(tenant: Tenant, info: RequestInfo, tokens: float) -> None:
    tokens = max(tokens, -info.bill.paid_prompt)
    tenant.charge(tokens, info.rank, free=info.bill.free)
    info.bill.paid_prompt += tokens


class LeastSettled:
    """The least settled counter of a class's waiting tenants: a heap with lazy deletion."""

    def __init__(self) -> None:
        self._settled: dict[Tenant, float] = {}
        self._heap: list[tuple[float, int, Tenant]] = []
        self._numbers = count()

    def put(self, tenant: Tenant, settled: float) -> None:
        counters, heap = self._settled, self._heap
        if counters.get(tenant) == settled:
            return
        counters[tenant] = settled
        heappush(heap, (settled, next(self._numbers), tenant))
        if len(heap) > 2 * len(counters) + SPARE_HEAP_ENTRIES:
            self._heap = [(at, next(self._numbers), other) for other, at in counters.items()]
            heapify(self._heap)

    def drop(self, tenant: Tenant) -> None:
        self._settled.pop(tenant, None)
        if not self._settled:
            self._heap.clear()

    def __contains__(self, tenant: Tenant) -> bool:
        return tenant in self._settled

    def least(self, default: float) -> float:
        heap, counters = self._heap, self._settled
        while heap:
            settled, _, tenant = heap[0]
            if counters.get(tenant) == settled:
                return settled
            heappop(heap)
        return default


class ShareCounters:
    """The waiting tenants, and the counter at which a returning tenant starts."""

    def __init__(self) -> None:
        self._waiting: dict[Rank, set[Tenant]] = {rank: set() for rank in Rank}
        # A bit per class in which a tenant waits in other processes.
        self._remote_waits: dict[Tenant, int] = {}
        self._least_settled = {rank: LeastSettled() for rank in Rank}  # over all processes
        self._changed = ChangedTenants()
        self.floors = dict.fromkeys(Rank, 0.0)  # largest counter of a tenant that stopped waiting

    def waiting(self, rank: Rank) -> Collection[Tenant]:
        return self._waiting[rank]

    def add(self, tenant: Tenant, rank: Rank) -> None:
        """Count a queued request; lift a returning tenant."""
        tenant.waiting += 1
        if tenant not in self._waiting[rank]:
            if not self._remote_waits.get(tenant, 0) >> rank & 1:
                tenant.lift(rank, self._starting_counter(rank))
            self._waiting[rank].add(tenant)
            tenant.waits |= 1 << rank
            self._update_least_settled(tenant, rank)
            tenant.notify_watches()

    def remove(self, tenant: Tenant, rank: Rank, *, last: bool) -> None:
        """Count a request that left; `last` of its tenant and class."""
        tenant.waiting -= 1
        if last:
            self._waiting[rank].discard(tenant)
            tenant.waits &= ~(1 << rank)
            self.floors[rank] = max(self.floors[rank], tenant.settled(rank))
            self._update_least_settled(tenant, rank)
            tenant.notify_watches()

    def set_remote_waits(self, tenant: Tenant, ranks: int) -> None:
        """Set a tenant's bits for the other processes."""
        if ranks == self._remote_waits.get(tenant, 0):
            return
        self._remote_waits[tenant] = ranks
        for rank in Rank:
            self._update_least_settled(tenant, rank)
        if not ranks:
            del self._remote_waits[tenant]

    def _starting_counter(self, rank: Rank) -> float:
        for tenant in self._changed.pop_all():
            for changed_rank, least in self._least_settled.items():
                if tenant in least:
                    least.put(tenant, tenant.settled(changed_rank))
        return self._least_settled[rank].least(self.floors[rank])

    def _update_least_settled(self, tenant: Tenant, rank: Rank) -> None:
        waits = tenant.waits | self._remote_waits.get(tenant, 0)
        if waits >> rank & 1:
            self._least_settled[rank].put(tenant, tenant.settled(rank))
        else:
            self._least_settled[rank].drop(tenant)
        if waits:
            tenant.watches.add(self._changed)
        else:
            tenant.watches.discard(self._changed)

"""Evict requests from a full queue, so that no tenant fills it alone.

A new request evicts the last request of the tenant with the largest share by weight, if that
exceeds its own tenant's. A share is the largest part in requests, bytes or tokens. Batch is evicted
first, retries never.

Cost: nothing until the queue is full; then a scan of the FIFOs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from proxy.core.model.types import RequestInfo
from proxy.core.queue.request_fifo import APART, RequestFifo
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Rank, Tenant

BATCH = Rank.BATCH
MAX_EVICTED = 64  # per new request


class Amounts(NamedTuple):
    requests: float = 0
    bytes: float = 0
    tokens: float = 0


NO_AMOUNTS = Amounts()


def amounts_of(info: RequestInfo) -> Amounts:
    return Amounts(1, info.body_bytes, info.prompt_tokens)


class Evictions:
    def __init__(self) -> None:
        self._used: dict[Tenant | None, Amounts] = {}

    def add(self, info: RequestInfo) -> None:
        self._used[info.tenant] = _with_request(self._used.get(info.tenant, NO_AMOUNTS), info)

    def remove(self, info: RequestInfo) -> None:
        left = _with_request(self._used[info.tenant], info, -1)
        if left.requests:
            self._used[info.tenant] = left
        else:
            del self._used[info.tenant]

    def choose_evicted(
        self, info: RequestInfo, fifos: Iterable[RequestFifo], excess: Amounts, limits: Amounts
    ) -> list[Ticket]:
        """Return the tickets to evict; none if that would not make enough room.

        `excess` includes the request.
        """
        used = dict(self._used)
        own_used = _with_request(used.get(info.tenant, NO_AMOUNTS), info)
        own_share = _share(own_used, limits, info.tenant)
        fifos = [fifo for fifo in fifos if fifo.place.size != APART and _may_yield(fifo, info)]
        return _choose_last(
            fifos,
            used,
            excess,
            limits,
            lambda fifo: _exceeds_share(fifo, info, used, own_share, limits),
        )

    def choose_surplus(
        self, fifos: Iterable[RequestFifo], excess: Amounts, limits: Amounts
    ) -> list[Ticket]:
        """Return tickets to evict, even if an excess remains.

        An oversized request accepted by an empty queue is kept.
        """
        fifos = [fifo for fifo in fifos if fifo.place.size != APART]
        return _choose_last(fifos, dict(self._used), excess, limits, lambda _: True, partly=True)


def _choose_last(
    fifos: list[RequestFifo],
    used: dict[Tenant | None, Amounts],
    excess: Amounts,
    limits: Amounts,
    yields: Callable[[RequestFifo], bool],
    *,
    partly: bool = False,
) -> list[Ticket]:
    """Take the last ticket of the largest tenant until nothing exceeds its limit."""
    tickets = {
        fifo.key: [t for t in fifo.tickets if t.info.prompt_tokens <= limits.tokens]
        if partly
        else fifo.tickets
        for fifo in fifos
    }
    left = {key: len(waiting) for key, waiting in tickets.items()}
    evicted: list[Ticket] = []
    while max(excess) > 0 and len(evicted) < MAX_EVICTED:
        evictable = [fifo for fifo in fifos if left[fifo.key] and yields(fifo)]
        if not evictable:
            break
        fifo = max(evictable, key=lambda fifo: _eviction_order(fifo, used, limits, left[fifo.key]))
        left[fifo.key] -= 1
        ticket = tickets[fifo.key][left[fifo.key]]
        evicted.append(ticket)
        used[fifo.tenant] = _with_request(used[fifo.tenant], ticket.info, -1)
        excess = _with_request(excess, ticket.info, -1)
    return evicted if partly or max(excess) <= 0 else []


def _with_request(amounts: Amounts, info: RequestInfo, sign: int = 1) -> Amounts:
    return Amounts(
        amounts.requests + sign,
        amounts.bytes + sign * info.body_bytes,
        amounts.tokens + sign * info.prompt_tokens,
    )


def _may_yield(fifo: RequestFifo, info: RequestInfo) -> bool:
    if fifo.rank is BATCH:
        return info.rank is not BATCH or fifo.tenant is not info.tenant
    return info.rank is not BATCH and fifo.tenant is not info.tenant


def _exceeds_share(
    fifo: RequestFifo,
    info: RequestInfo,
    used: dict[Tenant | None, Amounts],
    own_share: float,
    limits: Amounts,
) -> bool:
    if fifo.rank is BATCH and info.rank is not BATCH:
        return True
    return _share(used[fifo.tenant], limits, fifo.tenant) > own_share


def _eviction_order(
    fifo: RequestFifo, used: dict[Tenant | None, Amounts], limits: Amounts, left: int
) -> tuple[bool, float, int]:
    return fifo.rank is BATCH, _share(used[fifo.tenant], limits, fifo.tenant), left


def _share(used: Amounts, limits: Amounts, tenant: Tenant | None) -> float:
    share = max(
        used.requests / limits.requests, used.bytes / limits.bytes, used.tokens / limits.tokens
    )
    return share if tenant is None else share / tenant.spec.weight


def add_amounts(first: Amounts, other: Amounts, sign: int = 1) -> Amounts:
    return Amounts(
        first.requests + sign * other.requests,
        first.bytes + sign * other.bytes,
        first.tokens + sign * other.tokens,
    )

"""Evict requests from a full queue, so that no tenant fills it alone.

A new request evicts the last request of the tenant with the largest share by weight, if that
exceeds its own tenant's. A share is the largest part in requests, bytes or tokens. Batch is evicted
first, retries never.

Cost: nothing until the queue is full; then a scan of the FIFOs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


def add_amounts(first: Amounts, other: Amounts, sign: int = 1) -> Amounts:
    return Amounts(
        first.requests + sign * other.requests,
        first.bytes + sign * other.bytes,
        first.tokens + sign * other.tokens,
    )


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
        search = EvictionSearch(self._used, excess, limits)
        used = _with_request(self._used.get(info.tenant, NO_AMOUNTS), info)
        own_share = _share(used, limits, info.tenant)
        tickets = {
            fifo: fifo.tickets
            for fifo in fifos
            if fifo.place.size != APART and _may_yield(fifo, info)
        }
        is_batch = info.rank is BATCH
        evicted = search.take_last(
            tickets,
            lambda fifo: (
                (fifo.rank is BATCH and not is_batch) or search.share(fifo.tenant) > own_share
            ),
        )
        return evicted if search.has_room else []

    def choose_surplus(
        self, fifos: Iterable[RequestFifo], excess: Amounts, limits: Amounts
    ) -> list[Ticket]:
        """Return tickets to evict, even if an excess remains.

        An oversized request accepted by an empty queue is kept.
        """
        tickets = {
            fifo: [t for t in fifo.tickets if t.info.prompt_tokens <= limits.tokens]
            for fifo in fifos
            if fifo.place.size != APART
        }
        return EvictionSearch(self._used, excess, limits).take_last(tickets, lambda _: True)


class EvictionSearch:
    """One search for tickets to evict, and what is left in the queue without them."""

    def __init__(
        self, used: Mapping[Tenant | None, Amounts], excess: Amounts, limits: Amounts
    ) -> None:
        self._used = dict(used)
        self._excess = excess
        self._limits = limits

    @property
    def has_room(self) -> bool:
        return max(self._excess) <= 0

    def share(self, tenant: Tenant | None) -> float:
        return _share(self._used[tenant], self._limits, tenant)

    def take_last(
        self,
        tickets: Mapping[RequestFifo, Sequence[Ticket]],
        may_take: Callable[[RequestFifo], bool],
    ) -> list[Ticket]:
        """Take the last ticket of the largest tenant until nothing exceeds its limit."""
        left = {fifo: len(waiting) for fifo, waiting in tickets.items()}
        taken: list[Ticket] = []
        while not self.has_room and len(taken) < MAX_EVICTED:
            fifos = [fifo for fifo in tickets if left[fifo] and may_take(fifo)]
            if not fifos:
                break
            fifo = max(fifos, key=lambda f: (f.rank is BATCH, self.share(f.tenant), left[f]))
            left[fifo] -= 1
            ticket = tickets[fifo][left[fifo]]
            taken.append(ticket)
            self._used[fifo.tenant] = _with_request(self._used[fifo.tenant], ticket.info, -1)
            self._excess = _with_request(self._excess, ticket.info, -1)
        return taken


def _with_request(amounts: Amounts, info: RequestInfo, sign: int = 1) -> Amounts:
    return add_amounts(amounts, amounts_of(info), sign)


def _may_yield(fifo: RequestFifo, info: RequestInfo) -> bool:
    if fifo.rank is BATCH:
        return info.rank is not BATCH or fifo.tenant is not info.tenant
    return info.rank is not BATCH and fifo.tenant is not info.tenant


def _share(used: Amounts, limits: Amounts, tenant: Tenant | None) -> float:
    share = max(
        used.requests / limits.requests, used.bytes / limits.bytes, used.tokens / limits.tokens
    )
    return share if tenant is None else share / tenant.spec.weight

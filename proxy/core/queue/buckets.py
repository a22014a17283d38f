"""Queued requests: a FIFO per model, size, class and tenant, sorted in buckets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import NamedTuple, Protocol

from proxy.core.model.types import RequestInfo
from proxy.core.queue.eviction import Amounts
from proxy.core.queue.request_fifo import (
    APART,
    FOR_CACHE,
    LONG,
    SHORT,
    Entry,
    FifoKey,
    Place,
    RequestFifo,
    SortKey,
)
from proxy.core.queue.sorted_fifos import SortedFifos
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import ChangedTenants, Rank, Tenant

MAX_TRIED_TICKETS = 16  # tickets examined per FIFO, failures per place
# A class's sort key: not ahead by age, was last to go ahead.
AgeOrder = tuple[bool, bool]
IN_ORDER: AgeOrder = (True, False)


class LastDispatch(NamedTuple):
    at: float = 0.0
    passed: bool = False  # ahead of a higher class, by age
    passer: int = -1  # the class that last went ahead


class Bucket:
    """All tickets of one class at one place."""

    __slots__ = ("longer_than", "order", "tickets")

    def __init__(self) -> None:
        self.order = SortedFifos()
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()  # by arrival
        self.longer_than: list[int] = []  # [n]: FIFOs with more than n tickets

    @property
    def oldest(self) -> float:
        return next(iter(self.tickets)).since

    def add(self, ticket: Ticket) -> None:
        """Add a ticket, in the order of arrival."""
        later: list[Ticket] = []
        for other in reversed(self.tickets):
            if other.since <= ticket.since:
                break
            later.append(other)
        self.tickets[ticket] = None
        for other in reversed(later):
            self.tickets.move_to_end(other)

    def count_longer(self, length: int) -> None:
        """Count a ticket added to a FIFO of this length."""
        if length == len(self.longer_than):
            self.longer_than.append(0)
        self.longer_than[length] += 1


class Buckets:
    """All FIFOs in dispatch order.

    Tenants with changed counters are recorded; their FIFOs are sorted when the order is read.
    """

    def __init__(self) -> None:
        self.by_key: dict[FifoKey, RequestFifo] = {}
        self._buckets: dict[tuple[Place, Rank], Bucket] = {}
        self._by_tenant: dict[Tenant, list[RequestFifo]] = {}
        self._watch = ChangedTenants()
        self._numbers = count()

    def count(self, place: Place, rank: Rank) -> int:
        bucket = self._buckets.get((place, rank))
        return len(bucket.tickets) if bucket is not None else 0

    def count_ahead(self, place: Place, rank: Rank, tenant: Tenant | None, key: float) -> int:
        """Return how many tickets of a class go before a new one.

        Each tenant gets as many turns as tickets of the new one's FIFO go before it.
        """
        bucket = self._buckets.get((place, rank))
        if bucket is None:
            return 0
        own = self.by_key.get(FifoKey(place, rank, tenant))
        before = own.index(key) if own is not None else 0
        behind = own is not None and len(own.tickets) > before
        return sum(bucket.longer_than[: before + 1]) - behind

    def places(self, model: str) -> Iterator[tuple[Place, Rank]]:
        return (
            (place, rank)
            for place, rank in self._buckets
            if place.model == model and place.size != FOR_CACHE
        )

    def in_order(self) -> list[tuple[tuple[Place, Rank], Bucket]]:
        """Sort the FIFOs; return the buckets of requests that any free slot may serve."""
        for tenant in self._watch.pop_all():
            for fifo in self._by_tenant.get(tenant, ()):
                self._sort(fifo)
        return [(at, bucket) for at, bucket in self._buckets.items() if at[0].size != FOR_CACHE]

    def has_waiting(self, tenant: Tenant, rank: Rank) -> bool:
        return any(fifo.rank is rank for fifo in self._by_tenant.get(tenant, ()))

    def push(self, ticket: Ticket) -> None:
        key = key_of(ticket)
        fifo = self.by_key.get(key)
        if fifo is None:
            since = 0.0
            if (tenant := key.tenant) is not None:
                own = self._by_tenant.setdefault(tenant, [])
                waits = (other.since for other in own if other.rank is key.rank)
                since = min(waits, default=ticket.since)
            fifo = self.by_key[key] = RequestFifo(key, next(self._numbers), since)
            if tenant is not None:
                own.append(fifo)
                tenant.watches.add(self._watch)
        at = key.place, key.rank
        bucket = self._buckets.get(at)
        if bucket is None:
            bucket = self._buckets[at] = Bucket()
        bucket.count_longer(len(fifo.tickets))
        fifo.put(ticket)
        bucket.add(ticket)
        if ticket in fifo.tickets[:MAX_TRIED_TICKETS]:
            self._sort(fifo)

    def remove(self, ticket: Ticket) -> None:
        fifo = self.by_key[key_of(ticket)]
        fifo.remove(ticket)
        bucket = self._buckets[fifo.place, fifo.rank]
        bucket.longer_than[len(fifo.tickets)] -= 1
        del bucket.tickets[ticket]
        self._sort(fifo)
        if not bucket.tickets:
            del self._buckets[fifo.place, fifo.rank]
        if fifo.tickets:
            return
        del self.by_key[fifo.key]
        if (tenant := fifo.tenant) is not None:
            own = self._by_tenant[tenant]
            own.remove(fifo)
            if not own:
                del self._by_tenant[tenant]
                tenant.watches.discard(self._watch)

    def _sort(self, fifo: RequestFifo) -> None:
        order, before = self._buckets[fifo.place, fifo.rank].order, fifo.entry
        entry: Entry | None = None
        if fifo.tickets:
            fifo.least_need = min(
                ticket.info.needed_context for ticket in islice(fifo.tickets, MAX_TRIED_TICKETS)
            )
            _, standing, _, first = fifo.sort_key
            entry = standing, fifo.since, first, fifo.number, fifo.least_need, fifo
        if entry == before:
            return
        if before is not None:
            order.remove(before)
        if entry is not None:
            order.put(entry)
        fifo.entry = entry


class RemoteQueues(Protocol):
    """The queues of the other processes, as last reported.

    Processes, length, bytes and tokens are those of this host.
    """

    processes: int
    waits: bool  # a request waits in any of them
    length: int
    bytes: int
    tokens: int

    def has_more(self, own: Amounts) -> tuple[bool, bool, bool]:
        """Return whether another process has more requests, bytes, tokens; the first wins a tie."""

    def report_change(self) -> None:
        """Report a change of this queue."""

    def has_higher_class(self, place: Place, rank: int) -> bool:
        """Return whether a class above `rank` waits at a place."""

    def oldest(self, model: str) -> Mapping[Rank, float]:
        """Return each class's oldest arrival."""

    def last_dispatch(self, model: str) -> LastDispatch:
        """Return a model's last dispatch there."""

    def has_earlier_turn(
        self, place: Place, order: AgeOrder, key: SortKey, now: float, aged: Mapping[Rank, AgeOrder]
    ) -> bool:
        """Return whether a remote request goes before one with this key.

        `aged` holds the model's aged classes.
        """


def place_of(info: RequestInfo) -> Place:
    return Place(info.model, LONG if info.long else SHORT)


def key_of(ticket: Ticket) -> FifoKey:
    info = ticket.info
    if ticket.cache_wait is not None:
        return FifoKey(Place(info.model, FOR_CACHE), info.rank, info.tenant)
    if ticket.attempts.is_retry or info.pinned:
        return FifoKey(Place(info.model, APART), info.rank, info.tenant)
    return FifoKey(place_of(info), info.rank, info.tenant)

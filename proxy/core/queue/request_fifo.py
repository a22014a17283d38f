"""The queued requests of one tenant, class, model and size."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter
from sys import maxsize
from typing import Final, NamedTuple

from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import NO_TENANT, Rank, Tenant

# Class, tenant's counter and mark, first ticket's key. Marks decide between equal counters.
SortKey = tuple[Rank, float, int, float]
# Tenant's counter, when it began to wait, first ticket's key, FIFO number, context needed.
Entry = tuple[float, float, float, int, int, "RequestFifo"]
NEED: Final = 4  # indexes in an entry
FIFO: Final = 5
KEY = attrgetter("key")


# Values of `Place.size`.
SHORT, LONG = "short", "long"
APART = "apart"  # retried and pinned requests
FOR_CACHE = "cache"  # requests in no order, see `cache_waits`


class Place(NamedTuple):
    """Where a request waits: with the others of its model and size."""

    model: str
    size: str


class FifoKey(NamedTuple):
    place: Place
    rank: Rank
    tenant: Tenant | None


class RequestFifo:
    __slots__ = (
        "entry", "key", "least_need", "number", "place", "rank", "since", "tenant", "tickets",
    )  # fmt: skip

    def __init__(self, key: FifoKey, number: int, since: float) -> None:
        self.key = key
        self.place, self.rank, self.tenant = key
        self.number = number
        self.since = since  # the tenant waits; decides between equal counters
        self.tickets: list[Ticket] = []  # by key, then arrival
        self.least_need = maxsize  # context needed by any examined ticket
        self.entry: Entry | None = None  # in the sorted FIFOs

    @property
    def sort_key(self) -> SortKey:
        """Return the first ticket's sort key; the least goes first."""
        key, tenant = self.tickets[0].key, self.tenant
        if tenant is None:
            return self.rank, 0.0, NO_TENANT, key
        return self.rank, tenant.standings[self.rank], tenant.mark, key

    def put(self, ticket: Ticket) -> None:
        self.tickets.insert(self.index(ticket.key), ticket)

    def remove(self, ticket: Ticket) -> None:
        tickets = self.tickets
        del tickets[tickets.index(ticket, bisect_left(tickets, ticket.key, key=KEY))]

    def index(self, key: float) -> int:
        return bisect_right(self.tickets, key, key=KEY)

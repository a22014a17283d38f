"""The queued requests of one tenant, class, model and size."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter
from sys import maxsize

from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Rank, Tenant

Place = tuple[str, str]  # model and size
Key = tuple[Place, Rank, Tenant | None]
Turn = tuple[Rank, float, float]  # class, tenant's counter, first ticket's key
# Tenant's counter, when it began to wait, first ticket's key, FIFO number, context needed.
Entry = tuple[float, float, float, int, int, "RequestFifo"]
KEY = attrgetter("key")


class RequestFifo:
    __slots__ = ("began", "entry", "key", "least", "number", "place", "rank", "tenant", "tickets")

    def __init__(self, key: Key, number: int, began: float) -> None:
        self.key = key
        self.place, self.rank, self.tenant = key
        self.number = number
        self.began = began  # decides between equal counters, so that keys cannot
        self.tickets: list[Ticket] = []  # by key, then arrival
        self.least = maxsize  # context needed by any examined ticket
        self.entry: Entry | None = None  # in the sorted buckets

    @property
    def turn(self) -> Turn:
        """Return the first ticket's sort key; the least goes first."""
        standing = self.tenant.standings[self.rank] if self.tenant is not None else 0.0
        return self.rank, standing, self.tickets[0].key

    def put(self, ticket: Ticket) -> None:
        self.tickets.insert(self.index(ticket.key), ticket)

    def take(self, ticket: Ticket) -> None:
        tickets = self.tickets
        del tickets[tickets.index(ticket, bisect_left(tickets, ticket.key, key=KEY))]

    def index(self, key: float) -> int:
        """Return the place of a new ticket with this key."""
        return bisect_right(self.tickets, key, key=KEY)

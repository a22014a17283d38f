"""The queued requests of one tenant, class, model and size."""

from __future__ import annotations

from collections import deque
from sys import maxsize

from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Rank, Tenant

Place = tuple[str, str]  # model and size
Key = tuple[Place, Rank, Tenant | None]
Turn = tuple[Rank, float, float]  # class, tenant's counter, arrival
# Tenant's counter, arrival, FIFO number, context needed.
Entry = tuple[float, float, int, int, "RequestFifo"]


class RequestFifo:
    __slots__ = ("entry", "key", "least", "number", "place", "rank", "tenant", "tickets")

    def __init__(self, key: Key, number: int) -> None:
        self.key = key
        self.place, self.rank, self.tenant = key
        self.number = number
        self.tickets: deque[Ticket] = deque()
        self.least = maxsize  # context needed by any examined ticket
        self.entry: Entry | None = None  # in the sorted buckets

    @property
    def turn(self) -> Turn:
        """Return the first ticket's sort key; the least goes first."""
        standing = self.tenant.standings[self.rank] if self.tenant is not None else 0.0
        return self.rank, standing, self.tickets[0].since

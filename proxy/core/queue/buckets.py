"""Queued requests: a FIFO per model, size, class and tenant, sorted in buckets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import NamedTuple, Protocol

from proxy.core.model.types import RequestInfo
from proxy.core.queue.eviction import APART, Amounts
from proxy.core.queue.request_fifo import Entry, Key, Place, RequestFifo, Turn
from proxy.core.queue.sorted_buckets import SortedBuckets
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import ChangedTenants, Rank, Tenant

SHORT, LONG = "short", "long"
LOOK = 16  # tickets examined per FIFO, failures per place
# A class's sort key: not ahead by age, was last to go ahead.
Late = tuple[bool, bool]
IN_ORDER: Late = (True, False)


class LastDispatch(NamedTuple):
    """The last dispatch of a model."""

    at: float = 0.0
    passed: bool = False  # ahead of a higher class, by age
    passer: int = -1  # the class that last went ahead


class Bucket:
    """All tickets of one class at one place."""

    __slots__ = ("longer", "order", "tickets")

    def __init__(self) -> None:
        self.order = SortedBuckets()
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()  # by arrival
        self.longer: list[int] = []  # [n]: FIFOs with more than n tickets

    @property
    def oldest(self) -> float:
        return next(iter(self.tickets)).since

    def grew(self, length: int) -> None:
        """Count a ticket added to a FIFO of this length."""
        if length == len(self.longer):
            self.longer.append(0)
        self.longer[length] += 1


class Buckets:
    """All FIFOs in dispatch order.

    Tenants with changed counters are recorded; their FIFOs are sorted when the order is read.
    """

    def __init__(self) -> None:
        self.by_key: dict[Key, RequestFifo] = {}
        self._crowds: dict[tuple[Place, Rank], Bucket] = {}
        self._of: dict[Tenant, list[RequestFifo]] = {}
        self._watch = ChangedTenants()
        self._numbers = count()

    def crowds(self) -> Mapping[tuple[Place, Rank], Bucket]:
        for tenant in self._watch.take():
            for line in self._of.get(tenant, ()):
                self._sort(line)
        return self._crowds

    def count(self, place: Place, rank: Rank) -> int:
        crowd = self._crowds.get((place, rank))
        return len(crowd.tickets) if crowd is not None else 0

    def ahead(self, place: Place, rank: Rank, tenant: Tenant | None) -> int:
        """Return how many tickets of a class go before a new one.

        Each tenant gets as many turns as the new ticket's FIFO has tickets.
        """
        crowd = self._crowds.get((place, rank))
        if crowd is None:
            return 0
        own = self.by_key.get((place, rank, tenant))
        turns = len(own.tickets) + 1 if own is not None else 1
        return sum(crowd.longer[:turns])

    def places(self, model: str) -> Iterator[tuple[Place, Rank]]:
        return (at for at in self._crowds if at[0][0] == model)

    def of_class(self, tenant: Tenant, rank: Rank) -> bool:
        return any(line.rank is rank for line in self._of.get(tenant, ()))

    def push(self, ticket: Ticket) -> None:
        key = key_of(ticket)
        line = self.by_key.get(key)
        if line is None:
            line = self.by_key[key] = RequestFifo(key, next(self._numbers))
            if line.tenant is not None:
                self._of.setdefault(line.tenant, []).append(line)
                line.tenant.watches.add(self._watch)
        crowd = self._crowds.get(key[:2])
        if crowd is None:
            crowd = self._crowds[key[:2]] = Bucket()
        crowd.grew(len(line.tickets))
        line.tickets.append(ticket)
        crowd.tickets[ticket] = None
        if len(line.tickets) <= LOOK:
            self._sort(line)

    def remove(self, ticket: Ticket) -> None:
        line = self.by_key[key_of(ticket)]
        line.tickets.remove(ticket)
        crowd = self._crowds[line.place, line.rank]
        crowd.longer[len(line.tickets)] -= 1
        del crowd.tickets[ticket]
        self._sort(line)
        if not crowd.tickets:
            del self._crowds[line.place, line.rank]
        if line.tickets:
            return
        del self.by_key[line.key]
        if (tenant := line.tenant) is not None:
            own = self._of[tenant]
            own.remove(line)
            if not own:
                del self._of[tenant]
                tenant.watches.discard(self._watch)

    def _sort(self, line: RequestFifo) -> None:
        order, before = self._crowds[line.place, line.rank].order, line.entry
        entry: Entry | None = None
        if line.tickets:
            line.least = min(ticket.ask.needs for ticket in islice(line.tickets, LOOK))
            _, standing, since = line.turn
            entry = standing, since, line.number, line.least, line
        if entry == before:
            return
        if before is not None:
            order.take(before)
        if entry is not None:
            order.put(entry)
        line.entry = entry


class RemoteQueues(Protocol):
    """The queues of the other processes, as last reported."""

    processes: int
    length: int
    bytes: int
    tokens: int

    def has_more(self, own: Amounts) -> tuple[bool, bool, bool]:
        """Return whether another process has more requests, bytes, tokens; the first wins a tie."""

    def moved(self) -> None:
        """Report a change of this queue."""

    def before(self, place: Place, rank: int) -> bool:
        """Return whether a class above `rank` waits at a place."""

    def oldest(self, model: str) -> Mapping[Rank, float]:
        """Return each class's oldest arrival."""

    def last(self, model: str) -> LastDispatch:
        """Return a model's last dispatch there."""

    def goes_first(
        self, place: Place, order: Late, turn: Turn, now: float, aged: Mapping[Rank, Late]
    ) -> bool:
        """Return whether a remote request goes before this turn.

        `aged` holds the model's aged classes.
        """


def place_of(ask: RequestInfo) -> Place:
    return ask.model, LONG if ask.long else SHORT


def key_of(ticket: Ticket) -> Key:
    ask = ticket.ask
    if ticket.tried or ask.pinned:
        return (ask.model, APART), ask.rank, ask.tenant
    return place_of(ask), ask.rank, ask.tenant

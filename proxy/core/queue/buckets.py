"""Those who wait, as the queue keeps them: a line for each model, size, class and tenant."""

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
LOOK = 16  # tickets looked at in a line, and tried at a place, before it is given up
# Of a model's classes: that it does not go before one above for its age, that it did so last.
Late = tuple[bool, bool]
IN_ORDER: Late = (True, False)


class LastDispatch(NamedTuple):
    """The last turn of a model."""

    at: float = 0.0
    passed: bool = False  # it went before a class above, for its age
    passer: int = -1  # the class that did so last


class Bucket:
    """All of one class that wait at one place."""

    __slots__ = ("longer", "order", "tickets")

    def __init__(self) -> None:
        self.order = SortedBuckets()
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()  # as they came
        self.longer: list[int] = []  # how many of its lines have more than none, than one, ...

    @property
    def oldest(self) -> float:
        """Since when any waits."""
        return next(iter(self.tickets)).since

    def grew(self, length: int) -> None:
        """Note that a line of that length has one more."""
        if length == len(self.longer):
            self.longer.append(0)
        self.longer[length] += 1


class Buckets:
    """All lines, and in which order they go.

    A tenant's standing changes at any time. Those that did are noted, and find their places anew
    when somebody wants to know: nothing is done for each of all that wait.
    """

    def __init__(self) -> None:
        self.by_key: dict[Key, RequestFifo] = {}
        self._crowds: dict[tuple[Place, Rank], Bucket] = {}
        self._of: dict[Tenant, list[RequestFifo]] = {}
        self._watch = ChangedTenants()
        self._numbers = count()

    def crowds(self) -> Mapping[tuple[Place, Rank], Bucket]:
        """Return all crowds, in order."""
        for tenant in self._watch.take():
            for line in self._of.get(tenant, ()):
                self._sort(line)
        return self._crowds

    def count(self, place: Place, rank: Rank) -> int:
        """How many wait."""
        crowd = self._crowds.get((place, rank))
        return len(crowd.tickets) if crowd is not None else 0

    def ahead(self, place: Place, rank: Rank, tenant: Tenant | None) -> int:
        """Reckon how many of a class go before one who joins the end of a line now.

        Each tenant has one turn for each of that line's.
        """
        crowd = self._crowds.get((place, rank))
        if crowd is None:
            return 0
        own = self.by_key.get((place, rank, tenant))
        turns = len(own.tickets) + 1 if own is not None else 1
        return sum(crowd.longer[:turns])

    def places(self, model: str) -> Iterator[tuple[Place, Rank]]:
        """Name where anybody of a model waits."""
        return (at for at in self._crowds if at[0][0] == model)

    def of_class(self, tenant: Tenant, rank: Rank) -> bool:
        """Whether a tenant has any in a class."""
        return any(line.rank is rank for line in self._of.get(tenant, ()))

    def push(self, ticket: Ticket) -> None:
        """Let one in, as the last of its line."""
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
        """Let one out."""
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
        """Have a line stand where it belongs now."""
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
    """The queues of other processes, as far as they have told."""

    processes: int  # how many others there are
    length: int
    bytes: int
    tokens: int

    def has_more(self, own: Amounts) -> tuple[bool, bool, bool]:
        """Of what any of them has more than this one; of as much, the first of them has more."""

    def moved(self) -> None:
        """Tell them of this one."""

    def before(self, place: Place, rank: int) -> bool:
        """Whether any of a class above this number waits there."""

    def oldest(self, model: str) -> Mapping[Rank, float]:
        """Since when the oldest of each class waits there."""

    def last(self, model: str) -> LastDispatch:
        """Return the last turn there."""

    def goes_first(
        self, place: Place, order: Late, turn: Turn, now: float, aged: Mapping[Rank, Late]
    ) -> bool:
        """Whether somebody there is to have what is free now, before one whose turn is this.

        `aged` are the classes of its model that are of age, and when they go.
        """


def place_of(ask: RequestInfo) -> Place:
    """Name where one waits who comes now."""
    return ask.model, LONG if ask.long else SHORT


def key_of(ticket: Ticket) -> Key:
    """Name the line where one waits."""
    ask = ticket.ask
    if ticket.tried or ask.pinned:
        return (ask.model, APART), ask.rank, ask.tenant
    return place_of(ask), ask.rank, ask.tenant

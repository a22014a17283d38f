"""Those who wait, as the queue keeps them: a line for each model, size, class and tenant."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from sys import maxsize
from typing import NamedTuple, Protocol

from proxy.core.room import APART
from proxy.core.tenants import Rank, Tenant
from proxy.core.types import Ask, Ticket

SHORT, LONG = "short", "long"
Place = tuple[str, str]  # model and size
Key = tuple[Place, Rank, Tenant | None]
Turn = tuple[Rank, float, float]  # class, the tenant's counter, since when
# Of a model's classes: that it does not go before one above for its age, that it did so last.
Order = tuple[bool, bool]
IN_ORDER: Order = (True, False)


class Last(NamedTuple):
    """The last turn of a model."""

    at: float = 0.0
    passed: bool = False  # it went before a class above, for its age
    passer: int = -1  # the class that did so last


class Line:
    """Those of one tenant, class, model and size, who came first in front."""

    __slots__ = ("key", "least", "place", "rank", "tenant", "tickets")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.place, self.rank, self.tenant = key
        self.tickets: deque[Ticket] = deque()
        self.least = maxsize  # context that any of them needs, or any that was here

    @property
    def turn(self) -> Turn:
        """Say when it goes: the least comes first."""
        standing = self.tenant.standings[self.rank] if self.tenant is not None else 0.0
        return self.rank, standing, self.tickets[0].since


class Elsewhere(Protocol):
    """The queues of other processes, as far as they have told."""

    length: int
    bytes: int
    tokens: int

    def moved(self) -> None:
        """Tell them of this one."""

    def before(self, place: Place, rank: int) -> bool:
        """Whether any of a class above this number waits there."""

    def oldest(self, model: str) -> Mapping[Rank, float]:
        """Since when the oldest of each class waits there."""

    def last(self, model: str) -> Last:
        """Return the last turn there."""

    def goes_first(
        self, place: Place, order: Order, turn: Turn, now: float, aged: Mapping[Rank, Order]
    ) -> bool:
        """Whether somebody there is to have what is free now, before one whose turn is this.

        `aged` are the classes of its model that are of age, and when they go.
        """


def place_of(ask: Ask) -> Place:
    """Name where one waits who comes now."""
    return ask.model, LONG if ask.long else SHORT


def key_of(ticket: Ticket) -> Key:
    """Name the line where one waits."""
    ask = ticket.ask
    if ticket.tried or ask.pinned:
        return (ask.model, APART), ask.rank, ask.tenant
    return place_of(ask), ask.rank, ask.tenant

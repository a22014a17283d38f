"""One round of who goes next, of all that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from heapq import merge
from itertools import islice
from sys import maxsize

from proxy.core.fleet.leases import Lease
from proxy.core.model.types import Refusal
from proxy.core.queue.buckets import (
    IN_ORDER,
    LOOK,
    Buckets,
    LastDispatch,
    Late,
    RemoteQueues,
)
from proxy.core.queue.eviction import APART
from proxy.core.queue.request_fifo import Entry, Place, RequestFifo
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Rank

BATCH = Rank.BATCH
End = Lease | Refusal
NO_TURN = LastDispatch()


class Overtaking:
    """Which classes have gone before those above them, for their age; outlives the rounds."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: dict[str, LastDispatch] = {}  # of each model, in any process

    def known(self, model: str, others: RemoteQueues | None) -> LastDispatch:
        """Return the last turn of a model, here or elsewhere."""
        here = self.last.get(model, NO_TURN)
        if others is not None and (there := others.last(model)).at > here.at:
            here = self.last[model] = there
        return here

    def had(self, model: str, rank: Rank, now: float, *, passed: bool) -> None:
        """Note a turn; `passed`: it went before a class above."""
        before = self.last.get(model, NO_TURN)
        self.last[model] = LastDispatch(now, passed, rank if passed else before.passer)


class DispatchRound:
    """It lives until nobody more can go.

    `end` places a request or refuses it, if it can.
    """

    __slots__ = (
        "_ages",
        "_elsewhere",
        "_end",
        "_held",
        "_least",
        "_lines",
        "_misses",
        "_now",
        "_overtaking",
    )

    def __init__(
        self,
        lines: Buckets,
        end: Callable[[Ticket], End | None],
        now: float,
        ages: Mapping[Rank, float],
        overtaking: Overtaking,
        elsewhere: RemoteQueues | None,
    ) -> None:
        self._lines = lines
        self._end = end
        self._now = now
        self._ages = ages
        self._overtaking = overtaking
        self._elsewhere = elsewhere
        # What one could not do with, none at its place can do with who needs as much.
        self._least: dict[Place, int] = {}
        self._misses: dict[Place, int] = {}
        self._held: set[Place] = set()  # whose turn it is in another process

    def next(self) -> tuple[Ticket, End] | None:
        """Find who goes next; None if nobody can."""
        crowds, others = self._lines.crowds(), self._elsewhere
        oldest: dict[str, dict[Rank, float]] = {}  # since when, of each model's classes
        for ((model, _), rank), crowd in crowds.items():
            known = oldest.setdefault(model, {})
            known[rank] = min(known.get(rank, crowd.oldest), crowd.oldest)
        first = {model: min(known) for model, known in oldest.items()}  # that waits here
        if others is not None and others.length:
            for model, known in oldest.items():
                for rank, since in others.oldest(model).items():
                    known[rank] = min(known.get(rank, since), since)
        aged = {model: self._aged(model, known) for model, known in oldest.items()}
        turns: dict[tuple[Late, Rank], list[Iterator[Entry]]] = {}
        for (place, rank), crowd in crowds.items():
            model = place[0]
            if rank is BATCH and first[model] is not BATCH and rank not in aged[model]:
                continue
            at = aged[model].get(rank, IN_ORDER), rank
            turns.setdefault(at, []).append(crowd.order.below(partial(self._most, place)))
        self._held.clear()
        for order, rank in sorted(turns):
            for *_, line in merge(*turns[order, rank]):
                ended = self._turn_of(line, order, aged[line.place[0]])
                if ended is not None:
                    return ended
        return None

    def _turn_of(
        self, line: RequestFifo, order: Late, aged: Mapping[Rank, Late]
    ) -> tuple[Ticket, End] | None:
        """Have one of a line go, if it is the turn of none elsewhere."""
        (place, rank), others, now = (line.place, line.rank), self._elsewhere, self._now
        if line.least >= self._most(place):
            return None
        if others is not None and others.goes_first(place, order, line.turn, now, aged):
            self._held.add(place)
            return None
        ended = self._first_of(line, aged=rank in aged)
        if ended is not None:
            self._overtaking.had(place[0], rank, now, passed=not order[0])
        return ended

    def _most(self, place: Place) -> int:
        """Below what one must need that is to be tried at a place."""
        if place in self._held or self._misses.get(place, 0) >= LOOK:
            return 0
        return maxsize if place[1] == APART else self._least.get(place, maxsize)

    def _aged(self, model: str, oldest: Mapping[Rank, float]) -> dict[Rank, Late]:
        """Name the classes that go before those above them, this time."""
        last, highest = self._overtaking.known(model, self._elsewhere), min(oldest)
        if last.passed:
            return {}
        # Where two classes are of age, neither has all the turns of the aged.
        return {
            rank: (False, last.passer == rank) if rank > highest else IN_ORDER
            for rank, since in oldest.items()
            if self._now - since >= self._ages[rank]
        }

    def _first_of(self, line: RequestFifo, *, aged: bool) -> tuple[Ticket, End] | None:
        """Find who may go: the head, or else one that could do with less than all before it."""
        place, least, misses = line.place, self._least, self._misses
        for ticket in islice(line.tickets, LOOK):
            needs = ticket.ask.needs
            if needs >= self._most(place):
                continue
            ticket.aged = aged
            if (ended := self._end(ticket)) is not None:
                return ticket, ended
            misses[place] = misses.get(place, 0) + 1
            # That batch leaves room free says nothing of others; they have been asked before.
            least[place] = min(least.get(place, maxsize), needs)
        return None

"""One round of who goes next, of all that wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from sys import maxsize

from proxy.core.lines import IN_ORDER, Elsewhere, Key, Last, Line, Order, Place
from proxy.core.room import APART
from proxy.core.tenants import Rank
from proxy.core.types import Lease, Refusal, Ticket

LOOK = 16  # tickets looked at in a line, and tried at a place, before it is given up
BATCH = Rank.BATCH
End = Lease | Refusal
NO_TURN = Last()


class Overtaking:
    """Which classes have gone before those above them, for their age; outlives the rounds."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: dict[str, Last] = {}  # of each model, in any process

    def known(self, model: str, others: Elsewhere | None) -> Last:
        """Return the last turn of a model, here or elsewhere."""
        here = self.last.get(model, NO_TURN)
        if others is not None and (there := others.last(model)).at > here.at:
            here = self.last[model] = there
        return here

    def had(self, model: str, rank: Rank, now: float, *, passed: bool) -> None:
        """Note a turn; `passed`: it went before a class above."""
        before = self.last.get(model, NO_TURN)
        self.last[model] = Last(now, passed, rank if passed else before.passer)


class Round:
    """It lives until nobody more can go.

    `end` places a request or refuses it, if it can.
    """

    __slots__ = (
        "_ages",
        "_elsewhere",
        "_end",
        "_least",
        "_lines",
        "_misses",
        "_now",
        "_overtaking",
    )

    def __init__(
        self,
        lines: Mapping[Key, Line],
        end: Callable[[Ticket], End | None],
        now: float,
        ages: Mapping[Rank, float],
        overtaking: Overtaking,
        elsewhere: Elsewhere | None,
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

    def next(self) -> tuple[Ticket, End] | None:
        """Find who goes next; None if nobody can."""
        now, others = self._now, self._elsewhere
        oldest: dict[str, dict[Rank, float]] = {}  # since when, of each model's classes
        for line in self._lines.values():
            known = oldest.setdefault(line.place[0], {})
            since = line.tickets[0].since
            known[line.rank] = min(known.get(line.rank, since), since)
        first = {model: min(known) for model, known in oldest.items()}  # that waits here
        if others is not None and others.length:
            for model, known in oldest.items():
                for rank, since in others.oldest(model).items():
                    known[rank] = min(known.get(rank, since), since)
        aged = {model: self._aged(model, known) for model, known in oldest.items()}
        turns: list[tuple[bool, bool, Rank, float, float, int]] = []
        lines = list(self._lines.values())
        for at, line in enumerate(lines):
            model, rank = line.place[0], line.rank
            if rank is BATCH and first[model] is not BATCH and rank not in aged[model]:
                continue
            order, turn = aged[model].get(rank, IN_ORDER), line.turn
            if others is not None and others.goes_first(line.place, order, turn, now, aged[model]):
                continue
            turns.append((*order, *turn, at))
        turns.sort()
        for late, *_, at in turns:
            line = lines[at]
            model, rank = line.place[0], line.rank
            ended = self._first_of(line, aged=rank in aged[model])
            if ended is not None:
                self._overtaking.had(model, rank, now, passed=not late)
                return ended
        return None

    def _aged(self, model: str, oldest: Mapping[Rank, float]) -> dict[Rank, Order]:
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

    def _first_of(self, line: Line, *, aged: bool) -> tuple[Ticket, End] | None:
        """Find who may go: the head, or else one that could do with less than all before it."""
        place, least, misses = line.place, self._least, self._misses
        apart = place[1] == APART
        if not apart and line.least >= least.get(place, maxsize):
            return None
        for ticket in islice(line.tickets, LOOK):
            needs = ticket.ask.needs
            if not apart and needs >= least.get(place, maxsize):
                continue
            if misses.get(place, 0) >= LOOK:
                break
            ticket.aged = aged
            if (ended := self._end(ticket)) is not None:
                return ticket, ended
            misses[place] = misses.get(place, 0) + 1
            # That batch leaves room free says nothing of others; they have been asked before.
            least[place] = min(least.get(place, maxsize), needs)
        return None

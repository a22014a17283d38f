"""One round of who goes next, of all that wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from sys import maxsize

from proxy.core.lines import Elsewhere, Key, Line, Place
from proxy.core.room import APART
from proxy.core.tenants import Rank
from proxy.core.types import Lease, Refusal, Ticket

LOOK = 16  # tickets looked at in a line, and tried at a place, before it is given up
BATCH = Rank.BATCH
End = Lease | Refusal


class Overtaking:
    """Which classes have gone before those above them, for their age; outlives the rounds."""

    __slots__ = ("last", "now")

    def __init__(self) -> None:
        self.now: set[str] = set()  # models where the last turn was such a one
        self.last: dict[str, Rank] = {}  # whose the last such turn of a model was

    def had(self, line: Line, *, passed: bool) -> None:
        """Note a turn; `passed`: it went before a class above."""
        model = line.place[0]
        if passed:
            self.now.add(model)
            self.last[model] = line.rank
        else:
            self.now.discard(model)


class Round:
    """It lives until nobody more can go.

    `end` places a request or refuses it, if it can.
    """

    __slots__ = ("_aged", "_ages", "_elsewhere", "_end", "_least", "_lines", "_misses", "_now")

    def __init__(
        self,
        lines: Mapping[Key, Line],
        end: Callable[[Ticket], End | None],
        now: float,
        ages: Mapping[Rank, float],
        aged: Overtaking,
        elsewhere: Elsewhere | None,
    ) -> None:
        self._lines = lines
        self._end = end
        self._now = now
        self._ages = ages
        self._aged = aged
        self._elsewhere = elsewhere
        # What one could not do with, none at its place can do with who needs as much.
        self._least: dict[Place, int] = {}
        self._misses: dict[Place, int] = {}

    def next(self) -> tuple[Ticket, End] | None:
        """Find who goes next; None if nobody can."""
        now, others = self._now, self._elsewhere
        first: dict[str, Rank] = {}  # the highest class that waits, of each model
        aged_ones: set[tuple[str, Rank]] = set()  # classes that go before those above them
        for line in self._lines.values():
            model = line.place[0]
            first[model] = min(first.get(model, BATCH), line.rank)
            if self._is_aged(line):
                aged_ones.add((model, line.rank))
        turns: list[tuple[bool, bool, Rank, float, float, int]] = []
        lines = list(self._lines.values())
        for at, line in enumerate(lines):
            model, rank = line.place[0], line.rank
            aged = (model, rank) in aged_ones
            if rank is BATCH and first[model] is not BATCH and not aged:
                continue
            if others is not None and not aged and others.goes_first(line.place, line.turn, now):
                continue
            passes = aged and rank > first[model]
            # Where two classes are of age, neither has all the turns of the aged.
            again = passes and self._aged.last.get(model) is rank
            turns.append((not passes, again, *line.turn, at))
        turns.sort()
        for late, *_, at in turns:
            line = lines[at]
            ended = self._first_of(line, aged=(line.place[0], line.rank) in aged_ones)
            if ended is not None:
                self._aged.had(line, passed=not late)
                return ended
        return None

    def _is_aged(self, line: Line) -> bool:
        """Whether one of a line has its class go before higher ones, this time."""
        if line.place[0] in self._aged.now:
            return False
        return self._now - line.tickets[0].since >= self._ages[line.rank]

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

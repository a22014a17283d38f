"""Requests that wait for room.

Each model has a lane for shorts and one for longs, first come first served, so that a long that
waits for a long worker does not hold shorts up. Retries and requests that only one worker can
answer have a lane of their own. Of every lane more than the head is looked at: that one may wait
for a worker, one with a large context say, which the next does not want.

Bounded by count, by bytes of bodies and by time. How fast places became free lately says how long
one who is turned away should stay away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from math import ceil
from sys import maxsize

from proxy.core.types import Ask, Lease, Refusal, Ticket

SPAN_S = 5.0  # over which places that became free are counted
LONGEST_RETRY_S = 120
APART = "apart"
LOOK = 16  # tickets looked at in a lane
Lane = tuple[str, str]
End = Lease | Refusal


class Queue:
    """The router's queue."""

    def __init__(self, most: int, most_bytes: int, max_wait_s: float) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self.max_wait_s = max_wait_s
        self.bytes = 0
        self.length = 0  # how many wait
        self._lanes: dict[Lane, deque[Ticket]] = {}
        self._freed = 0  # places, since ever
        self._marks = ((0.0, 0), (0.0, 0))  # moments, and the count at each: an older, a newer

    def __len__(self) -> int:
        """How many wait."""
        return self.length

    def room_for(self, ask: Ask) -> bool:
        """Whether one more may wait."""
        return self.length < self.most and self.bytes + ask.body_bytes <= self.most_bytes

    def waiting(self, model: str, *, long: bool) -> int:
        """How many of a model and size class wait."""
        if not self.length:
            return 0
        return len(self._lanes.get((model, "long" if long else "short"), ()))

    def push(
        self, ask: Ask, now: float, tried: frozenset[str] = frozenset(), *, explain: bool = False
    ) -> Ticket:
        """Let one wait."""
        ticket = Ticket(ask, now, now + self.max_wait_s, tried, explain)
        self._lanes.setdefault(_lane(ticket), deque()).append(ticket)
        self.length += 1
        self.bytes += ask.body_bytes
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        """Let one go; False if it has left before."""
        if ticket.left:
            return False
        ticket.left = True
        lane = _lane(ticket)
        self._lanes[lane].remove(ticket)
        if not self._lanes[lane]:
            del self._lanes[lane]
        self.length -= 1
        self.bytes -= ticket.ask.body_bytes
        return True

    def leave(self, end: Callable[[Ticket], End | None]) -> list[tuple[Ticket, End]]:
        """Let those go for whom there is an end, the lane with the oldest ticket first."""
        gone: list[tuple[Ticket, End]] = []
        stuck: set[Lane] = set()
        while (lane := self._oldest(stuck)) is not None:
            found = self._first_of(lane, end)
            if found is None:
                stuck.add(lane)
            else:
                self.remove(found[0])
                gone.append(found)
        return gone

    def _first_of(
        self, lane: Lane, end: Callable[[Ticket], End | None]
    ) -> tuple[Ticket, End] | None:
        """Find who may go: the head, or else one that could do with less than all before it."""
        least = maxsize
        for ticket in islice(self._lanes[lane], LOOK):
            if ticket.ask.needs >= least and lane[1] != APART:
                continue
            if (ended := end(ticket)) is not None:
                return ticket, ended
            least = min(least, ticket.ask.needs)
        return None

    def _oldest(self, stuck: set[Lane]) -> Lane | None:
        free = [(tickets[0].since, lane) for lane, tickets in self._lanes.items()]
        return min((at for at in free if at[1] not in stuck), default=(0.0, None))[1]

    # When to come back

    def freed(self, now: float) -> None:
        """Count a place that became free."""
        self._freed += 1
        if now - self._marks[1][0] > SPAN_S:
            self._marks = self._marks[1], (now, self._freed)

    def retry_after_s(self, now: float) -> int:
        """How long until those who wait now should have been served."""
        since, before = self._marks[0]
        freed, seconds = self._freed - before, now - since
        if freed <= 0 or seconds <= 0:
            wait = self.max_wait_s
        else:
            wait = (self.length + 1) * seconds / freed
        return min(max(ceil(wait), 1), LONGEST_RETRY_S)


def _lane(ticket: Ticket) -> Lane:
    ask = ticket.ask
    if ticket.tried or ask.pinned:
        return ask.model, APART
    return ask.model, "long" if ask.long else "short"

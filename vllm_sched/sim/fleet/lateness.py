"""Who of a run is late, known as soon as it can be; and whether the run still matters.

Who has no first token when the target for it is over is late, though it be long until that comes,
and in an overloaded fleet it is. So is who has to write more tokens than may be written in the time
that is left. So a run that has failed ends sooner, and none other does.

Cost: a few entries in a heap for each request. How it fails: a gap that is too long is not known
before its request's end.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_sched.bench.results.goodput import Targets
    from vllm_sched.bench.traffic.types import Request


class ObservedFlight:
    """What is told of a request under way."""

    __slots__ = ("counts", "first", "late", "lost", "over", "request")

    def __init__(self, request: Request, *, counts: bool) -> None:
        self.request = request
        self.counts = counts
        self.first = -1.0  # when its first token came
        self.over = self.late = self.lost = False


class Due(Enum):
    """What should have come by a time."""

    FIRST = auto()
    BORNE = auto()  # the first token, as late as may be borne
    PACE = auto()  # the last token, at the pace that is asked for
    END = auto()


class Lateness:
    """See the module's text.

    `most` of all may be late; of a class, `most_lost` may be so and slower than may be borne too:
    for a prompt `borne_s` says how late its first token may be where the target is less.
    """

    def __init__(
        self,
        targets: Targets,
        borne_s: Callable[[int], float],
        most: float = math.inf,
        most_lost: Mapping[str, float] | None = None,
    ) -> None:
        self.too_many = False
        self._targets = targets
        self._borne_s = borne_s
        self._late, self._most = 0, most
        self._lost: dict[str, int] = {}
        self._most_lost = most_lost or {}
        self._watches = most < math.inf or bool(most_lost)
        self._due: list[tuple[float, int, Due, ObservedFlight]] = []
        self._number = 0  # of equal times the first

    def arrived(self, flight: ObservedFlight) -> None:
        """Await its tokens."""
        if not (flight.counts and self._watches):
            return
        at, targets = flight.request.at, self._targets
        if targets.ttft is not None:
            self._await(at + targets.ttft, Due.FIRST, flight)
        if targets.e2el is not None:
            self._await(at + targets.e2el, Due.END, flight)

    def first(self, flight: ObservedFlight) -> None:
        """Note that its first token came."""
        if not (flight.counts and self._watches):
            return
        request, targets = flight.request, self._targets
        if targets.ttft is not None and (ttft := flight.first - request.at) > targets.ttft:
            self._is_late(flight)
            if ttft > self._borne_s(request.prompt_tokens):
                self._is_lost(flight)
        if targets.tpot is not None and request.output_tokens > 1:
            due = flight.first + targets.tpot * (request.output_tokens - 1)
            self._await(due, Due.PACE, flight)

    def ended(self, flight: ObservedFlight, *, met: bool, kept: bool) -> None:
        """Learn what became of it: `met` within the targets, `kept` within what may be borne."""
        flight.over = True
        if flight.counts and not met:
            self._is_late(flight)
            if not kept:
                self._is_lost(flight)

    def look(self, now: float) -> None:
        """See what should have come by now, when all was told that did."""
        due = self._due
        while due and due[0][0] < now:
            _, _, what, flight = heappop(due)
            if not flight.over:
                self._overdue(flight, what, now)

    def _overdue(self, flight: ObservedFlight, what: Due, now: float) -> None:
        """Note who is late; compared as it will be at its end, of which now is no more than that.

        Where rounding has it otherwise, its end will tell.
        """
        request, targets = flight.request, self._targets
        waited = now - request.at
        if what is Due.PACE:
            tpot = (now - flight.first) / (request.output_tokens - 1)
            if targets.tpot is not None and tpot > targets.tpot:
                self._is_late(flight)
                self._is_lost(flight)
        elif what is Due.END:
            if targets.e2el is not None and waited > targets.e2el:
                self._is_late(flight)
        elif flight.first < 0 and targets.ttft is not None and waited > targets.ttft:
            self._is_late(flight)
            if waited > (borne := self._borne_s(request.prompt_tokens)):
                self._is_lost(flight)
            elif what is Due.FIRST:
                self._await(request.at + borne, Due.BORNE, flight)

    def _await(self, at: float, what: Due, flight: ObservedFlight) -> None:
        self._number += 1
        heappush(self._due, (at, self._number, what, flight))

    def _is_late(self, flight: ObservedFlight) -> None:
        if not flight.late:
            flight.late = True
            self._late += 1
            self.too_many |= self._late > self._most

    def _is_lost(self, flight: ObservedFlight) -> None:
        if not flight.lost:
            flight.lost = True
            klass = flight.request.klass
            lost = self._lost[klass] = self._lost.get(klass, 0) + 1
            self.too_many |= lost > self._most_lost.get(klass, math.inf)

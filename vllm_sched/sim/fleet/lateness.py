"""Early detection of late requests, to end a failed simulation run soon.

A request is late once its first token is overdue, or once its remaining tokens cannot meet the
target. Cost: a few heap entries per request. How it fails: a long gap between tokens is noticed
only at the request's end.
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
    __slots__ = ("counts", "first", "late", "lost", "over", "request")

    def __init__(self, request: Request, *, counts: bool) -> None:
        self.request = request
        self.counts = counts
        self.first = -1.0  # time of the first token
        self.over = self.late = self.lost = False


class Due(Enum):
    FIRST = auto()
    BORNE = auto()  # the first token, at the tolerated limit
    PACE = auto()  # the last token, at the target pace
    END = auto()


class Lateness:
    """Counts late requests; `too_many` is True once the run has failed.

    Up to `most` requests may be late, and up to `most_lost` of each class may exceed the tolerated
    limit. `borne_s` returns the tolerated time to first token of a prompt length.
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
        self._number = 0  # breaks ties of the heap

    def arrived(self, flight: ObservedFlight) -> None:
        if not (flight.counts and self._watches):
            return
        at, targets = flight.request.at, self._targets
        if targets.ttft is not None:
            self._await(at + targets.ttft, Due.FIRST, flight)
        if targets.e2el is not None:
            self._await(at + targets.e2el, Due.END, flight)

    def first(self, flight: ObservedFlight) -> None:
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
        """Record the end: `met` if within the targets, `kept` if within the tolerated limit."""
        flight.over = True
        if flight.counts and not met:
            self._is_late(flight)
            if not kept:
                self._is_lost(flight)

    def look(self, now: float) -> None:
        due = self._due
        while due and due[0][0] < now:
            _, _, what, flight = heappop(due)
            if not flight.over:
                self._overdue(flight, what, now)

    def _overdue(self, flight: ObservedFlight, what: Due, now: float) -> None:
        # Same comparisons as at the request's end, which corrects rounding.
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

"""How many retries the fleet can bear.

Each request of the last seconds earns a share of a retry and a retry spends one, so that a fleet
which fails every request is not asked three times over. A few are there from the start and come
back with time: one failure on a quiet fleet is always worth another try.

A worker that dies fails all that it has at once, and that may be more than any share. So it is one
event: the first to fail there pays for it, and whoever was there by then goes elsewhere for
nothing, once. How it fails: many workers that are ill at a time would have their requests made
twice; once half of the fleet has fallen so, the others' requests pay again.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker

# Workers that may drop one request: it may be the request that makes them die.
MAX_DROPS = 2
AT_REST = 10.0
PER_S = 1.0
WINDOW_S = 10
AT_ONCE_S = 1.0  # a failure that stayed the only one for so long was no fall


class RetryBudget:
    """The whole fleet's."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._saved = AT_REST
        self._at = 0.0
        self._requests = 0  # since the last turn
        self._turn = -inf  # of the next second
        self._before: deque[tuple[float, int]] = deque()  # seconds that ended, and theirs

    def earn(self, now: float) -> None:
        """Count a request that was not a retry."""
        if now >= self._turn:
            self._turn_over(now)
        self._requests += 1
        self._saved += self.share

    def affords(self, now: float) -> bool:
        """Whether there is a retry left."""
        if self.share <= 0:
            return False
        self._turn_over(now)
        self._saved = min(self._saved + max(now - self._at, 0.0) * PER_S, self._most())
        self._at = now
        return self._saved >= 1.0

    def spend(self, now: float) -> bool:
        """Take a retry; False when there is none left."""
        if not self.affords(now):
            return False
        self._saved -= 1.0
        return True

    def _turn_over(self, now: float) -> None:
        """Begin another second; forget the requests of those that are long over."""
        before = self._before
        if self._requests and now >= self._turn:
            before.append((self._turn, self._requests))
            self._requests = 0
        while before and before[0][0] <= now - WINDOW_S:
            before.popleft()
        if now >= self._turn:
            self._saved = min(self._saved, self._most())
            self._turn = now + 1.0

    def _most(self) -> float:
        """Return what may be saved: as much as the requests of the last seconds have earned."""
        lately = self._requests + sum(requests for _, requests in self._before)
        return max(self.share * lately, AT_REST)


class WorkerFailureEvent:
    """A worker that has begun to fail."""

    __slots__ = ("at", "beside", "is_large")

    def __init__(self, at: float, beside: int) -> None:
        self.at = at
        self.beside = beside  # the workers there were then, itself among them
        self.is_large = False  # whether more than one of its requests has failed


class WorkerFailureEvents:
    """The workers that fell lately."""

    def __init__(self) -> None:
        self._of: dict[Worker, WorkerFailureEvent] = {}

    def spare(self, worker: Worker, since: float, now: float, beside: int) -> bool:
        """Note that a request failed which a worker had since then; whether that costs nothing.

        `beside`: how many live workers there are for such a request.
        """
        if self._last(worker, now) is None:
            lately = ((who, each) for who, each in self._of.items() if now - each.at <= WINDOW_S)
            self._of = dict(lately)
            self._of[worker] = WorkerFailureEvent(now, beside)
            return False
        if not self.would_spare(worker, since, now):
            return False
        self._of[worker].is_large = True
        return True

    def would_spare(self, worker: Worker, since: float, now: float) -> bool:
        """Whether it would cost nothing if a request failed that a worker had since then."""
        fall = self._last(worker, now)
        if fall is None or since > fall.at:  # sent to a worker that was known to fail
            return False
        if fall.is_large:
            return True
        others = sum(each.is_large and now - each.at <= WINDOW_S for each in self._of.values())
        return others + 1 <= max(fall.beside // 2, 1)

    def _last(self, worker: Worker, now: float) -> WorkerFailureEvent | None:
        fall = self._of.get(worker)
        if fall is None or now - fall.at > (WINDOW_S if fall.is_large else AT_ONCE_S):
            return None
        return fall

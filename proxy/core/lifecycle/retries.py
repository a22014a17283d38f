"""Retry budget of the fleet.

Requests within `WINDOW_S` earn shares of retries, and a reserve refills with time. A worker that
dies fails all its requests at once: the first one pays for its retry, the others there retry for
free, once.

How it fails: many failing workers double the load, so at most half of the workers get free retries.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker

MAX_DROPS = 2
MIN_RESERVE = 10.0
RESERVE_PER_S = 1.0
WINDOW_S = 10
CRASH_WINDOW_S = 1.0


class RetryBudget:
    def __init__(self, share: float) -> None:
        self.share = share
        self._saved = MIN_RESERVE
        self._at = 0.0
        self._requests = 0  # since the last turn
        self._turn = -inf  # next second
        self._before: deque[tuple[float, int]] = deque()  # ended seconds, and their requests

    def earn(self, now: float) -> None:
        if now >= self._turn:
            self._turn_over(now)
        self._requests += 1
        self._saved += self.share

    def has_retry(self, now: float) -> bool:
        if self.share <= 0:
            return False
        self._turn_over(now)
        self._saved = min(self._saved + max(now - self._at, 0.0) * RESERVE_PER_S, self._most())
        self._at = now
        return self._saved >= 1.0

    def spend(self, now: float) -> bool:
        if not self.has_retry(now):
            return False
        self._saved -= 1.0
        return True

    def _turn_over(self, now: float) -> None:
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
        lately = self._requests + sum(requests for _, requests in self._before)
        return max(self.share * lately, MIN_RESERVE)


@dataclass(slots=True, eq=False)
class WorkerFailureEvent:
    at: float
    beside: int  # live workers
    is_large: bool = False  # several requests failed


class WorkerFailureEvents:
    def __init__(self) -> None:
        self._of: dict[Worker, WorkerFailureEvent] = {}

    def take_free_retry(self, worker: Worker, since: float, now: float, beside: int) -> bool:
        """Count a failed request; return whether its retry is free.

        `since`: when it was sent. `beside`: live workers for it.
        """
        if self._last(worker, now) is None:
            lately = ((who, each) for who, each in self._of.items() if now - each.at <= WINDOW_S)
            self._of = dict(lately)
            self._of[worker] = WorkerFailureEvent(now, beside)
            return False
        if not self.has_free_retry(worker, since, now):
            return False
        self._of[worker].is_large = True
        return True

    def has_free_retry(self, worker: Worker, since: float, now: float) -> bool:
        fall = self._last(worker, now)
        if fall is None or since > fall.at:  # sent after the failure
            return False
        if fall.is_large:
            return True
        others = sum(each.is_large and now - each.at <= WINDOW_S for each in self._of.values())
        return others + 1 <= max(fall.beside // 2, 1)

    def _last(self, worker: Worker, now: float) -> WorkerFailureEvent | None:
        fall = self._of.get(worker)
        if fall is None or now - fall.at > (WINDOW_S if fall.is_large else CRASH_WINDOW_S):
            return None
        return fall

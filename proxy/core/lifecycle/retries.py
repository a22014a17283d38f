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
        self._budget = MIN_RESERVE
        self._refilled_at = 0.0
        self._requests = 0  # in this second
        self._second_ends = -inf
        self._past_seconds: deque[tuple[float, int]] = deque()  # ended seconds, and their requests

    def earn(self, now: float) -> None:
        if now >= self._second_ends:
            self._roll_over(now)
        self._requests += 1
        self._budget += self.share

    def has_retry(self, now: float) -> bool:
        if self.share <= 0:
            return False
        self._roll_over(now)
        refill = max(now - self._refilled_at, 0.0) * RESERVE_PER_S
        self._budget = min(self._budget + refill, self._max_budget())
        self._refilled_at = now
        return self._budget >= 1.0

    def spend(self, now: float) -> bool:
        if not self.has_retry(now):
            return False
        self._budget -= 1.0
        return True

    def _roll_over(self, now: float) -> None:
        past = self._past_seconds
        if self._requests and now >= self._second_ends:
            past.append((self._second_ends, self._requests))
            self._requests = 0
        while past and past[0][0] <= now - WINDOW_S:
            past.popleft()
        if now >= self._second_ends:
            self._budget = min(self._budget, self._max_budget())
            self._second_ends = now + 1.0

    def _max_budget(self) -> float:
        lately = self._requests + sum(requests for _, requests in self._past_seconds)
        return max(self.share * lately, MIN_RESERVE)


@dataclass(slots=True, eq=False)
class WorkerFailureEvent:
    at: float
    live_workers: int
    is_large: bool = False  # several requests failed


class WorkerFailureEvents:
    def __init__(self) -> None:
        self._events: dict[Worker, WorkerFailureEvent] = {}

    def take_free_retry(self, worker: Worker, since: float, now: float, live_workers: int) -> bool:
        """Count a failed request; return whether its retry is free.

        `since`: when it was sent. `live_workers`: that could serve it.
        """
        if self._recent_event(worker, now) is None:
            recent = ((w, event) for w, event in self._events.items() if now - event.at <= WINDOW_S)
            self._events = dict(recent)
            self._events[worker] = WorkerFailureEvent(now, live_workers)
            return False
        if not self.has_free_retry(worker, since, now):
            return False
        self._events[worker].is_large = True
        return True

    def has_free_retry(self, worker: Worker, since: float, now: float) -> bool:
        event = self._recent_event(worker, now)
        if event is None or since > event.at:  # sent after the failure
            return False
        if event.is_large:
            return True
        others = sum(
            other.is_large and now - other.at <= WINDOW_S for other in self._events.values()
        )
        return others + 1 <= max(event.live_workers // 2, 1)

    def _recent_event(self, worker: Worker, now: float) -> WorkerFailureEvent | None:
        event = self._events.get(worker)
        if event is None or now - event.at > (WINDOW_S if event.is_large else CRASH_WINDOW_S):
            return None
        return event

"""An event queue in virtual time, and the arrivals of a schedule in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import chain, count
from math import inf
from typing import TypeAlias

from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request

Arrive: TypeAlias = Callable[[Request, float, Callable[[float], None] | None], object]

Call: TypeAlias = Callable[[float], None]
# At equal times arrivals come before engine steps.
ARRIVAL_RANK, STEP_RANK = 0, 1


class EventQueue:
    """Scheduled calls, ordered by time, rank and insertion."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, int, Call]] = []
        self._numbers = count()

    def schedule(self, when: float, call: Call, *, rank: int = 0) -> None:
        """Schedule a call; a time in the past means now."""
        heappush(self._entries, (max(when, self.now), rank, next(self._numbers), call))

    def next_at(self) -> float:
        return self._entries[0][0] if self._entries else inf

    def step(self) -> None:
        self.now, _, _, call = heappop(self._entries)
        call(self.now)


class Arrivals:
    """Requests that arrive; `more` is False after the last."""

    def __init__(self, queue: EventQueue, arrive: Arrive) -> None:
        self.more = True
        self._queue = queue
        self._arrive = arrive

    def play(self, schedule: Schedule) -> None:
        if schedule.concurrency is None:
            self.open(iter(schedule))
        else:
            self._play_closed(schedule, schedule.concurrency)

    def open(self, requests: Iterator[Request]) -> None:
        """Let requests arrive at their own times."""
        request = next(requests, None)
        if request is None:
            self.more = False
            return
        coming = request

        def come(now: float) -> None:
            self._arrive(coming, now, None)
            self.open(requests)

        self._queue.schedule(coming.at, come, rank=ARRIVAL_RANK)

    def _play_closed(self, schedule: Schedule, concurrency: int) -> None:
        requests = iter(schedule)
        head = next(requests, None)
        requests = chain([head] if head is not None else [], requests)
        end = schedule.ends_after_s

        def following(now: float) -> None:
            request = next(requests, None) if end is None or now < end else None
            if request is None:
                self.more = False
            else:
                self._arrive(request, now, following)

        for _ in range(concurrency):
            self._queue.schedule(0.0, following, rank=ARRIVAL_RANK)

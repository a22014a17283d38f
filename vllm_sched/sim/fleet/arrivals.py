"""Arrivals of a schedule in virtual time: open loop, or closed loop with a fixed concurrency."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from vllm_sched.sim.fleet.events import ARRIVAL_RANK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_sched.bench.traffic.schedule import Schedule
    from vllm_sched.bench.traffic.types import Request
    from vllm_sched.sim.fleet.events import EventQueue

    # Accepts a request at a time; the call, if any, is to be made at its end.
    Arrive: TypeAlias = Callable[[Request, float, Callable[[float], None] | None], object]


class Arrivals:
    """The arrivals of one schedule; `more` is False after the last."""

    def __init__(self, schedule: Schedule, queue: EventQueue, arrive: Arrive) -> None:
        self.more = True
        self._queue = queue
        self._arrive = arrive
        if schedule.concurrency is None:
            self._open(iter(schedule))
        else:
            self._closed(schedule, schedule.concurrency)

    def _open(self, requests: Iterator[Request]) -> None:
        request = next(requests, None)
        if request is None:
            self.more = False
            return
        coming = request

        def come(now: float) -> None:
            self._arrive(coming, now, None)
            self._open(requests)

        self._queue.at(coming.at, come, rank=ARRIVAL_RANK)

    def _closed(self, schedule: Schedule, concurrency: int) -> None:
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
            self._queue.at(0.0, following, rank=ARRIVAL_RANK)

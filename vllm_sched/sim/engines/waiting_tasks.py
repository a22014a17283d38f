"""The waiting requests of a fluid engine, by length."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence

from vllm_sched.policies.fluid_effects import LongPromptLimits
from vllm_sched.sim.engines.kv_blocks import Task
from vllm_sched.sim.types import Leg

DECODE = Leg.DECODE


class WaitingTasks:
    def __init__(self, limits: LongPromptLimits | None, prefill_s: float) -> None:
        self._limits = limits
        self._prefill_s = prefill_s  # per token
        self.with_kv: deque[Task] = deque()  # not subject to policies
        self.shorts: deque[Task] = deque()  # or all, without long-prompt policy
        self._mediums: dict[int, deque[Task]] = {}  # of about one length
        self.longs: deque[Task] = deque()

    def next_ready(self, step: int) -> int | None:
        queues = (self.with_kv, self.shorts, *self._mediums.values(), self.longs)
        heads = (queue[0].ready for queue in queues if queue)
        return min((ready for ready in heads if ready > step), default=None)

    def push(self, task: Task) -> None:
        if (limits := self._limits) is not None:
            task.long = task.left > limits.above_tokens
            task.medium = not task.long and task.left > limits.max_short
        task.has_kv = task.job.leg is DECODE
        queue = self.queue_of(task)
        if queue is self.longs:
            insort(queue, task, key=self._end_from_arrival)
        else:
            queue.append(task)

    def queue_of(self, task: Task) -> deque[Task]:
        if task.has_kv:
            return self.with_kv
        if task.long:
            return self.longs
        if task.medium:
            return self._mediums.setdefault(task.left.bit_length(), deque())
        return self.shorts

    def next_medium(self, prefills: Sequence[Task], budget: int, now: float) -> deque[Task] | None:
        """Return the queue of the medium that enters after all shorts; None if none enters."""
        queues = self._medium_queues()
        in_prefill = sum(task.left for task in prefills if task.medium)
        if self._limits is None or not queues or in_prefill >= max(budget, 1):
            return None
        return _overdue(queues, now, self._limits.max_wait_s) or queues[0]

    def before_shorts(
        self, prefills: Sequence[Task], now: float, *, scarce: bool
    ) -> deque[Task] | None:
        """Return the queue of a medium before the shorts; `scarce`: slots or KV blocks."""
        if not (self._limits and self.shorts and (queues := self._medium_queues())):
            return None
        if scarce:
            first = min(queues, key=lambda queue: self._end_from_arrival(queue[0]))
            return first if self._end_from_arrival(first[0]) < self.shorts[0].since else None
        if any(task.medium for task in prefills):
            return None
        return _overdue(queues, now, self._limits.max_wait_s)

    def _medium_queues(self) -> list[deque[Task]]:
        for queue in self._mediums.values():
            while queue and queue[0].gone:
                queue.popleft()
        return [queue for _, queue in sorted(self._mediums.items()) if queue]

    def _end_from_arrival(self, task: Task) -> float:
        return task.since + self._prefill_s * task.left


def _overdue(queues: Sequence[deque[Task]], now: float, max_wait_s: float) -> deque[Task] | None:
    oldest = min(queues, key=lambda queue: queue[0].since)
    return oldest if now - oldest[0].since >= max_wait_s else None

"""The waiting requests of a fluid engine, by length where a policy distinguishes lengths."""

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
        self.mediums: deque[Task] = deque()
        self.longs: deque[Task] = deque()

    def next_ready(self, step: int) -> int | None:
        queues = (self.with_kv, self.shorts, self.mediums, self.longs)
        heads = (queue[0].ready for queue in queues if queue)
        return min((ready for ready in heads if ready > step), default=None)

    def push(self, task: Task) -> None:
        if (limits := self._limits) is not None:
            task.long = task.left > limits.above_tokens
            task.medium = not task.long and task.left > limits.max_short
        task.has_kv = task.job.leg is DECODE
        queue = self.queue_of(task)
        if queue is self.longs or queue is self.mediums:
            # The policy admits first what would end first, had each begun on arrival.
            insort(queue, task, key=self._end_from_arrival)
        else:
            queue.append(task)

    def queue_of(self, task: Task) -> deque[Task]:
        if task.has_kv:
            return self.with_kv
        if task.long:
            return self.longs
        return self.mediums if task.medium else self.shorts

    def next_queue(
        self, prefills: Sequence[Task], budget: int, now: float, *, scarce: bool
    ) -> deque[Task]:
        """Return the shorts or the mediums; `scarce` if slots or KV blocks are."""
        limits, mediums, shorts = self._limits, self.mediums, self.shorts
        if limits is None or not mediums:
            return shorts
        others = [task for task in prefills if not task.long]
        tokens = sum(task.left for task in others)
        if tokens and tokens >= budget:
            return shorts
        if not shorts:
            return mediums
        if scarce:
            first = self._end_from_arrival(mediums[0]) < shorts[0].since
        else:
            overdue = now - mediums[0].since >= limits.max_wait_s
            first = overdue and not any(task.medium for task in others)
        return mediums if first else shorts

    def _end_from_arrival(self, task: Task) -> float:
        return task.since + self._prefill_s * task.left

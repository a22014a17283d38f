"""The scheduler of a fluid engine: its queues, admissions and prompt chunks."""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

from vllm_sched.cost.chunk_loss import best_chunk
from vllm_sched.cost.step_time import StepShape, StepTime
from vllm_sched.policies.fluid_effects import (
    AdmissionHold,
    BatchAdmission,
    FluidEffects,
    LongPromptLimits,
)
from vllm_sched.sim.engines.deferral import Deferral
from vllm_sched.sim.engines.kv_blocks import KvBlocks, Task
from vllm_sched.sim.engines.waiting_tasks import WaitingTasks
from vllm_sched.sim.types import WorkerModel

FOREVER: Final = 1 << 40  # steps, until the next arrival or departure
QUIET_CHECK_STEPS: Final = 16  # steps between checks for a quiet period
NO_HOLD: Final = AdmissionHold(departures=1, max_s=1.0, itl_s=None)
MAX_STEP_GROWTH: Final = 0.02  # relative growth of a step after which its chunk is sized again

USUAL_DECODES, USUAL_CHUNK = 16, 2048  # of the steps that policies learn from

Tasks = list["Task"]
Chunks = list[tuple["Task", int]]  # each prompt's tokens in a step


class PlannedRun(NamedTuple):
    chunks: Chunks
    decodes_pause: bool
    steps: int


def shape_of(chunks: Chunks, decodes: int = 0, context: int = 0) -> StepShape:
    total, pairs, read = 0, 0.0, 0
    for task, tokens in chunks:
        total += tokens
        pairs += tokens * (task.done + tokens / 2)
        read += task.done
    return StepShape(total, pairs, decodes, context, len(chunks), read)


def growth_of(time: StepTime, tokens: int) -> float:
    """Return by how much each step of one prompt is longer than the previous step."""
    return (time.pair_s * tokens + time.read_s) * tokens


def steps_within(time: StepTime, chunks: Chunks, seconds: float) -> int:
    """Return the number of steps without decodes that begin within `seconds`."""
    shape = shape_of(chunks)
    first = time.seconds(shape)
    growth = growth_of(time, shape.prefill_tokens) if len(chunks) == 1 else 0.0
    half = first - growth / 2
    divisor = half + math.sqrt(half * half + 2 * growth * seconds)
    return max(math.ceil(2 * seconds / divisor), 1) if divisor > 0 else FOREVER


def steps_as_sized(time: StepTime, chunks: Chunks, decodes: int, context: int) -> int:
    """Return the number of steps with nearly the first step's length."""
    shape = shape_of(chunks, decodes, context)
    growth = growth_of(time, shape.prefill_tokens) + time.context_s * decodes
    return 1 + int(MAX_STEP_GROWTH * time.seconds(shape) / growth) if growth else FOREVER


class PrefillTime:
    """The time for prompts in one step with decodes, divided as by `chunk_budget`."""

    def __init__(
        self, time: StepTime, seconds: float, min_chunk: int, decodes: int, context: int
    ) -> None:
        self.min_chunk = min_chunk  # of the first prompt
        self._time = time
        self._left_s = seconds
        self._decodes = decodes
        self._context = context

    def fitting(self, done: int, min_tokens: int) -> int:
        """Return the tokens that fit after `done` tokens of the same prompt."""
        fitting = self._time.prefill_within(self._left_s, self._decodes, self._context, done)
        return max(fitting, min_tokens)

    def cut(self, task: Task, wanted: int, *, first: bool) -> int:
        """Return how many of the tokens fit, and reduce the time left."""
        time = self._time
        tokens = min(wanted, self.fitting(task.done, self.min_chunk if first else 0))
        work = time.prefill_s * tokens + time.pair_s * tokens * (task.done + tokens / 2)
        self._left_s -= work + time.prompt_fixed_s + time.read_s * task.done
        return tokens


class BatchGate:
    """Admits batches, as `static_batching` does."""

    def __init__(self, limits: BatchAdmission) -> None:
        self.forms = True
        self.members = 0
        self._limits = limits

    def begin_step(self, running: int) -> None:
        if not running:
            self.forms, self.members = True, 0

    def is_open(self, head: Task, now: float) -> bool:
        if self.forms and self.members < self._limits.size:
            return True
        return now - head.since >= self._limits.max_wait_s


class FluidScheduler:
    def __init__(self, model: WorkerModel, effects: FluidEffects, kv: KvBlocks) -> None:
        self.model = model
        self.effects = effects
        self.kv = kv
        # Policies learn linear step times, from chunks of about this size.
        self._learned = model.time.linear_near(
            USUAL_DECODES, min(model.max_num_batched_tokens, USUAL_CHUNK)
        )
        self.decoding = 0
        self.context = 0  # tokens of all decodes
        self.backlog = self.backlog_long = 0
        self.waiting = 0
        self._queues = WaitingTasks(effects.longs, self._learned.prefill_s)
        self._prefills: list[Task] = []
        hold = effects.hold or NO_HOLD
        self._deferral = Deferral(model, hold, decodes_pause=effects.longest_pause_s > 0)
        self._may_defer = hold.departures != 1
        self._batch = None if effects.batches is None else BatchGate(effects.batches)
        self._paused_since: float | None = None
        self._last_short = -math.inf

        # Of the current step.
        self._refused = False  # a request found no KV room
        self._was_full = False  # the last step left no slot, or refused a request
        self._budget_is_taken = False  # by one prompt
        self._time_left: PrefillTime | None = None  # None = no limit
        self._steps_to_entry = FOREVER  # until a waiting request may enter

    @property
    def running(self) -> int:
        return self.decoding + len(self._prefills)

    def next_ready(self, step: int) -> int | None:
        return self._queues.next_ready(step)

    def push(self, task: Task) -> None:
        self.waiting += 1
        self.backlog += task.left
        self._queues.push(task)
        if task.long:
            self.backlog_long += task.left
        else:
            self._last_short = task.since

    def drop(self, task: Task) -> None:
        self._count_computed(task, task.left)
        if task in self._prefills:
            self._prefills.remove(task)
            self.kv.free(task)
        else:
            self.waiting -= 1
            if task.has_kv:
                self.kv.free(task)

    def record_computed(self, task: Task, tokens: int) -> bool:
        """Count computed prompt tokens; return True if the prompt is done."""
        self._count_computed(task, tokens)
        task.left -= tokens
        return not task.left

    def _count_computed(self, task: Task, tokens: int) -> None:
        self.backlog -= tokens
        if task.long:
            self.backlog_long -= tokens

    def start_decode(self, task: Task) -> None:
        self._prefills.remove(task)
        self.decoding += 1
        self.context += task.job.prompt_tokens + 1

    def end_prefill(self, task: Task) -> None:
        self._prefills.remove(task)
        self._deferral.record_departure(task)

    def end_decode(self, task: Task, made: int) -> None:
        self.decoding -= 1
        written = 1 + made - task.decodes_from
        self.context = max(self.context - task.job.prompt_tokens - written, 0)
        self.kv.free(task)
        self._deferral.record_departure(task)

    def disturbs(self, task: Task) -> bool:
        """Return True if a new request changes the coming steps."""
        if self.running >= self.model.max_num_seqs or self._deferral.holding:
            return False
        if self._batch is not None and not self._batch.forms:
            return False
        if task.has_kv:
            return not self._budget_is_taken
        queue = self._queues.queue_of(task)
        if len(queue) > 1 or not self.kv.fits(task):
            return False
        if longs := self.effects.longs:
            return not task.long or self._count_long_prefills() < longs.places
        return not self._budget_is_taken

    # The next steps

    def schedule(self, now: float, step: int) -> PlannedRun:
        """Admit requests, and return the next steps."""
        self._begin_step(now)
        pausing = self._may_pause(now)
        chunks, count = Chunks(), FOREVER
        if self._prefills or self.waiting:
            budget = self.model.max_num_batched_tokens
            if self.decoding and not pausing:
                budget = self._limit_mixed_step(budget - self.decoding)
            if longs := self.effects.longs:
                chunks, count = self._schedule_by_length(longs, budget, now, step)
            else:
                chunks, count = self._schedule_in_order(budget, now, step)
        self._was_full = self._refused or self.running >= self.model.max_num_seqs
        if self._batch is not None and self.decoding and not chunks:
            self._batch.forms = False
        pausing = pausing and bool(chunks)
        if not pausing:
            self._paused_since = None
        elif self._paused_since is None:
            self._paused_since = now
        return PlannedRun(chunks, pausing, self._limit_count(chunks, count, now))

    def _begin_step(self, now: float) -> None:
        self._refused = self._budget_is_taken = False
        self._time_left, self._steps_to_entry = None, FOREVER
        if self._batch is not None:
            self._batch.begin_step(self.running)
        if self._may_defer:
            self._deferral.update(now, self)

    def _may_pause(self, now: float) -> bool:
        longest_s, since = self.effects.longest_pause_s, self._paused_since
        return longest_s > 0 and self.decoding > 0 and (since is None or now - since < longest_s)

    def _limit_count(self, chunks: Chunks, count: int, now: float) -> int:
        """Return how many of the equal steps pass before a policy may change them."""
        time = self.model.time
        if self._time_left is not None and chunks and count > 1:
            count = min(count, steps_as_sized(time, chunks, self.decoding, self.context))
        if self._paused_since is not None:
            end = self._paused_since + self.effects.longest_pause_s
            count = min(count, steps_within(time, chunks, end - now))
        if self._may_defer:
            self._deferral.record_step(self, refused=self._refused)
            count = min(count, self._deferral.steps(now, self))
        return max(min(count, self._steps_to_entry), 1)

    def _limit_mixed_step(self, budget: int) -> int:
        """Begin the time limit of a step with decodes, and return the tokens for prompts."""
        limit = self.effects.mixed_steps
        if limit is None:
            return budget
        if limit.step_s is None:
            return budget if limit.chunk is None else min(budget, limit.chunk)
        self._time_left = time_left = PrefillTime(
            self._learned, limit.step_s, limit.min_chunk, self.decoding, self.context
        )
        done = self._prefills[0].done if self._prefills else 0
        return min(budget, time_left.fitting(done, limit.min_chunk))

    def _schedule_in_order(self, budget: int, now: float, step: int) -> tuple[Chunks, int]:
        """Return chunks, and for how many steps they stay the same."""
        prefills, chunks = self._prefills, Chunks()
        left, index = budget, 0
        while left > 0:
            if index == len(prefills) and self._admit_next(now, step) is None:
                break
            wanted = min(prefills[index].left, left)
            tokens = self._add_chunk(chunks, prefills[index], wanted)
            left = left - tokens if tokens == wanted else 0
            index += 1
        if not chunks:
            return chunks, FOREVER
        task, tokens = chunks[0]
        if tokens < budget:
            return chunks, 1
        self._budget_is_taken = True
        return chunks, task.left // tokens

    def _add_chunk(self, chunks: Chunks, task: Task, wanted: int) -> int:
        """Add a prompt's chunk within the step's time limit; return its tokens."""
        tokens = wanted
        if tokens > 0 and self._time_left is not None:
            tokens = self._time_left.cut(task, wanted, first=not chunks)
        if tokens:
            chunks.append((task, tokens))
        return tokens

    def _admit_next(self, now: float, step: int) -> Task | None:
        if self._queues.with_kv and (task := self._admit(self._queues.with_kv, step)) is not None:
            return task
        queues, scarce = self._queues, self._was_full
        queue = queues.before_shorts(self._prefills, now, scarce=scarce) or queues.shorts
        if not queue or self._deferral.holding:
            return None
        if self._batch is not None and not self._batch.is_open(queue[0], now):
            return None
        return self._admit(queue, step)

    def _admit(self, queue: deque[Task], step: int) -> Task | None:
        while queue and queue[0].gone:
            queue.popleft()
        if not queue:
            return None
        task = queue[0]
        if task.ready > step:
            self._steps_to_entry = min(self._steps_to_entry, task.ready - step)
            return None
        if self.running >= self.model.max_num_seqs:
            return None
        if not task.has_kv:
            if not self.kv.fits(task):
                self._refused = True
                return None
            self.kv.allocate(task)
        queue.popleft()
        self.waiting -= 1
        if self._batch is not None:
            self._batch.members += 1
        self._prefills.append(task)
        self._deferral.record_admission(task)
        return task

    # Long prompts apart

    def _count_long_prefills(self) -> int:
        return sum(task.long for task in self._prefills)

    def _schedule_by_length(
        self, limits: LongPromptLimits, budget: int, now: float, step: int
    ) -> tuple[Chunks, int]:
        running = next((task for task in self._prefills if not task.long), None)
        self._admit_by_length(limits, now, step)
        if not self._prefills:
            return [], FOREVER
        longs = [task for task in self._prefills if task.long]
        shorts = [task for task in self._prefills if not task.long]
        if shorts:
            self._last_short = now
            if running is not None and (time_left := self._time_left) is not None:
                # Running shorts are computed first, with few earlier tokens to read.
                budget = time_left.fitting(running.done, time_left.min_chunk)
                budget = min(budget, self.model.max_num_batched_tokens - self.decoding)
        quiet = not self.decoding and now - self._last_short > limits.quiet_s
        for_shorts = min(sum(task.left for task in shorts), budget - budget // 4)
        for_longs = budget - for_shorts if longs else 0
        if longs and not quiet:
            chunk = self._long_chunk(limits, budget, for_shorts, longs[0].done)
            for_longs = min(for_longs, chunk)
        for_shorts = budget - min(for_longs, sum(task.left for task in longs))
        chunks = self._divide(shorts, for_shorts, longs, for_longs)
        if len(chunks) != 1 or not chunks[0][0].long:
            return chunks, 1
        task, tokens = chunks[0]
        count = max(task.left // tokens, 1)
        return chunks, count if self.decoding or quiet else min(count, QUIET_CHECK_STEPS)

    def _divide(self, shorts: Tasks, for_shorts: int, longs: Tasks, for_longs: int) -> Chunks:
        chunks: Chunks = []
        for task in shorts:
            for_shorts -= self._add_chunk(chunks, task, min(task.left, for_shorts))
        for remaining, task in zip(range(len(longs), 0, -1), longs, strict=True):
            part = -(-for_longs // remaining)
            for_longs -= self._add_chunk(chunks, task, min(task.left, part))
        return chunks

    def _admit_by_length(self, limits: LongPromptLimits, now: float, step: int) -> None:
        while self._admit_next(now, step) is not None:
            pass
        queues, deferral = self._queues, self._deferral
        budget = self.model.max_num_batched_tokens - self.decoding
        while (queue := queues.next_medium(self._prefills, budget, now)) and not deferral.holding:
            if self._admit(queue, step) is None:
                break
        while queues.longs and self._long_may_enter(limits, now) and not deferral.holding:
            if self._admit(queues.longs, step) is None:
                break

    def _long_chunk(self, limits: LongPromptLimits, left: int, for_shorts: int, done: int) -> int:
        """Return the tokens of all long prompts, next to those of short prompts."""
        budget = self.model.max_num_batched_tokens
        if limits.share is not None:
            return max(int(budget * limits.share), 1)
        shape = StepShape(decodes=self.decoding, context_tokens=self.context, read_tokens=done)
        block = self.model.block_tokens
        best = best_chunk(self.model.time, shape, budget, itl_s=limits.itl_s, block_tokens=block)
        max_tokens = min(best, left)
        return max(max_tokens - for_shorts, max_tokens // 2)

    def _long_may_enter(self, limits: LongPromptLimits, now: float) -> bool:
        overdue = now - self._queues.longs[0].since >= limits.max_wait_s
        places = limits.places_overdue if overdue else limits.places
        return self._count_long_prefills() < places

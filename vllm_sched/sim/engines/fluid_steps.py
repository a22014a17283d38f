"""The next step of a fluid engine: admissions and prompt chunks."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from typing import TYPE_CHECKING, Final

from vllm_sched.cost.chunk_loss import best_chunk
from vllm_sched.cost.step_time import StepShape
from vllm_sched.policies.fluid_effects import AdmissionHold
from vllm_sched.sim.engines.deferral import Deferral
from vllm_sched.sim.types import Leg

if TYPE_CHECKING:
    from vllm_sched.cost.step_time import StepTime
    from vllm_sched.policies.fluid_effects import FluidEffects, LongPromptLimits
    from vllm_sched.sim.engines.kv_blocks import KvBlocks, Task
    from vllm_sched.sim.types import WorkerModel

FOREVER: Final = 1 << 40  # steps, until the next arrival or departure
QUIET_CHECK_STEPS: Final = 16  # steps between checks for a quiet period
NO_HOLD: Final = AdmissionHold(departures=1, max_s=1.0, itl_s=None)
MAX_STEP_GROWTH: Final = 0.02  # relative growth of a step after which its chunk is sized again

USUAL_DECODES, USUAL_CHUNK = 16, 2048  # of the steps that policies learn from

Parts = list[tuple["Task", int]]
DECODE = Leg.DECODE


def shape_of(parts: Parts, decodes: int = 0, context: int = 0) -> StepShape:
    tokens, pairs, read = 0, 0.0, 0
    for task, part in parts:
        tokens += part
        pairs += part * (task.done + part / 2)
        read += task.done
    return StepShape(tokens, pairs, decodes, context, len(parts), read)


def growth_of(time: StepTime, tokens: int) -> float:
    """Return by how much each step of one prompt is longer than the previous step."""
    return (time.pair_s * tokens + time.read_s) * tokens


def steps_within(time: StepTime, parts: Parts, seconds: float) -> int:
    """Return the number of steps without decodes that begin within `seconds`."""
    shape = shape_of(parts)
    first = time.seconds(shape)
    growth = growth_of(time, shape.prefill_tokens) if len(parts) == 1 else 0.0
    half = first - growth / 2
    divisor = half + math.sqrt(half * half + 2 * growth * seconds)
    return max(math.ceil(2 * seconds / divisor), 1) if divisor > 0 else FOREVER


def steps_as_sized(time: StepTime, parts: Parts, decodes: int, context: int) -> int:
    """Return the number of steps with nearly the first step's length."""
    shape = shape_of(parts, decodes, context)
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

    def fitting(self, done: int, least: int) -> int:
        """Return the tokens that fit after `done` tokens of the same prompt."""
        fitting = self._time.prefill_within(self._left_s, self._decodes, self._context, done)
        return max(fitting, least)

    def cut(self, task: Task, wanted: int, *, first: bool) -> int:
        time = self._time
        part = min(wanted, self.fitting(task.done, self.min_chunk if first else 0))
        work = time.prefill_s * part + time.pair_s * part * (task.done + part / 2)
        self._left_s -= work + time.prompt_fixed_s + time.read_s * task.done
        return part


class FluidSteps:
    def __init__(self, model: WorkerModel, effects: FluidEffects, room: KvBlocks) -> None:
        self.model = model
        self.effects = effects
        self.room = room
        # Policies learn linear step times, from chunks of about this size.
        self._learned = model.time.near(
            USUAL_DECODES, min(model.max_num_batched_tokens, USUAL_CHUNK)
        )
        self.decoding = 0
        self.context = 0  # tokens of all decodes
        self.backlog = self.backlog_long = 0
        self.waiting = 0
        self._holding: deque[Task] = deque()  # with KV here: not subject to policies
        self._shorts: deque[Task] = deque()  # or all, without long-prompt policy
        self._longs: deque[Task] = deque()
        self._prefills: list[Task] = []
        hold = effects.hold or NO_HOLD
        self._hold = Deferral(model, hold, decodes_pause=effects.longest_pause_s > 0)
        self._may_hold = hold.departures != 1
        self._forming, self._members = True, 0
        self._paused_since: float | None = None
        self._last_short = -math.inf
        self._refused = False
        self._hog = False  # one prompt takes the whole budget
        self._time_left: PrefillTime | None = None  # None = no limit in this step
        self._soon = FOREVER  # steps until a waiting request may enter

    @property
    def running(self) -> int:
        return self.decoding + len(self._prefills)

    def next_ready(self, step: int) -> int | None:
        queues = (self._holding, self._shorts, self._longs)
        heads = (queue[0].ready for queue in queues if queue)
        return min((ready for ready in heads if ready > step), default=None)

    def push(self, task: Task) -> None:
        self.waiting += 1
        self.backlog += task.left
        longs = self.effects.longs
        task.long = longs is not None and task.left > longs.above_tokens
        if task.long:
            self.backlog_long += task.left
        elif longs:
            self._last_short = task.since
        task.holds = task.job.leg is DECODE
        if task.long and not task.holds:
            # The policy admits first what would end first, had each begun on arrival.
            insort(self._longs, task, key=self._end_from_arrival)
        else:
            (self._holding if task.holds else self._shorts).append(task)

    def _end_from_arrival(self, task: Task) -> float:
        return task.since + self._learned.prefill_s * task.left

    def drop(self, task: Task) -> None:
        self._count_computed(task, task.left)
        if task in self._prefills:
            self._prefills.remove(task)
            self.room.free(task)
        else:
            self.waiting -= 1
            if task.holds:
                self.room.free(task)

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
        self._hold.record_departure(task)

    def end_decode(self, task: Task, made: int) -> None:
        self.decoding -= 1
        written = 1 + made - task.decodes_from
        self.context = max(self.context - task.job.prompt_tokens - written, 0)
        self.room.free(task)
        self._hold.record_departure(task)

    def disturbs(self, task: Task) -> bool:
        """Return True if a new request changes the coming steps."""
        if self.running >= self.model.max_num_seqs or self._hold.on:
            return False
        if self.effects.batches and not self._forming:
            return False
        if task.holds:
            return not self._hog
        queue = self._longs if task.long else self._shorts
        if len(queue) > 1 or not self.room.fits(task):
            return False
        if longs := self.effects.longs:
            return not task.long or self._count_long_prefills() < longs.places
        return not self._hog

    # Filling

    def fill(self, now: float, step: int) -> tuple[Parts, bool, int]:
        """Return the chunks, whether decodes pause, and for how many steps both stay the same."""
        effects = self.effects
        self._begin_step(now)
        pausing = self._may_pause(now)
        left = self.model.max_num_batched_tokens
        if self.decoding and not pausing:
            left = self._within_gap(left - self.decoding)
        if longs := effects.longs:
            parts, most = self._fill_by_size(longs, left, now, step)
        else:
            parts, most = self._fill_in_turn(left, now, step)
        if effects.batches and self.decoding and not parts:
            self._forming = False
        pausing = pausing and bool(parts)
        if not pausing:
            self._paused_since = None
        elif self._paused_since is None:
            self._paused_since = now
        return parts, pausing, self._equal_steps(parts, most, now)

    def _begin_step(self, now: float) -> None:
        self._soon, self._refused, self._hog, self._time_left = FOREVER, False, False, None
        if self.effects.batches and not self.running:
            self._forming, self._members = True, 0
        if self._may_hold:
            self._hold.update(now, self)

    def _may_pause(self, now: float) -> bool:
        longest_s, since = self.effects.longest_pause_s, self._paused_since
        return longest_s > 0 and self.decoding > 0 and (since is None or now - since < longest_s)

    def _equal_steps(self, parts: Parts, most: int, now: float) -> int:
        time = self.model.time
        if self._time_left is not None and parts and most > 1:
            most = min(most, steps_as_sized(time, parts, self.decoding, self.context))
        if self._paused_since is not None:
            end = self._paused_since + self.effects.longest_pause_s
            most = min(most, steps_within(time, parts, end - now))
        if self._may_hold:
            self._hold.record_fill(self, refused=self._refused)
            most = min(most, self._hold.steps(now, self))
        return max(min(most, self._soon), 1)

    def _within_gap(self, left: int) -> int:
        limit = self.effects.mixed_steps
        if limit is None:
            return left
        if limit.step_s is None:
            return left if limit.chunk is None else min(left, limit.chunk)
        self._time_left = time_left = PrefillTime(
            self._learned, limit.step_s, limit.min_chunk, self.decoding, self.context
        )
        done = self._prefills[0].done if self._prefills else 0
        return min(left, time_left.fitting(done, limit.min_chunk))

    def _fill_in_turn(self, left: int, now: float, step: int) -> tuple[Parts, int]:
        prefills, parts = self._prefills, Parts()
        budget, index = left, 0
        while left > 0:
            if index == len(prefills) and self._next_task(now, step) is None:
                break
            task = prefills[index]
            wanted = min(task.left, left)
            part = self._cut_to_gap(task, wanted, not parts)
            if part:
                parts.append((task, part))
            left = left - part if part == wanted else 0
            index += 1
        if not parts:
            return parts, FOREVER
        task, part = parts[0]
        if part < budget:
            return parts, 1
        self._hog = True
        return parts, task.left // part

    def _cut_to_gap(self, task: Task, wanted: int, first: bool) -> int:
        if wanted <= 0 or self._time_left is None:
            return wanted
        return self._time_left.cut(task, wanted, first=first)

    def _next_task(self, now: float, step: int) -> Task | None:
        if self._holding and (task := self._admit(self._holding, step)) is not None:
            return task
        queue = self._shorts
        if not queue or not self._is_open(queue[0], now):
            return None
        return self._admit(queue, step)

    def _is_open(self, head: Task, now: float) -> bool:
        if self._hold.on:
            return False
        if (batches := self.effects.batches) is None:
            return True
        if self._forming and self._members < batches.size:
            return True
        return now - head.since >= batches.max_wait_s

    def _admit(self, queue: deque[Task], step: int) -> Task | None:
        while queue and queue[0].gone:
            queue.popleft()
        if not queue:
            return None
        task = queue[0]
        if task.ready > step:
            self._soon = min(self._soon, task.ready - step)
            return None
        if self.running >= self.model.max_num_seqs:
            return None
        if not task.holds:
            if not self.room.fits(task):
                self._refused = True
                return None
            self.room.allocate(task)
        queue.popleft()
        self.waiting -= 1
        self._members += 1
        self._prefills.append(task)
        self._hold.record_admission(task)
        return task

    # Long prompts apart

    def _count_long_prefills(self) -> int:
        return sum(task.long for task in self._prefills)

    def _fill_by_size(
        self, limits: LongPromptLimits, left: int, now: float, step: int
    ) -> tuple[Parts, int]:
        running = next((task for task in self._prefills if not task.long), None)
        self._admit_by_size(limits, now, step)
        longs = [task for task in self._prefills if task.long]
        shorts = [task for task in self._prefills if not task.long]
        parts: Parts = []
        if not self._prefills:
            return parts, FOREVER
        if shorts:
            self._last_short = now
            if running is not None and (time_left := self._time_left) is not None:
                # Running shorts are computed first, with few earlier tokens to read.
                left = time_left.fitting(running.done, time_left.min_chunk)
                left = min(left, self.model.max_num_batched_tokens - self.decoding)
        quiet = not self.decoding and now - self._last_short > limits.quiet_s
        for_longs = 0
        if longs:
            reserved = min(sum(task.left for task in shorts), left - left // 4)
            most = left if quiet else self._long_chunk(limits, left, reserved, longs[0].done)
            for_longs = min(most, left - reserved)
        for_shorts = left - min(for_longs, sum(task.left for task in longs))
        for task in shorts:
            for_shorts -= self._add_part(parts, task, for_shorts)
        for remaining, task in zip(range(len(longs), 0, -1), longs, strict=True):
            for_longs -= self._add_part(parts, task, -(-for_longs // remaining))
        if len(parts) != 1 or not parts[0][0].long:
            return parts, 1
        task, part = parts[0]
        most = max(task.left // part, 1)
        return parts, most if self.decoding or quiet else min(most, QUIET_CHECK_STEPS)

    def _admit_by_size(self, limits: LongPromptLimits, now: float, step: int) -> None:
        while self._next_task(now, step) is not None:
            pass
        while self._longs and self._long_may_enter(limits, now) and not self._hold.on:
            if self._admit(self._longs, step) is None:
                break

    def _add_part(self, parts: Parts, task: Task, most: int) -> int:
        part = self._cut_to_gap(task, min(task.left, most), not parts)
        if part:
            parts.append((task, part))
        return part

    def _long_chunk(self, limits: LongPromptLimits, left: int, reserved: int, done: int) -> int:
        """Return the tokens of all long prompts, if short prompts need `reserved` tokens."""
        budget = self.model.max_num_batched_tokens
        if limits.share is not None:
            return max(int(budget * limits.share), 1)
        shape = StepShape(decodes=self.decoding, context_tokens=self.context, read_tokens=done)
        block = self.model.block_tokens
        best = best_chunk(self.model.time, shape, budget, itl_s=limits.itl_s, block=block)
        most = min(best, left)
        return max(most - reserved, most // 2)

    def _long_may_enter(self, limits: LongPromptLimits, now: float) -> bool:
        overdue = now - self._longs[0].since >= limits.max_wait_s
        places = limits.places_overdue if overdue else limits.places
        return self._count_long_prefills() < places

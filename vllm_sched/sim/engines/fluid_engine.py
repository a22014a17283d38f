"""The fluid engine: a worker as runs of equal steps, with one event per run.

Idea: between arrivals, finished prompts and ends, all steps have the same decodes and chunks. Such
a run is computed at once; an arrival cuts the run at the end of a step. A request takes three or
four runs for any output length. With `each_token` every step is a run; times are the same.

Simulated: slots, token budget, chunks, policies (see `policy_effects`), KV room with shared
prefixes, the prefix cache, serial transfers and asynchronous scheduling.

Not simulated: block rounding; preemption (room for the whole output is reserved at admission);
cache changes while a request waits, because cached tokens are counted on arrival.

Cost per request: a few runs of O(log n) in the worker's requests. How it fails: near a full KV
cache it admits too few requests; many different output lengths make runs short.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from vllm_sched.sim.engines.fluid_steps import FluidSteps, growth_of, shape_of
from vllm_sched.sim.engines.kv_blocks import CachedPrefixes, KvBlocks, Task
from vllm_sched.sim.engines.policy_effects import PolicyEffects
from vllm_sched.sim.engines.quantile_sketch import QuantileSketch
from vllm_sched.sim.types import Event, Gauges, Job, Leg, WorkerModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PREFILL, DECODE = Leg.PREFILL, Leg.DECODE
NEVER = math.inf
PEAKS = 4096  # remembered gaps: more than the distinct steps during one output


class FluidEngine:
    """The fluid implementation of `Engine`."""

    def __init__(
        self,
        model: WorkerModel,
        *,
        seed: int = 0,
        each_token: bool = False,
        ended: Callable[[Job, float], None] | None = None,
    ) -> None:
        """Start idle; `ended` is called at a request's end with its longest gap."""
        del seed  # deterministic
        self.model = model
        self.gaps = QuantileSketch()
        self._each = each_token
        self._ended = ended
        self._tasks: dict[str, Task] = {}
        self._prefixes = CachedPrefixes(model.kv_tokens if model.prefix_caching else 0)
        self._room = KvBlocks(model.kv_tokens, self._prefixes)
        self._filling = FluidSteps(model, PolicyEffects.of(model), self._room)
        self._decoding: list[tuple[int, int, Task]] = []  # by last decode step
        self._kept: dict[str, Task] = {}  # finished prefill legs with unreleased KV
        self._fetching: list[tuple[float, int, Task]] = []
        self._unfetched: deque[Task] = deque()  # waiting for KV room
        self._link_free = 0.0
        self._number = 0
        self._decode_steps = 0

        # The current run.
        self._began = 0.0
        self._end = NEVER
        self._steps = 0
        self._parts: list[tuple[Task, int]] = []
        self._decodes = 0
        self._first_s = self._growth_s = 0.0
        self._paused_s = 0.0  # pause of decodes before the run
        # Gaps longer than all later gaps: the decode step at the end, and the seconds.
        self._peak_at: list[int] = []
        self._peak_s: list[float] = []

        self._busy_s = 0.0
        self._all_steps = 0
        self._computed = self._written = 0

    # The protocol

    def submit(self, job: Job, now: float) -> None:
        self._number += 1
        task = Task(job, self._number, now, min(self._need(job), self.model.kv_tokens))
        self._tasks[job.id] = task
        if job.leg is DECODE:
            self._unfetched.append(task)
            self._fetch(now)
        else:
            cached = self._prefixes.held(job.shared)
            task.cached = min(cached, job.prompt_tokens - 1)
            task.left -= task.cached
            self._enter(task, now)

    def abort(self, job_id: str, now: float) -> None:
        task = self._tasks.pop(job_id, None)
        if task is None:
            self.release(job_id, now)
            return
        task.gone = True
        filling = self._filling
        if task.ends_at:
            filling.left_decode(task, self._decode_steps)
            self._decodes = min(self._decodes, filling.decoding)
        elif task.fetching:
            self._room.give(task)
        elif task.job.leg is DECODE and not task.holds:
            self._unfetched.remove(task)  # not queued yet
            self._fetch(now)
        else:
            filling.drop(task)
        self._wake(now)

    def release(self, job_id: str, now: float) -> None:
        task = self._kept.pop(job_id, None)
        if task is not None:
            self._room.give(task)
            self._wake(now)

    def next_at(self) -> float:
        if self._fetching and self._fetching[0][0] < self._end:
            return self._fetching[0][0]
        return self._end

    def advance(self, now: float) -> Sequence[Event]:
        events: list[Event] = []
        while (at := self.next_at()) <= now:
            if self._fetching and self._fetching[0][0] <= at:
                task = heappop(self._fetching)[2]
                if not task.gone:
                    events.append(Event(task.job.id, at, fetched=True))
                    task.left, task.cached, task.fetching = 1, task.job.prompt_tokens - 1, False
                    self._enter(task, at)
            else:
                self._end_run(at, events)
                self._fetch(at)
                self._plan(at)
        return events

    def gauges(self, now: float) -> Gauges:  # noqa: ARG002
        filling = self._filling
        return Gauges(
            running=filling.running,
            waiting=filling.waiting + len(self._unfetched) + len(self._fetching),
            kv_usage=min(self._room.used / self._room.tokens, 1.0),
            backlog_tokens=filling.backlog,
            backlog_long_tokens=filling.backlog_long,
            steps=self._all_steps,
            fetching=len(self._fetching),
        )

    def facts(self) -> dict[str, Any]:
        gaps = self.gaps
        return {
            "steps": self._all_steps,
            "busy_s": self._busy_s,
            "prefill_tokens": self._computed,
            "output_tokens": self._written,
            "p50_itl_ms": gaps.quantile(0.5) * 1000,
            "p99_itl_ms": gaps.quantile(0.99) * 1000,
            "max_itl_ms": gaps.most * 1000,
        }

    # Coming in

    def _need(self, job: Job) -> int:
        return job.prompt_tokens + (0 if job.leg is PREFILL else job.output_tokens)

    def _fetch(self, now: float) -> None:
        """Start transfers in order, while there is KV room."""
        room = self._room
        while self._unfetched:
            task = self._unfetched[0]
            if not task.gone:
                if not room.fits(task):
                    return
                room.take(task)
                cached = min(self._prefixes.held(task.job.shared), task.job.prompt_tokens)
                seconds = self.model.transfer_s(task.job.prompt_tokens - cached)
                self._link_free = max(self._link_free, now) + seconds
                task.fetching = True
                heappush(self._fetching, (self._link_free, task.number, task))
            self._unfetched.popleft()

    def _enter(self, task: Task, now: float) -> None:
        """Queue a request; cut the run if the request can enter before its end."""
        filling = self._filling
        if self._end == NEVER:
            task.ready = self._all_steps
            filling.push(task)
            self._plan(now)
            return
        passed = self._passed(now - self._began)
        passed += self.model.async_scheduling
        task.ready = self._all_steps + passed
        filling.push(task)
        if passed < self._steps and filling.disturbs(task):
            self._cut(passed)

    def _wake(self, now: float) -> None:
        self._fetch(now)
        if self._end == NEVER:
            self._plan(now)
        elif self._filling.waiting:
            passed = self._passed(now - self._began) + self.model.async_scheduling
            if passed < self._steps:
                self._cut(passed)

    # Runs

    def _cut(self, steps: int) -> None:
        self._steps = steps
        self._end = self._began + self._seconds(steps)

    def _seconds(self, steps: int) -> float:
        return self._first_s * steps + self._growth_s * (steps * (steps - 1) / 2)

    def _passed(self, seconds: float) -> int:
        """Return how many steps of the run have begun after `seconds`."""
        first, growth = self._first_s, self._growth_s
        if growth > 0:
            half = first - growth / 2
            steps = int((math.sqrt(half * half + 2 * growth * max(seconds, 0.0)) - half) / growth)
        else:
            steps = int(seconds / first) if first else 0
        steps = max(min(steps, self._steps), 1)
        while steps > 1 and self._seconds(steps - 1) >= seconds:
            steps -= 1
        while steps < self._steps and self._seconds(steps) < seconds:
            steps += 1
        return steps

    def _plan(self, now: float) -> None:
        """Start the next run."""
        filling = self._filling
        parts, pausing, most = filling.fill(now, self._all_steps)
        decodes = 0 if pausing else filling.decoding
        if not parts and not decodes:
            if (ready := filling.next_ready(self._all_steps)) is not None:
                self._all_steps = ready  # idle: no step to wait for
                self._plan(now)
                return
            self._end = NEVER
            self._steps = 0
            return
        time, context = self.model.time, filling.context if decodes else 0
        shape = shape_of(parts, decodes, context)
        tokens, growth = shape.prefill_tokens, time.context_s * decodes
        if len(parts) == 1 and most > 1:
            growth += growth_of(time, tokens)
        first = time.seconds(shape)
        if tokens and first <= time.floor_s:
            growth = 0.0
        if decodes:
            most = min(most, self._decoding[0][0] - self._decode_steps)
        self._parts, self._decodes = parts, decodes
        self._first_s, self._growth_s = first, growth
        self._began = now
        self._cut(1 if self._each else max(most, 1))

    def _end_run(self, at: float, events: list[Event]) -> None:
        steps, filling = self._steps, self._filling
        self._all_steps += steps
        seconds = at - self._began
        self._busy_s += seconds
        if self._decodes:
            self._note_gaps(steps, seconds / steps)
            self._decode_steps += steps
            self._written += steps * self._decodes
            filling.context += steps * self._decodes
        elif filling.decoding:
            self._paused_s += seconds
        if self._decodes:
            self._end_decodes(at, events)
        for task, part in self._parts:
            if task.gone:
                continue
            done = part * steps
            self._computed += done
            if filling.computed(task, done):
                self._first_token(task, at, events)

    def _end_decodes(self, at: float, events: list[Event]) -> None:
        decoding, made = self._decoding, self._decode_steps
        if self._each:
            events += [
                Event(task.job.id, at, 1)
                for end, _, task in sorted(decoding)
                if end > made and not task.gone
            ]
        while decoding and decoding[0][0] <= made:
            task = heappop(decoding)[2]
            if task.gone:
                continue
            self._filling.left_decode(task, made)
            del self._tasks[task.job.id]
            left = 1 if self._each else task.job.output_tokens - 1
            events.append(Event(task.job.id, at, left, finished=True))
            if self._ended is not None:
                peak = bisect_right(self._peak_at, task.decodes_from)
                self._ended(task.job, self._peak_s[peak] if peak < len(self._peak_s) else 0.0)
        # Aborted requests must not limit the next run.
        while decoding and decoding[0][2].gone:
            heappop(decoding)

    def _first_token(self, task: Task, at: float, events: list[Event]) -> None:
        job, filling = task.job, self._filling
        self._room.computed(task)
        self._written += 1
        over = job.leg is PREFILL or job.output_tokens <= 1
        events.append(Event(job.id, at, 1, finished=over, cached_tokens=task.cached))
        if not over:
            task.decodes_from = self._decode_steps
            task.ends_at = self._decode_steps + job.output_tokens - 1
            heappush(self._decoding, (task.ends_at, task.number, task))
            filling.began_decode(task)
            return
        del self._tasks[job.id]
        filling.ended_prefill(task)
        if job.leg is PREFILL:
            self._kept[job.id] = task
            return
        self._room.give(task)
        if self._ended is not None:
            self._ended(job, 0.0)

    def _note_gaps(self, steps: int, seconds: float) -> None:
        """Count a gap per decode and step; the first includes the pause before the run."""
        if self._paused_s:
            self.gaps.add(self._paused_s + seconds, self._decodes)
            self._peak(self._decode_steps + 1, self._paused_s + seconds)
            self._paused_s = 0.0
            steps -= 1
            if not steps:
                return
            self._peak(self._decode_steps + 1 + steps, seconds)
        else:
            self._peak(self._decode_steps + steps, seconds)
        self.gaps.add(seconds, steps * self._decodes)

    def _peak(self, at: int, seconds: float) -> None:
        ats, peaks = self._peak_at, self._peak_s
        while peaks and peaks[-1] <= seconds:
            peaks.pop()
            ats.pop()
        ats.append(at)
        peaks.append(seconds)
        if len(ats) > PEAKS:
            del ats[: PEAKS // 2], peaks[: PEAKS // 2]

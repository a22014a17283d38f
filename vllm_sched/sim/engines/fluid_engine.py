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

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from vllm_sched.sim.engines.fluid_scheduler import FluidScheduler, PlannedRun, growth_of, shape_of
from vllm_sched.sim.engines.kv_blocks import CachedPrefixes, KvBlocks, KvTransfers, Task
from vllm_sched.sim.engines.policy_effects import combined_effects
from vllm_sched.sim.engines.quantile_sketch import QuantileSketch
from vllm_sched.sim.engines.step_run import NEVER, StepRun, TokenGaps
from vllm_sched.sim.types import Event, Gauges, Job, Leg, WorkerModel

PREFILL, DECODE = Leg.PREFILL, Leg.DECODE


class FluidEngine:
    def __init__(
        self,
        model: WorkerModel,
        *,
        each_token: bool = False,
        ended: Callable[[Job, float], None] | None = None,
    ) -> None:
        """Start idle; `ended` is called at a request's end with its longest gap."""
        self.model = model
        self._each_token = each_token
        self._ended = ended
        self._tasks: dict[str, Task] = {}
        self._prefixes = CachedPrefixes(model.kv_tokens if model.prefix_caching else 0)
        self._kv = KvBlocks(model.kv_tokens, self._prefixes)
        self._scheduler = FluidScheduler(model, combined_effects(model), self._kv)
        self._decoding: list[tuple[int, int, Task]] = []  # by last decode step
        self._kept: dict[str, Task] = {}  # finished prefill legs with unreleased KV
        self._transfers = KvTransfers(model, self._kv)
        self._number = 0
        self._decode_steps = 0
        self._run = StepRun()
        self._gaps = TokenGaps()
        self._busy_s = 0.0
        self._all_steps = 0
        self._computed = self._written = 0

    @property
    def gaps(self) -> QuantileSketch:
        return self._gaps.sketch

    # The protocol

    def submit(self, job: Job, now: float) -> None:
        self._number += 1
        task = Task(job, self._number, now, min(self._need(job), self.model.kv_tokens))
        self._tasks[job.id] = task
        if job.leg is DECODE:
            self._transfers.waiting.append(task)
            self._transfers.start(now)
        else:
            cached = self._prefixes.count_cached(job.shared)
            task.cached = min(cached, job.prompt_tokens - 1)
            task.left -= task.cached
            self._enqueue(task, now)

    def abort(self, job_id: str, now: float) -> None:
        task = self._tasks.pop(job_id, None)
        if task is None:
            self.release(job_id, now)
            return
        task.gone = True
        scheduler = self._scheduler
        if task.ends_at:
            scheduler.end_decode(task, self._decode_steps)
            self._run.decodes = min(self._run.decodes, scheduler.decoding)
        elif task.fetching:
            self._kv.free(task)
        elif task.job.leg is DECODE and not task.has_kv:
            self._transfers.waiting.remove(task)  # not queued yet
            self._transfers.start(now)
        else:
            scheduler.drop(task)
        self._update_run(now)

    def release(self, job_id: str, now: float) -> None:
        task = self._kept.pop(job_id, None)
        if task is not None:
            self._kv.free(task)
            self._update_run(now)

    def next_at(self) -> float:
        fetching, end = self._transfers.under_way, self._run.end
        return fetching[0][0] if fetching and fetching[0][0] < end else end

    def advance(self, now: float) -> Sequence[Event]:
        events: list[Event] = []
        fetching = self._transfers.under_way
        while (at := self.next_at()) <= now:
            if fetching and fetching[0][0] <= at:
                task = self._transfers.finish()
                if not task.gone:
                    events.append(Event(task.job.id, at, fetched=True))
                    task.left, task.cached, task.fetching = 1, task.job.prompt_tokens - 1, False
                    self._enqueue(task, at)
            else:
                self._end_run(at, events)
                self._transfers.start(at)
                self._plan_run(at)
        return events

    def gauges(self, now: float) -> Gauges:  # noqa: ARG002
        scheduler, transfers = self._scheduler, self._transfers
        return Gauges(
            running=scheduler.running,
            waiting=scheduler.waiting + len(transfers.waiting) + len(transfers.under_way),
            kv_usage=min(self._kv.used / self._kv.tokens, 1.0),
            backlog_tokens=scheduler.backlog,
            backlog_long_tokens=scheduler.backlog_long,
            steps=self._all_steps,
            fetching=len(transfers.under_way),
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

    def _enqueue(self, task: Task, now: float) -> None:
        """Queue a request; cut the run if the request can enter before its end."""
        scheduler, run = self._scheduler, self._run
        if run.end == NEVER:
            task.ready = self._all_steps
            scheduler.push(task)
            self._plan_run(now)
            return
        passed = run.steps_begun(now - run.began)
        passed += self.model.async_scheduling
        task.ready = self._all_steps + passed
        scheduler.push(task)
        if passed < run.steps and scheduler.disturbs(task):
            run.end_after(passed)

    def _update_run(self, now: float) -> None:
        self._transfers.start(now)
        if self._run.end == NEVER:
            self._plan_run(now)
        elif self._scheduler.waiting:
            run = self._run
            passed = run.steps_begun(now - run.began) + self.model.async_scheduling
            if passed < run.steps:
                run.end_after(passed)

    # Runs

    def _plan_run(self, now: float) -> None:
        scheduler = self._scheduler
        planned = scheduler.schedule(now, self._all_steps)
        decodes = 0 if planned.decodes_pause else scheduler.decoding
        if planned.chunks or decodes:
            self._begin_run(now, planned, decodes)
        elif (ready := scheduler.next_ready(self._all_steps)) is not None:
            self._all_steps = ready  # idle: no step to wait for
            self._plan_run(now)
        else:
            self._run.stop()

    def _begin_run(self, now: float, planned: PlannedRun, decodes: int) -> None:
        """Begin a run of at most the planned steps: decodes may end before."""
        chunks, max_steps = planned.chunks, planned.steps
        time, context = self.model.time, self._scheduler.context if decodes else 0
        shape = shape_of(chunks, decodes, context)
        tokens, growth = shape.prefill_tokens, time.context_s * decodes
        if len(chunks) == 1 and max_steps > 1:
            growth += growth_of(time, tokens)
        first = time.seconds(shape)
        if tokens and first <= time.floor_s:
            growth = 0.0
        if decodes:
            max_steps = min(max_steps, self._decoding[0][0] - self._decode_steps)
        run = self._run
        run.chunks, run.decodes, run.began = chunks, decodes, now
        run.first_s, run.growth_s = first, growth
        run.end_after(1 if self._each_token else max(max_steps, 1))

    def _end_run(self, at: float, events: list[Event]) -> None:
        run, scheduler = self._run, self._scheduler
        steps, decodes = run.steps, run.decodes
        self._all_steps += steps
        seconds = at - run.began
        self._busy_s += seconds
        if decodes:
            self._gaps.add_gaps(self._decode_steps, steps, seconds / steps, decodes)
            self._decode_steps += steps
            self._written += steps * decodes
            scheduler.context += steps * decodes
            self._end_decodes(at, events)
        elif scheduler.decoding:
            self._gaps.paused_s += seconds
        for task, tokens in run.chunks:
            if task.gone:
                continue
            computed = tokens * steps
            self._computed += computed
            if scheduler.record_computed(task, computed):
                self._first_token(task, at, events)

    def _end_decodes(self, at: float, events: list[Event]) -> None:
        decoding, made = self._decoding, self._decode_steps
        if self._each_token:
            events += [
                Event(task.job.id, at, 1)
                for end, _, task in sorted(decoding)
                if end > made and not task.gone
            ]
        while decoding and decoding[0][0] <= made:
            task = heappop(decoding)[2]
            if task.gone:
                continue
            self._scheduler.end_decode(task, made)
            del self._tasks[task.job.id]
            left = 1 if self._each_token else task.job.output_tokens - 1
            events.append(Event(task.job.id, at, left, finished=True))
            if self._ended is not None:
                self._ended(task.job, self._gaps.longest_since(task.decodes_from))
        # Aborted requests must not limit the next run.
        while decoding and decoding[0][2].gone:
            heappop(decoding)

    def _first_token(self, task: Task, at: float, events: list[Event]) -> None:
        job, scheduler = task.job, self._scheduler
        self._kv.record_computed(task)
        self._written += 1
        over = job.leg is PREFILL or job.output_tokens <= 1
        events.append(Event(job.id, at, 1, finished=over, cached_tokens=task.cached))
        if not over:
            task.decodes_from = self._decode_steps
            task.ends_at = self._decode_steps + job.output_tokens - 1
            heappush(self._decoding, (task.ends_at, task.number, task))
            scheduler.start_decode(task)
            return
        del self._tasks[job.id]
        scheduler.end_prefill(task)
        if job.leg is PREFILL:
            self._kept[job.id] = task
            return
        self._kv.free(task)
        if self._ended is not None:
            self._ended(job, 0.0)

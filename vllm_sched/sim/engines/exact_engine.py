"""The exact engine: real vLLM schedulers, stepped in virtual time.

As in vLLM's loop, new requests are seen at the end of a step. With asynchronous scheduling a step
is scheduled when the previous step begins. `StepTime` gives the duration. KV transfers run next to
the steps, one at a time, and are noticed between steps, or at once while idle.

Cost: the scheduler's time (see `facts`), some 0.5 ms a step with thirty running requests. How it
fails: tokenizers and HTTP are one constant, `front_s`.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from heapq import heappop, heappush
from importlib.util import find_spec
from math import inf
from typing import TYPE_CHECKING, Any, Final

from vllm_sched.errors import UsageError
from vllm_sched.sim.engines.prompt_hashes import token_namer
from vllm_sched.sim.types import Event, Gauges, Job, Leg, WorkerModel

if TYPE_CHECKING:
    from vllm_sched.engine.simulated import NewRequest, SimulatedEngine, SimulatedStep

# Poll interval while no request is admitted.
IDLE_POLL_S: Final = 0.001
IDLE_POLL_SHARE: Final = 0.01
# Idle time without admission after which the waiting requests can never be served.
STUCK_S: Final = 60.0


def require_vllm(option: str, instead: str) -> None:
    if find_spec("vllm") is None:
        raise UsageError(
            f"{option} needs vLLM's own schedulers, and vLLM is not installed; install it (pip "
            f"install 'vllm-sched[vllm]', or 'vllm-sched[cpu]' without a GPU), or {instead}"
        )


def make_simulated_engine(model: WorkerModel, *, traced: bool = False) -> SimulatedEngine:
    """Return an engine. Importing vLLM here takes seconds."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_sched.engine.simulated import EngineSettings, SimulatedEngine
    from vllm_sched.engine.trace import EngineTrace

    settings = {field.name: getattr(model, field.name) for field in fields(EngineSettings)}
    engine = SimulatedEngine(EngineSettings(**settings))
    if traced:
        engine.trace = EngineTrace()
    return engine


class ExactEngine:
    def __init__(self, model: WorkerModel, *, traced: bool = False) -> None:
        self.model = model
        self.simulated = make_simulated_engine(model, traced=traced)
        self.steps = 0
        self.busy_s = 0.0  # virtual seconds with a step
        self.scheduler_s = 0.0  # real seconds of scheduling
        self._depth = 2 if model.async_scheduling else 1
        self._under_way: deque[tuple[SimulatedStep, float]] = deque()  # with end times
        self._arrived: list[Job] = []
        self._aborted: list[str] = []
        self._released: list[str] = []
        self._fetches: list[tuple[float, str]] = []  # of KV: end time, job
        self._link_free = 0.0  # end of the last fetch
        self._poll_due = inf  # next turn of the loop while no step runs
        self._stuck_since = inf  # idle, and no waiting request was admitted

    def submit(self, job: Job, now: float) -> None:
        self._arrived.append(job)
        self._poll_by(now)

    def abort(self, job_id: str, now: float) -> None:
        self._aborted.append(job_id)
        self._poll_by(now)

    def release(self, job_id: str, now: float) -> None:
        self._released.append(job_id)
        self._poll_by(now)

    def next_at(self) -> float:
        if self._under_way:
            return self._under_way[0][1]
        return min(self._poll_due, self._fetches[0][0]) if self._fetches else self._poll_due

    def advance(self, now: float) -> Sequence[Event]:
        events: list[Event] = []
        while (at := self.next_at()) <= now:
            began = time.perf_counter()
            self._run_step(at, events)
            self.scheduler_s += time.perf_counter() - began
        return events

    def gauges(self, now: float) -> Gauges:  # noqa: ARG002
        return Gauges(
            self.simulated.num_running,
            self.simulated.num_waiting + len(self._arrived),
            self.simulated.kv_usage,
            self.simulated.backlog(),
            steps=self.steps,
            fetching=self.simulated.num_deferred,
        )

    def facts(self) -> Mapping[str, Any]:
        return {
            "steps": self.steps,
            "busy_s": self.busy_s,
            "scheduler_s": self.scheduler_s,
            "preemptions": self.simulated.preemptions,
            "policies": self.simulated.policy_counters(),
        }

    def trace_events(self, now: float) -> Sequence[dict[str, Any]]:
        from vllm_sched.engine.trace import chrome_trace

        if (trace := self.simulated.trace) is None:
            return []
        content = json.loads("".join(chrome_trace(trace.copy(), now)))
        events: list[dict[str, Any]] = content["traceEvents"]
        return events

    # A turn of vLLM's loop

    def _poll_by(self, now: float) -> None:
        self._poll_due = min(self._poll_due, now)

    def _run_step(self, now: float, events: list[Event]) -> None:
        simulated = self.simulated
        self._poll_due = inf
        if self._under_way and self._under_way[0][1] <= now:
            self._finish(self._under_way.popleft()[0], now, events)
        self._deliver_arrivals(now, events)
        while len(self._under_way) < self._depth and simulated.num_unfinished:
            begun = simulated.schedule(now)
            for job_id, tokens in simulated.pop_fetches().items():
                self._start_fetch(job_id, tokens, now, events)
            if begun is None:
                self._check_stuck(now)
                return
            self._stuck_since = inf
            start = self._under_way[-1][1] if self._under_way else now
            seconds = self.step_s(begun)
            self._under_way.append((begun, start + seconds))
            self.steps += 1
            self.busy_s += seconds

    def _finish(self, step: SimulatedStep, now: float, events: list[Event]) -> None:
        for job_id, tokens, finished, cached in self.simulated.finish(step, now):
            if job_id not in self._aborted:
                events.append(Event(job_id, now, tokens, finished, cached_tokens=cached))
            elif finished:  # free the KV of an aborted prefill leg
                self._released.append(job_id)

    def _start_fetch(self, job_id: str, tokens: int, now: float, events: list[Event]) -> None:
        if not tokens:  # fully cached
            events.append(Event(job_id, now, fetched=True))
            return
        self._link_free = max(self._link_free, now) + self.model.transfer_s(tokens)
        heappush(self._fetches, (self._link_free, job_id))

    def step_s(self, step: SimulatedStep) -> float:
        return self.model.time.seconds(step.shape)

    def _deliver_arrivals(self, now: float, events: list[Event]) -> None:
        simulated = self.simulated
        for job in self._arrived:
            simulated.add(_request(job), now)
        if self._aborted:
            simulated.abort(self._aborted, now)
        fetched = []
        while self._fetches and self._fetches[0][0] <= now:
            fetched.append(heappop(self._fetches)[1])
        if fetched or self._released:
            events += [Event(request, now, fetched=True) for request in fetched]
            simulated.report_transfers(fetched, self._released, now)
        self._arrived, self._aborted, self._released = [], [], []

    def _check_stuck(self, now: float) -> None:
        if self._under_way or len(self._fetches) >= self.simulated.num_unfinished:
            return
        self._stuck_since = min(self._stuck_since, now)
        if now - self._stuck_since > STUCK_S:
            raise UsageError(
                f"worker {self.model.name}: {self.simulated.num_unfinished} requests are waiting "
                f"and none was admitted for {STUCK_S:g} s while idle; give it more kv_tokens, "
                "or other policies"
            )
        self._poll_by(now + max(IDLE_POLL_S, IDLE_POLL_SHARE * (now - self._stuck_since)))


def _request(job: Job) -> NewRequest:
    from vllm_sched.engine.simulated import NewRequest

    return NewRequest(
        job.id,
        job.prompt_tokens,
        1 if job.leg is Leg.PREFILL else job.output_tokens,
        token_namer(job.text, job.shared),
        extra_args=job.extra_args,
        priority=job.priority,
        remote_prefill=job.leg is Leg.DECODE,
        remote_decode=job.leg is Leg.PREFILL,
    )

"""What is to be seen of a scheduler, gathered around its steps: for `metrics`, and for `trace`.

It decides nothing; where neither is wanted it costs a comparison per step; and where looking fails
the engine goes on unseen. Without any policy it works too, so that steps of ours and of upstream's
can be looked at side by side.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_sched.cost.fit import OnlineFit
from vllm_sched.cost.step_time import StepTime
from vllm_sched.engine import metrics, trace
from vllm_sched.engine.in_flight import InFlight, StepDone, StepStarted, chunks_of
from vllm_sched.engine.steps.slots import admits_requests
from vllm_sched.engine.waiting.held import HeldTime, LaneKey
from vllm_sched.engine.waiting.queue import LaneQueue
from vllm_sched.policies.types import Policy, StepResult
from vllm_sched.version import __version__

if TYPE_CHECKING:

    class InstrumentedScheduler(Scheduler):
        """Either of vLLM's classes, with the policies around it, to the type checker."""

        _policies: Sequence[Policy]
        _in_flight: InFlight

        def clock(self) -> float:
            """Tell the time that steps are measured by."""

        def _note_gate(self, lanes: LaneKey, closed_by: int | None) -> None: ...

        def _note_limit(self, tokens: int) -> None: ...

        def _learn(self, done: StepDone) -> None: ...
else:
    InstrumentedScheduler = object

# Of so many steps one teaches our own fit, where no policy has one and once it can predict, and of
# so many one is held against its prediction: primes, to meet all kinds.
FIT_EVERY: Final = 7
PREDICT_EVERY: Final = 3
# So many who run no more are remembered, beside as many as run.
MOST_GONE: Final = 64
# By its lanes prompts are classed where it is on: what is long is its business.
CLASSES_BY: Final = "long_prompt"
ALL: Final = "all"


class StepReport(NamedTuple):
    """What a step that is done is told by, when it is."""

    step: StepResult
    seconds: float  # that the engine was at it
    model: StepTime | None  # as it was when the result came


class SchedulerStats:
    """What was seen of one scheduler."""

    def __init__(
        self, told: metrics.Metrics | None, kept: trace.TraceFile | None, policies: Sequence[Policy]
    ) -> None:
        self.metrics = told
        self.file = kept
        self.policies = policies
        self.budget = 0  # that the step at hand is allowed
        self.now = 0.0  # when the step at hand began
        self._untold: list[StepReport] = []
        self._holds: dict[LaneKey, int] = {}  # the first that closed a gate, asked last
        self._full = False  # after the last step: then it is no policy that they wait for
        # By policy.
        self._held: defaultdict[LaneKey, defaultdict[int, HeldTime]] = defaultdict(
            partial(defaultdict, HeldTime)
        )
        self._lanes: dict[str, LaneKey] = {}  # that those who run came from
        self._idle = False  # and said so
        # A policy's own, if one has it: a second would learn the same.
        fits = [
            fit
            for p in policies
            if p.learns and isinstance(fit := getattr(p, "fit", None), OnlineFit)
        ]
        self._fit = fits[0] if fits else OnlineFit()
        self._learns = bool(policies) and not fits
        self._told = 0  # of all results
        classing = [n for n, policy in enumerate(policies) if policy.name == CLASSES_BY]
        self._classing = classing[0] if classing else None

    # While a step is made

    def gate(self, lanes: LaneKey, closed_by: int | None) -> None:
        """Note whether a lane's gate is closed, and whose doing that is."""
        if closed_by is None:
            self._holds.pop(lanes, None)
        else:
            self._holds[lanes] = closed_by

    def scheduled(
        self, output: SchedulerOutput, number: int, running: int, queue: Any, *, full: bool
    ) -> None:
        """Note what a step that begins changed, and one that computes nothing."""
        self._full = full
        if isinstance(queue, LaneQueue):
            for lanes in [lanes for lanes in self._holds if not queue.here[lanes]]:
                del self._holds[lanes]
        # For the metrics alone, which forget those that left as they are written.
        if self.metrics is not None and isinstance(queue, LaneQueue) and queue.entered:
            self._entered(queue, self.metrics)
        if output.total_num_scheduled_tokens:
            return
        if self.metrics is not None:
            self.metrics.stepped(trace.kind(0, 0), 0, 0)
        if output.finished_req_ids or output.preempted_req_ids:
            empty = StepStarted(output, number, self.now, self.budget, {}, 0, running, len(queue))
            self._keep(empty, self.now, self.now)

    def begin(self, now: float, budget: int) -> None:
        """Note the time, and the budget unless a policy sets another."""
        if self._holds and not self._full and self.metrics is not None:
            for lanes, policy in self._holds.items():
                self._held[lanes][policy].add(self.now, now)
        self.now = now
        self.budget = budget

    def _entered(self, queue: LaneQueue, told: metrics.Metrics) -> None:
        for request, (since, lanes) in queue.entered.items():
            self._lanes[request.request_id] = lanes
            for policy, lane in zip(self.policies, lanes, strict=True):
                told.admitted(policy.name, lane or ALL)
            if lanes in self._held:
                for number, held in self._held[lanes].items():
                    if seconds := held.since(since):
                        told.held(self.policies[number].name, seconds)

    # When its result is back

    def done(self, done: StepDone) -> None:
        """Note how long the engine was at a step."""
        if self.metrics is not None:
            # Counted when it is time to write, all in one go: here each would wait for memory.
            seconds = done.end - done.start
            self._untold.append(StepReport(done.result, seconds, self._fit.model))
        if self.file is not None:
            self._keep(done.step, done.start, done.end)

    def _tell_results(self, told: metrics.Metrics) -> None:
        """Count steps, and hold some against what was known when their results came."""
        for step, seconds, then in self._untold:
            kind = trace.kind(len(step.chunks), step.decodes)
            prefill = sum([chunk.tokens for chunk in step.chunks])
            told.stepped(kind, prefill, step.decode_tokens, seconds)
            model = self._fit.model if self._learns else then
            self._told += 1
            shape = self._fit.slowest(step.shape, step.others)
            if model is not None and self._told % PREDICT_EVERY == 0:
                told.predicted(kind, model.seconds(shape), step.seconds)
            if self._learns and (model is None or self._told % FIT_EVERY == 0):
                self._fit.observe(shape, step.seconds)
        self._untold.clear()

    def _keep(self, step: StepStarted, start: float, end: float) -> None:
        if self.file is None:
            return
        output = step.output
        self.file.trace.stepped(
            trace.StepNote(
                step.number,
                start,
                end,
                step.budget,
                output.num_scheduled_tokens,
                {request_id: chunk.context for request_id, chunk in step.chunks.items()},
                step.running,
                step.waiting,
                output.preempted_req_ids or (),
                output.finished_req_ids,
            )
        )

    # Now and then

    def show(self, running: Sequence[Request], queue: Any, now: float, *, full: bool) -> None:
        """Write when it is time to, and once more when all are gone."""
        if (told := self.metrics) is None:
            return
        idle = not running and not len(queue)
        if told.due(now) or (idle and not self._idle):
            self._tell_results(told)
            told.write(self._state(running, queue, full=full), now)
        self._idle = idle

    def _state(self, running: Sequence[Request], queue: Any, *, full: bool) -> metrics.EngineState:
        """Take everything countable down; in plain numbers, for the length of this call."""
        state = metrics.EngineState()
        gauges = state.gauges
        lane_of = self._lanes.get
        came_from = [lane_of(request.request_id, ()) for request in running]
        if len(self._lanes) > 2 * len(running) + MOST_GONE:
            here = zip(running, came_from, strict=True)
            self._lanes = {request.request_id: lanes for request, lanes in here if lanes}
        if isinstance(queue, LaneQueue):
            self._lane_gauges(gauges, queue, came_from, full=full)
        else:
            gauges["requests_waiting"][metrics.NO_POLICY, ALL] = len(queue)
            gauges["requests_running"][metrics.NO_POLICY, ALL] = len(running)
            waiting = sum([r.num_tokens - r.num_computed_tokens for r in queue])
            gauges["prefill_backlog_tokens"][ALL,] = waiting
        self._running_prefills(gauges, running)
        gauges["step_budget_tokens"][()] = self.budget
        if (model := self._fit.model) is not None:
            for name, seconds in model.to_json().items():
                gauges["step_time_coefficient_seconds"][name.removesuffix("_s"),] = seconds
        state.policy_gauges = {
            (p.name, name): value for p in self.policies for name, value in p.gauges().items()
        }
        state.policy_counters = {
            (p.name, name): value for p in self.policies for name, value in p.counters().items()
        }
        return state

    def _lane_gauges(
        self, gauges: metrics.Gauges, queue: LaneQueue, came_from: list[LaneKey], *, full: bool
    ) -> None:
        waiting, oldest = gauges["requests_waiting"], gauges["oldest_wait_seconds"]
        for policy, counts in zip(self.policies, queue.counts, strict=True):
            for lane, count in counts.items():
                waiting[policy.name, lane or ALL] = count.requests
                oldest[policy.name, lane or ALL] = 0.0
        for lanes, waited in queue.waits():
            for policy, lane in zip(self.policies, lanes, strict=True):
                key = policy.name, lane or ALL
                oldest[key] = max(oldest[key], waited)
        running = gauges["requests_running"] = defaultdict(float)
        for lanes, requests in Counter(came_from).items():
            for policy, lane in zip(self.policies, lanes or self._no_lanes, strict=True):
                running[policy.name, lane or ALL] += requests
        none: dict[tuple[str, ...], float] = {
            (p.name, reason): 0.0 for p in self.policies for reason in p.held_reasons
        }
        held = gauges["requests_held"] = defaultdict(float, none)
        for lanes, number in () if full else self._holds.items():
            if waiting_here := queue.here[lanes]:
                policy = self.policies[number]
                held[policy.name, policy.held_reason(lanes[number])] += waiting_here
        backlog = gauges["prefill_backlog_tokens"]
        for lane, count in queue.counts[self._classing or 0].items():
            name = ALL if self._classing is None else lane
            backlog[name,] = backlog.get((name,), 0) + count.tokens

    @property
    def _no_lanes(self) -> LaneKey:
        """Of those that met no gate, as they held KV blocks when they came."""
        return (metrics.OTHER,) * len(self.policies)

    def _running_prefills(self, gauges: metrics.Gauges, running: Sequence[Request]) -> None:
        backlog, count = gauges["prefill_backlog_tokens"], gauges["prefills_running"]
        count.update(dict.fromkeys(backlog, 0))  # of each class that there is
        for request in running:
            if not request.is_prefill_chunk:
                continue
            lanes = self._lanes.get(request.request_id)
            name = lanes[self._classing] if self._classing is not None and lanes else ALL
            left = request.num_tokens - request.num_computed_tokens
            backlog[name,] = backlog.get((name,), 0) + left
            count[name,] = count.get((name,), 0) + 1


class SchedulerTelemetry(InstrumentedScheduler):
    """Shows what the scheduler behind this class does."""

    _seen: SchedulerStats | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallel = self.vllm_config.parallel_config
        engine = parallel.data_parallel_index
        file = trace.from_environment(engine, parallel.data_parallel_size)
        told = None
        if metrics.reaches_the_server():
            told = metrics.Metrics(_model_name(self.vllm_config.model_config), str(engine))
            policies = "+".join(policy.name for policy in self._policies) or metrics.NO_POLICY
            told.fact("info", 1, __version__, type(self).__name__, policies)
            told.fact("start_time_seconds", time.time())
        if file is not None or told is not None:
            self._seen = SchedulerStats(told, file, self._policies)
        if file is not None:
            _on_signal(file, self.clock)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Look at what comes out."""
        if (seen := self._seen) is None:
            return super().schedule(*args, **kwargs)
        before = len(self.running)
        # Where there are policies steps are noted for them. Kept by upstream for its own needs are
        # all who run in prefill, and some who wait for theirs.
        prefills = (
            None if self._policies else [r for r in self._inflight_prefills if r.is_prefill_chunk]
        )
        seen.begin(self.clock(), self.max_num_scheduled_tokens)
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        try:
            if prefills is not None:
                prefills += self.running[before:]
                self._note(output, prefills, seen)
            # Where nobody could enter no policy holds anybody.
            running, full = len(self.running), not admits_requests(self)
            seen.scheduled(output, self.current_step, running, self.waiting, full=full)
        except Exception:
            self._look_no_more()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        """Show it now and then."""
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if (seen := self._seen) is not None:
            try:
                full = not admits_requests(self)
                seen.show(self.running, self.waiting, self.clock(), full=full)
            except Exception:
                self._look_no_more()
        return outputs

    def _note(
        self, output: SchedulerOutput, prefills: Sequence[Request], seen: SchedulerStats
    ) -> None:
        if not output.total_num_scheduled_tokens:
            return
        chunks = chunks_of(prefills, output.num_scheduled_tokens)
        running, waiting = len(self.running), len(self.waiting)
        self._in_flight.begin(
            StepStarted(
                output, self.current_step, seen.now, seen.budget, chunks, 0, running, waiting
            )
        )

    def _note_gate(self, lanes: LaneKey, closed_by: int | None) -> None:
        if self._seen is not None:
            self._seen.gate(lanes, closed_by)

    def _note_limit(self, tokens: int) -> None:
        if self._seen is not None:
            self._seen.budget = tokens

    def _learn(self, done: StepDone) -> None:
        if self._seen is not None:
            try:
                self._seen.done(done)
            except Exception:
                self._look_no_more()
        super()._learn(done)

    def add_request(self, request: Request) -> None:
        """Look at who comes."""
        file = None if self._seen is None else self._seen.file
        if file is not None and request.request_id not in self.requests:
            file.trace.arrived(self.clock(), request.request_id, request.num_prompt_tokens)
        super().add_request(request)

    def shutdown(self) -> None:
        """Write what was seen."""
        if self._seen is not None and (file := self._seen.file) is not None:
            file.write(self.clock())
        super().shutdown()

    def _look_no_more(self) -> None:
        trace.logger.exception("vllm_sched_* metrics and the trace end here; please report it")
        self._seen = None


def _model_name(config: Any) -> str:
    """Return the name that vLLM's own metrics have."""
    served = config.served_model_name
    return str(served[0] if isinstance(served, list) else served or config.model)


def _on_signal(file: trace.TraceFile, clock: Any) -> None:
    try:
        signal.signal(trace.WRITE_NOW, lambda *_: file.write_aside(clock()))
    except ValueError:  # not in the main thread: written at the end only
        trace.logger.info("the trace is written at the end only, not on SIGUSR1")

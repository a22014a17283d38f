"""What `metrics` and `trace` show of a scheduler, gathered around its steps.

A failure turns telemetry off, and the engine goes on. Telemetry also works without policies.
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_sched.cost.online_fit import OnlineFit
from vllm_sched.cost.step_time import StepTime
from vllm_sched.engine import metrics, trace
from vllm_sched.engine.gauges import EngineGauges, label_of
from vllm_sched.engine.in_flight import FinishedStep, ScheduledStep, StepsInFlight, chunks_of
from vllm_sched.engine.steps.slots import admits_requests
from vllm_sched.engine.vllm_compat import UpstreamScheduler
from vllm_sched.engine.waiting.lane_counts import HeldTime, LaneKey
from vllm_sched.engine.waiting.queue import LaneQueue
from vllm_sched.policies.types import Policy, StepResult
from vllm_sched.version import __version__

# Steps, in primes to meet all kinds: our own fit learns from every 7th once it can predict.
FIT_EVERY: Final = 7
PREDICT_EVERY: Final = 3
# Requests remembered after they ran.
MAX_GONE: Final = 64


class UncountedStep(NamedTuple):
    result: StepResult
    seconds: float  # for which the engine computed
    model: StepTime | None  # as it was when the result came


class EngineStats:
    def __init__(
        self,
        engine_metrics: metrics.Metrics | None,
        trace_file: trace.TraceFile | None,
        policies: Sequence[Policy],
    ) -> None:
        self.metrics = engine_metrics
        self.trace_file = trace_file
        self.policies = policies
        self.budget = 0  # of the current step
        self.now = 0.0  # when the current step began
        self._uncounted_steps: list[UncountedStep] = []
        self._held_by: dict[LaneKey, int] = {}  # index of the first policy with a closed gate
        self._slots_full = False  # no slot was free, so policies held no request
        # By lanes, then by the policy's index.
        self._held_times: defaultdict[LaneKey, defaultdict[int, HeldTime]] = defaultdict(
            partial(defaultdict, HeldTime)
        )
        self._keys_of_running: dict[str, LaneKey] = {}  # by request id: where it waited
        self._wrote_idle = False  # the last write showed an idle engine
        fit_of_policy = next(filter(None, map(_fit_of, policies)), None)
        self._fit = fit_of_policy or OnlineFit()
        self._learns = bool(policies) and fit_of_policy is None
        self._steps_counted = 0

    # While vLLM schedules

    def record_gate(self, lane_key: LaneKey, closed_by: int | None) -> None:
        if closed_by is None:
            self._held_by.pop(lane_key, None)
        else:
            self._held_by[lane_key] = closed_by

    def record_schedule(self, output: SchedulerOutput, scheduler: Scheduler) -> None:
        self._slots_full = not admits_requests(scheduler)
        queue: Any = scheduler.waiting
        if isinstance(queue, LaneQueue):
            waiting = queue.lane_counts.waiting
            for empty_lane in [lane_key for lane_key in self._held_by if not waiting[lane_key]]:
                del self._held_by[empty_lane]
        if self.metrics is not None and isinstance(queue, LaneQueue):
            self._count_admissions(queue, self.metrics)
        if output.total_num_scheduled_tokens:
            return
        if self.metrics is not None:
            self.metrics.count_step(trace.step_kind(0, 0), 0, 0)
        if self.trace_file is not None and (output.finished_req_ids or output.preempted_req_ids):
            empty = ScheduledStep.of(scheduler, output, {}, at=self.now, budget=self.budget)
            self.trace_file.trace.record_step(empty.traced(self.now, self.now))

    def begin_step(self, now: float, budget: int) -> None:
        if self._held_by and not self._slots_full and self.metrics is not None:
            for lane_key, policy_index in self._held_by.items():
                self._held_times[lane_key][policy_index].add(self.now, now)
        self.now = now
        self.budget = budget

    def _count_admissions(self, queue: LaneQueue, engine_metrics: metrics.Metrics) -> None:
        for request, place in queue.admitted_last_step.items():
            lane_key = place.lane_key
            self._keys_of_running[request.request_id] = lane_key
            for policy, lane in zip(self.policies, lane_key, strict=True):
                engine_metrics.count_admission(policy.name, label_of(lane))
            if lane_key in self._held_times:
                for policy_index, held in self._held_times[lane_key].items():
                    if seconds := held.seconds_since(place.entry.since):
                        engine_metrics.observe_hold(self.policies[policy_index].name, seconds)

    # When a result arrives

    def record_finished(self, finished: FinishedStep) -> None:
        if self.metrics is not None:
            # It is faster to count many at once.
            seconds = finished.end - finished.start
            self._uncounted_steps.append(UncountedStep(finished.result, seconds, self._fit.model))
        if self.trace_file is not None:
            self.trace_file.trace.record_step(finished.step.traced(finished.start, finished.end))

    def _count_steps(self, engine_metrics: metrics.Metrics) -> None:
        """Count steps, and compare some with their prediction."""
        for result, seconds, model_then in self._uncounted_steps:
            kind = trace.step_kind(len(result.chunks), result.decodes)
            prefill = sum([chunk.tokens for chunk in result.chunks])
            engine_metrics.count_step(kind, prefill, result.decode_tokens, seconds)
            # A policy's fit has learned from these steps already; our own has not.
            model = self._fit.model if self._learns else model_then
            self._steps_counted += 1
            shape = self._fit.slowest(result.shape, result.others)
            if model is not None and self._steps_counted % PREDICT_EVERY == 0:
                engine_metrics.count_prediction(kind, model.seconds(shape), result.seconds)
            if self._learns and (model is None or self._steps_counted % FIT_EVERY == 0):
                self._fit.observe(shape, result.seconds)
        self._uncounted_steps.clear()

    # When metrics are due

    def write_if_due(self, scheduler: Scheduler, now: float) -> None:
        """Write metrics if due, and when the engine becomes idle."""
        if (engine_metrics := self.metrics) is None:
            return
        idle = not scheduler.running and not len(scheduler.waiting)
        if engine_metrics.is_due(now) or (idle and not self._wrote_idle):
            self._count_steps(engine_metrics)
            if len(self._keys_of_running) > 2 * len(scheduler.running) + MAX_GONE:
                self._forget_ended(scheduler.running)
            engine_metrics.write(self._engine_state(scheduler), now)
        self._wrote_idle = idle

    def _forget_ended(self, running: Sequence[Request]) -> None:
        ids = {request.request_id for request in running}
        self._keys_of_running = {
            request_id: lane_key
            for request_id, lane_key in self._keys_of_running.items()
            if request_id in ids
        }

    def _engine_state(self, scheduler: Scheduler) -> metrics.EngineState:
        # Without a free slot no policy holds a request.
        held_by = self._held_by if admits_requests(scheduler) else {}
        engine_gauges = EngineGauges(self.policies, scheduler.running, self._keys_of_running)
        gauges = engine_gauges.read(scheduler.waiting, held_by)
        gauges["step_budget_tokens"][()] = self.budget
        for name, seconds in self._fit.coefficients().items():
            gauges["step_time_coefficient_seconds"][name.removesuffix("_s"),] = seconds
        return metrics.EngineState(
            gauges,
            {(p.name, name): value for p in self.policies for name, value in p.gauges().items()},
            {(p.name, name): value for p in self.policies for name, value in p.counters().items()},
        )


def _fit_of(policy: Policy) -> OnlineFit | None:
    """Return the fit that already observes every step, if the policy has one."""
    fit = getattr(policy, "fit", None)
    return fit if policy.learns and isinstance(fit, OnlineFit) else None


class TelemetryMixin(UpstreamScheduler):
    """Shows what the scheduler after this class does, a `PolicyMixin`."""

    _policies: Sequence[Policy]
    _in_flight: StepsInFlight | None
    _telemetry: EngineStats | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallel = self.vllm_config.parallel_config
        engine = parallel.data_parallel_index
        trace_file = trace.from_environment(engine, parallel.data_parallel_size)
        engine_metrics = None
        if metrics.server_shows_metrics():
            model = _model_name(self.vllm_config.model_config)
            engine_metrics = metrics.Metrics(model, str(engine))
            policies = "+".join(policy.name for policy in self._policies) or metrics.NO_POLICY
            engine_metrics.set_fact("info", 1, __version__, type(self).__name__, policies)
            engine_metrics.set_fact("start_time_seconds", time.time())
        if trace_file is not None or engine_metrics is not None:
            self._telemetry = EngineStats(engine_metrics, trace_file, self._policies)
        if trace_file is not None:
            _write_on_signal(trace_file, self.clock)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if (stats := self._telemetry) is None:
            return super().schedule(*args, **kwargs)
        num_running = len(self.running)
        # With policies the planner records steps.
        prefills = (
            None if self._policies else [r for r in self._inflight_prefills if r.is_prefill_chunk]
        )
        stats.begin_step(self.clock(), self.max_num_scheduled_tokens)
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        try:
            if prefills is not None:
                prefills += self.running[num_running:]
                self._begin_step_without_policies(output, prefills, stats)
            stats.record_schedule(output, self)
        except Exception:
            self._turn_off()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if (stats := self._telemetry) is not None:
            try:
                stats.write_if_due(self, self.clock())
            except Exception:
                self._turn_off()
        return outputs

    def _begin_step_without_policies(
        self, output: SchedulerOutput, prefills: Sequence[Request], stats: EngineStats
    ) -> None:
        if not output.total_num_scheduled_tokens or self._in_flight is None:
            return
        chunks = chunks_of(prefills, output.num_scheduled_tokens)
        step = ScheduledStep.of(self, output, chunks, at=stats.now, budget=stats.budget)
        self._in_flight.begin(step)

    def _record_gate(self, lane_key: LaneKey, closed_by: int | None) -> None:
        if self._telemetry is not None:
            self._telemetry.record_gate(lane_key, closed_by)

    def _record_budget(self, tokens: int) -> None:
        if self._telemetry is not None:
            self._telemetry.budget = tokens

    def _observe_step(self, finished: FinishedStep) -> None:
        if self._telemetry is not None:
            try:
                self._telemetry.record_finished(finished)
            except Exception:
                self._turn_off()
        super()._observe_step(finished)

    def add_request(self, request: Request) -> None:
        trace_file = None if self._telemetry is None else self._telemetry.trace_file
        request_id = request.request_id
        if trace_file is not None and request_id not in self.requests:
            trace_file.trace.record_arrival(self.clock(), request_id, request.num_prompt_tokens)
        super().add_request(request)

    def shutdown(self) -> None:
        if self._telemetry is not None and (trace_file := self._telemetry.trace_file) is not None:
            trace_file.write(self.clock())
        super().shutdown()

    def _turn_off(self) -> None:
        trace.logger.exception(
            "vllm_sched_* metrics and the trace are off after an error; please report it"
        )
        self._telemetry = None


def _model_name(config: Any) -> str:
    served = config.served_model_name
    return str(served[0] if isinstance(served, list) else served or config.model)


def _write_on_signal(trace_file: trace.TraceFile, clock: Any) -> None:
    try:
        signal.signal(trace.WRITE_SIGNAL, lambda *_: trace_file.write_in_thread(clock()))
    except ValueError:  # not in the main thread
        trace.logger.info("the trace is written at the end only, not on SIGUSR1")

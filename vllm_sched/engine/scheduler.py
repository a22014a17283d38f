"""vLLM's schedulers with policies. Without policies they schedule exactly as vLLM does.

`PolicyMixin` overrides small methods around `super()`; `steps` has what they call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_sched.engine import policy_setup, vllm_compat
from vllm_sched.engine.continuation import ContinuationMixin
from vllm_sched.engine.in_flight import FinishedStep, StepsInFlight
from vllm_sched.engine.journal.scheduler import JournalMixin
from vllm_sched.engine.parallel.dp_group import DpGroup, group_of
from vllm_sched.engine.steps.chunks import StepChunks
from vllm_sched.engine.steps.planner import StepPlanner
from vllm_sched.engine.telemetry import TelemetryMixin
from vllm_sched.engine.vllm_compat import UpstreamScheduler
from vllm_sched.engine.waiting.lane_counts import LaneKey
from vllm_sched.policies.types import Policy

RUNNING: Final = RequestStatus.RUNNING


class PolicyMixin(UpstreamScheduler):
    default_policies: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    # vLLM's tests make schedulers without `__init__`.
    _in_flight: StepsInFlight | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # To look this up takes longer than to call it.
        self._upstream_lookahead: Callable[..., int] = super(
            PolicyMixin, type(self)
        )._reserve_prefill_lookahead
        self._looks_ahead = vllm_compat.looks_ahead(self, self._upstream_lookahead)
        self._policies: Sequence[Policy] = policy_setup.configured_policies(
            self, self.default_policies
        )
        self._in_flight = StepsInFlight()
        # Faster to read without a default in the class.
        self._planner: StepPlanner | None = None  # None without policies
        self._chunks: StepChunks | None = None  # within a step in which policies may cut prompts
        self._dp_group: DpGroup | None = None
        policy_setup.log_policies(self, self._policies)
        if not self._policies:
            return
        policy_setup.refuse_unsupported(self.vllm_config, type(self), self._policies)
        policy_setup.warn_of_idle_device(self)
        self._dp_group = group_of(self.vllm_config)
        self._in_flight = StepsInFlight(self._dp_group)
        self._planner = StepPlanner(
            self, self._policies, clock=self.clock, record_gate=self._record_gate
        )
        self.waiting = self._planner.admission.queue

    def clock(self) -> float:
        """Return the time of waits and steps."""
        return time.monotonic()

    def wall_clock(self) -> float:
        """Return the time of arrivals."""
        return time.time()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if (planner := self._planner) is None:
            return super().schedule(*args, **kwargs)
        budget = self.max_num_scheduled_tokens
        plan = planner.begin_step(self.clock(), self.wall_clock())
        try:
            if (limit := planner.pause_and_limit(plan)) is not None:
                self.max_num_scheduled_tokens = limit.tokens
                self._record_budget(limit.tokens)
                self._chunks = planner.make_chunks(plan, limit)
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = budget
            self._chunks = None
            planner.admission.end_step()
        scheduled = planner.end_step(output, plan)
        if scheduled is not None and self._in_flight is not None:
            self._in_flight.begin(scheduled)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        in_flight = self._in_flight
        if in_flight and (finished := in_flight.end(scheduler_output, self.clock)) is not None:
            self._observe_step(finished)
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def add_request(self, request: Request) -> None:
        if self._planner is None or request.request_id in self.requests:
            super().add_request(request)
            return
        parameters = request.sampling_params
        extra_args = (parameters.extra_args if parameters is not None else None) or {}
        for arrived in self._planner.hooks.arrived:
            arrived(request, extra_args)
        super().add_request(request)
        super()._enqueue_waiting_request(request)

    def _enqueue_waiting_request(self, request: Request) -> None:
        # A new request is left to `add_request`: lanes need the connector, which gets the
        # request only after this call.
        if self._planner is None or request.request_id in self.requests:
            super()._enqueue_waiting_request(request)

    def shutdown(self) -> None:
        if self._dp_group is not None:
            self._dp_group.remove()
        super().shutdown()

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        ready = bool(super()._handle_blocked_waiting_request(request))
        if not ready or self._planner is None:
            return ready
        return not self._planner.admission.skip_without_adapter(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._planner is not None:
            self._planner.record_departure(request, self.clock())
        return super()._free_request(request, *args, **kwargs)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        # Called per running request and step: most of the policies' cost.
        if (chunks := self._chunks) is not None and (
            request.is_prefill_chunk or request.status is not RUNNING
        ):
            num_new_tokens = chunks.grant(request, num_computed_tokens, num_new_tokens)
        if self._looks_ahead:
            return self._upstream_lookahead(self, request, num_computed_tokens, num_new_tokens)
        return num_new_tokens if num_new_tokens > 0 else 0  # noqa: FURB136 - a call takes longer

    # `TelemetryMixin` overrides these.

    def _record_gate(self, lane_key: LaneKey, closed_by: int | None) -> None:
        """Record which policy's gate is closed to a lane."""

    def _record_budget(self, tokens: int) -> None: ...

    def _observe_step(self, finished: FinishedStep) -> None:
        if self._planner is not None:
            for observe in self._planner.hooks.observe:
                observe(finished.result)


class PolicyScheduler(TelemetryMixin, JournalMixin, ContinuationMixin, PolicyMixin, AsyncScheduler):
    """Policies on vLLM's asynchronous scheduler, which is vLLM's default."""


class SyncPolicyScheduler(TelemetryMixin, JournalMixin, ContinuationMixin, PolicyMixin, Scheduler):
    """Policies on vLLM's synchronous scheduler, for `--no-async-scheduling` and for CPUs."""


class LongPromptScheduler(PolicyScheduler):
    """`PolicyScheduler` with `long_prompt` on unless configured otherwise."""

    default_policies: ClassVar[Mapping[str, Mapping[str, object]]] = {"long_prompt": {}}


class SyncLongPromptScheduler(SyncPolicyScheduler):
    """`SyncPolicyScheduler` with `long_prompt` on unless configured otherwise."""

    default_policies: ClassVar[Mapping[str, Mapping[str, object]]] = {"long_prompt": {}}

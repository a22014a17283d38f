"""Once the engine is full, hold admissions until K requests have departed.

Idea: a step with prefill has a fixed extra cost, which several prompts can share. With `departures:
auto`, requests are held only if the fitted step times predict a gain, and K is half of the best K.
A hold also ends if fewer requests wait than fill the batch, and after `max_delay_ms`. Never held:
preempted requests, requests with remote KV, and the first of several classes of service. `itl_ms`
limits K and the prompts that enter together.
Source: deferred prefill, which pauses decodes for a batch of prefills (add `prefill_first`).
Cost per step: O(1), and O(1) for each prefill.
How it fails: idle slots during a hold cost throughput if the fixed cost is small. A prompt that
takes longer than `itl_ms` by itself is not split; add `chunk_budget`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from vllm_sched.cost.online_fit import OnlineFit
from vllm_sched.cost.step_time import Chunk, StepShape
from vllm_sched.errors import UsageError
from vllm_sched.policies.deferral.hold import HOLD_ENDS, Hold, HoldEnd
from vllm_sched.policies.deferral.lengths import RequestLengths
from vllm_sched.policies.deferral.threshold import DepartureThreshold
from vllm_sched.policies.fluid_effects import AdmissionHold, FluidEffects
from vllm_sched.policies.types import (
    BEFORE_FIRST_STEP,
    FIRST_CLASS,
    NO_REQUESTS,
    EngineFacts,
    Gate,
    LaneCount,
    Policy,
    RequestView,
    Settings,
    Step,
    StepResult,
    one_class,
)

DEFERRABLE, DIRECT = "deferrable", "direct"

# Start of the wait of a request that was held for the maximum time.
RELEASED: Final = -math.inf


class DeferredPrefillSettings(Settings):
    departures: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """departures that a hold waits for; auto = chosen from measured costs; set it to repeat a
    measurement"""
    itl_ms: float | None = Field(None, gt=0)
    """gap between tokens that a batch of prefills may cause; set it if streams stutter"""
    max_delay_ms: float = Field(1000.0, gt=0)
    """maximum time that a request is held; lower it if first tokens are late"""
    max_delay_steps: int = Field(512, ge=1)
    """former: it has no effect; use max_delay_ms"""
    exclusive: bool = False
    """former: it has no effect; add --policy prefill_first to pause decodes"""


class DeferredPrefill(Policy):
    name: ClassVar[str] = "deferred_prefill"
    settings_type: ClassVar[type[Settings]] = DeferredPrefillSettings
    held_reasons = ("departures", "itl")
    settings: DeferredPrefillSettings

    def __init__(self, facts: EngineFacts, settings: DeferredPrefillSettings) -> None:
        super().__init__(facts, settings)
        departures = None if settings.departures == "auto" else settings.departures
        _check_departures(departures, facts.max_num_seqs)
        self._limits = AdmissionHold(
            departures,
            max_s=max(settings.max_delay_ms / 1000, sys.float_info.min),
            itl_s=None if settings.itl_ms is None else settings.itl_ms / 1000,
        )
        self.fit = OnlineFit()
        self.lengths = RequestLengths()
        self.learns = departures is None or self._limits.itl_s is not None
        self._threshold = DepartureThreshold(self._limits, facts, self.fit, self.lengths)
        self._running_when_full = facts.max_num_seqs
        self._free_slots_left = facts.max_num_seqs  # after the admissions of the last step
        self._hold: Hold | None = None
        self._lanes: dict[str, str] = {}  # of waiting requests
        self._held_since: dict[str, float] = {}  # waiting requests that were held
        self._releases = 0  # held requests that entered after the maximum time
        self._holds_ended: dict[HoldEnd, int] = dict.fromkeys(HOLD_ENDS, 0)
        self._held_s = 0.0

        # Of the current step.
        self._step = BEFORE_FIRST_STEP
        self._num_admitted = 0
        self._prefill_s = 0.0  # predicted

    def fluid_effects(self) -> FluidEffects:
        return FluidEffects(hold=self._limits)

    @property
    def threshold(self) -> int:
        return self._threshold.k

    @property
    def holding(self) -> bool:
        return self._hold is not None

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        if request.num_preemptions:
            return DIRECT
        request_id = request.request_id
        if (lane := self._lanes.get(request_id)) is None:
            # Only remote KV includes the last token.
            lane = self._lanes[request_id] = (
                DIRECT if cached() >= request.num_tokens else DEFERRABLE
            )
        return lane

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        waiting = lanes.get(DEFERRABLE, NO_REQUESTS).num_admissible
        step_before, self._step = self._step, step
        slots_full = self._free_slots_left <= 0 or step.free_slots <= 0
        self._free_slots_left = step.free_slots
        self._num_admitted, self._prefill_s = 0, 0.0
        for request in step.prefills:
            self._predict_prefill(request)
        if slots_full or step.kv_blocked is not None:
            self._running_when_full = max(step.num_running + step.num_departed, 1)
        if self.learns:
            self._threshold.begin_step(step.index, self._running_when_full)
        if self._hold is not None:
            self._hold.begin_step(step)
            self._held_s += max(step.now - step_before.now, 0.0)
        elif waiting and self._may_hold(step, slots_full=slots_full):
            self._hold = Hold.begin(
                step,
                slots_full=slots_full,
                max_s=self._limits.max_s,
                running_when_full=self._running_when_full,
            )
        self._end_hold_if_due(step, waiting)

    def _end_hold_if_due(self, step: Step, waiting: int) -> None:
        hold = self._hold
        if hold is not None and (reason := hold.end_reason(step, waiting, self.threshold)):
            self._hold = None
            self._holds_ended[reason] += 1

    def _may_hold(self, step: Step, *, slots_full: bool) -> bool:
        if not self._threshold.may_hold:
            return False
        if step.kv_blocked is None:
            return slots_full
        return self._held_since.get(step.kv_blocked) != RELEASED

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Return CLOSED during a hold, and if the prompt does not fit into `itl_ms`."""
        if lane == DIRECT or self._is_overdue(head):
            return Gate.OPEN
        hold = self._hold
        held = hold is not None and not self._is_exempt(head, hold)
        if not held and self._keeps_itl(head):
            return Gate.OPEN
        self._held_since.setdefault(head.request_id, self._step.now)
        return Gate.CLOSED

    def _is_overdue(self, head: RequestView) -> bool:
        request_id, now = head.request_id, self._step.now
        since = self._held_since.get(request_id, now)
        if now - since < self._limits.max_s:
            return False
        if since != RELEASED:
            self._held_since[request_id] = RELEASED
            self._releases += 1
        return True

    def _is_exempt(self, head: RequestView, hold: Hold) -> bool:
        """Return whether the head is urgent, or fits in what was free before the hold."""
        class_of = self._step.class_of
        if class_of is not one_class and class_of(head) <= FIRST_CLASS:
            return True
        if self.facts.kv_cache is None:
            return False
        return hold.fits(head.request_id, self.facts.kv_share(head))

    def _keeps_itl(self, head: RequestView) -> bool:
        """Return whether decodes keep `itl_ms` if the head enters."""
        step, model, itl_s = self._step, self.fit.model, self._limits.itl_s
        decodes = step.num_running - len(step.prefills)
        if itl_s is None or model is None or not decodes:
            return True
        pauses = self.facts.decodes_pause
        # The first prompt of a step or pause may always enter.
        if not (self._num_admitted or (pauses and step.paused_s > 0)):
            return True
        left = itl_s / (1 + self.fit.spread) - self._prefill_s
        if pauses:
            # The gap: pause so far, this step, a decode step.
            shape = StepShape(decodes=decodes, context_tokens=step.context_tokens)
            left -= step.paused_s + model.seconds(shape)
            decodes = 0
        fitting = model.prefill_within(left, decodes, step.context_tokens, 0)
        return fitting >= min(head.num_tokens, self.facts.max_num_batched_tokens)

    def _predict_prefill(self, request: RequestView) -> None:
        if self._limits.itl_s is not None and (model := self.fit.model) is not None:
            computed = request.num_computed_tokens
            tokens = min(request.num_tokens - computed, self.facts.max_num_batched_tokens)
            self._prefill_s += model.chunk_seconds(Chunk(tokens, computed))

    def admitted(self, request: RequestView) -> None:
        self._num_admitted += 1
        self._predict_prefill(request)
        if self._hold is not None:
            self._hold.kv_left -= self.facts.kv_share(request)
        self._free_slots_left -= 1
        self.lengths.record_admission()
        self._forget(request.request_id)

    def observe(self, result: StepResult) -> None:
        self.lengths.record_prefill(sum(chunk.tokens for chunk in result.chunks))
        if self.learns:
            self.fit.observe(self.fit.slowest(result.shape, result.others), result.seconds)

    def departed(self, request: RequestView, now: float) -> None:
        self._forget(request.request_id)
        if request.num_output_tokens > 0:
            self.lengths.record_departure(request.num_output_tokens)

    def _forget(self, request_id: str) -> None:
        self._held_since.pop(request_id, None)
        self._lanes.pop(request_id, None)

    def held_reason(self, lane: str) -> str:
        return "departures" if self.holding else "itl"

    def gauges(self) -> Mapping[str, float]:
        threshold, lengths = self._threshold, self.lengths
        gauges = {"k": threshold.k, "k_best": threshold.best, "holding": float(self.holding)}
        if lengths.is_known:
            gauges["mean_output_tokens"] = lengths.mean_output
            gauges["mean_prompt_tokens"] = lengths.mean_prompt
        return gauges | {f"fit_{name}": value for name, value in self.fit.coefficients().items()}

    def counters(self) -> Mapping[str, float]:
        return {
            **{f"holds_ended_{name}": float(count) for name, count in self._holds_ended.items()},
            "starvation_releases": float(self._releases),
            "held_seconds": self._held_s,
        }


def _check_departures(departures: int | None, max_num_seqs: int) -> None:
    if departures is not None and departures > max_num_seqs:
        raise UsageError(
            f"deferred_prefill.departures={departures} is out of range: at most "
            f"max_num_seqs={max_num_seqs} can depart; give 1 to this number, or auto"
        )

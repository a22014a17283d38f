"""Size prefill chunks so that decodes keep a target gap between tokens.

Idea: in a step with decodes, the budget is the largest with a predicted time within `itl_ms`. The
model of step times is fitted at run time, and corrected by its drift and by a margin for errors. A
chunk is at most half as large again as a chunk that was seen to fit. With `ttft_ms`, late prompts
may use the time that decodes are ahead of their deadlines (arrival + ttft_ms + j * itl_ms for token
j). A request's `tpot_ms` replaces `itl_ms`: the least of the decodes counts. With pipeline
parallelism each concurrent step gets its part of `itl_ms`.
Source: stall-free chunks (Sarathi), sized by deadlines (FairBatching).
Cost per step: O(running prefills), and O(decodes) in steps that use `ttft_ms`.
How it fails: if decodes alone exceed `itl_ms`, prefill continues at `min_chunk` tokens a step. If
more than 1 % of steps stall for other reasons, all steps get shorter.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import ClassVar, Final

from pydantic import Field

from vllm_sched.cost.online_fit import OnlineFit
from vllm_sched.cost.step_time import TimedStep
from vllm_sched.errors import UsageError
from vllm_sched.policies.chunks.measured_chunk import GROWTH, MeasuredChunk
from vllm_sched.policies.chunks.prediction_error import PredictionError
from vllm_sched.policies.chunks.prefill_seconds import PrefillSeconds
from vllm_sched.policies.fluid_effects import FluidEffects, MixedStepLimit
from vllm_sched.policies.targets import targets_in
from vllm_sched.policies.types import (
    BEFORE_FIRST_STEP,
    EngineFacts,
    Policy,
    RequestView,
    Settings,
    Step,
    StepResult,
    one_class,
)

# A step counts as full from this share of its time limit.
PLANNED_FULL_SHARE: Final = 0.75
# Steps with fewer prefill tokens say nothing about chunks.
MIN_PREFILL_TOKENS: Final = 16
# Maximum correction for a prompt longer than all before it.
MAX_EXTRAPOLATION: Final = 2.0
# Maximum gap that uses the decodes' lead, in gaps.
MAX_GAPS: Final = 4.0
MAX_STEPS_IN_FLIGHT: Final = 256
# Of `itl_ms` over the fluid engine's longest step.
FLUID_MARGIN: Final = 1.05


class ChunkBudgetSettings(Settings):
    itl_ms: float = Field(100.0, gt=0)
    """gap between two tokens that a step with prefill may cause; set it to what readers of
    streams accept"""
    ttft_ms: float | None = Field(None, gt=0)
    """time to first token; late prompts use the lead of decodes; set it if first tokens are late
    while streams are ahead"""
    chunk: int | None = Field(None, ge=1)
    """prefill tokens of a step with decodes, instead of by itl_ms; set it to compare with fixed
    chunks"""
    min_chunk: int = Field(32, ge=1)
    """minimum prefill tokens of a step; raise it if prompts starve because decodes alone exceed
    itl_ms"""


class ChunkBudget(Policy):
    name: ClassVar[str] = "chunk_budget"
    settings_type: ClassVar[type[Settings]] = ChunkBudgetSettings
    settings: ChunkBudgetSettings
    sorts_running = True  # a prefill before decodes would take their tokens

    def __init__(self, facts: EngineFacts, settings: ChunkBudgetSettings) -> None:
        super().__init__(facts, settings)
        if not facts.chunked_prefill:
            # A whole prompt would never fit into a small step.
            raise UsageError(
                "chunk_budget sizes the chunks of prompts, and this engine reads them whole "
                "(--no-enable-chunked-prefill, or a model without chunked prefill); leave "
                "the policy out or enable chunked prefill"
            )
        self.fit = OnlineFit()
        self.learns = settings.chunk is None
        self.prediction_error = PredictionError()
        self._measured = MeasuredChunk(facts.max_num_batched_tokens, settings.min_chunk)
        self._longest_context = 1.0  # tokens before the middle of any chunk so far
        self._usual_gap_s = max(settings.itl_ms / 1000, sys.float_info.min)
        self._stages = facts.pipeline_stages
        self._itl_s = max(self._usual_gap_s / self._stages, sys.float_info.min)  # of one step
        self._steps_of_gap: deque[TimedStep] = deque(maxlen=self._stages)  # the last gap
        self._prefill_tokens = facts.max_num_batched_tokens  # of the last budget
        self._predicted_s = 0.0
        # Index and time limit.
        self._limits_in_flight: deque[tuple[int, float]] = deque(maxlen=MAX_STEPS_IN_FLIGHT)
        self._requested_gaps_s: dict[str, float] = {}  # by request
        self._slack_steps = 0
        self._long_steps = 0

        # Of the current step.
        self._step = BEFORE_FIRST_STEP
        self._prefill_time: PrefillSeconds | None = None  # None = only the budget limits prefill

    def fluid_effects(self) -> FluidEffects:
        settings = self.settings
        if settings.chunk is not None:
            return FluidEffects(mixed_steps=MixedStepLimit(chunk=settings.chunk))
        step_s = settings.itl_ms / 1000 / FLUID_MARGIN
        return FluidEffects(mixed_steps=MixedStepLimit(step_s=step_s, min_chunk=settings.min_chunk))

    def arrived(self, request: RequestView, extra_args: Mapping[str, object]) -> None:
        if (gap_s := targets_in(extra_args).tpot_s) is not None:
            self._requested_gaps_s[request.request_id] = gap_s

    def departed(self, request: RequestView, now: float) -> None:
        self._requested_gaps_s.pop(request.request_id, None)

    def budget(self, step: Step) -> int:
        self._step, self._prefill_time = step, None
        tokens = self._prefill_limit(step)
        self._prefill_tokens = min(tokens, max(step.budget - step.decode_tokens, 1))
        return step.decode_tokens + self._prefill_tokens

    def _prefill_limit(self, step: Step) -> int:
        if not step.decode_tokens:
            return step.budget
        if self.settings.chunk is not None:
            return self.settings.chunk
        allowed_s = self._allowed_s(step)
        self._limits_in_flight.append((step.index, allowed_s))
        return max(self._tokens_within(step, allowed_s), self.settings.min_chunk)

    def _tokens_within(self, step: Step, allowed_s: float) -> int:
        """Return the prefill tokens for a step of this time: by the model, once there is one."""
        measured, extrapolation = self._measured, self._extrapolation(step)
        if (model := self.fit.model) is None:
            return int(min(measured.tokens, measured.fitting / extrapolation))
        error = self.prediction_error
        self._prefill_time = prefill = PrefillSeconds(
            model,
            allowed_s / (error.margin * error.drift * extrapolation),
            min_tokens=self.settings.min_chunk,
            # With stages, each step has about the same part of the decodes.
            decodes=-(-len(step.decoding) // self._stages),
            context_tokens=step.context_tokens // self._stages,
        )
        fitting = prefill.count_tokens(step, self._better_newcomer(step))
        return min(int(GROWTH * measured.tokens * (allowed_s / self._itl_s)), fitting)

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        if (prefill := self._prefill_time) is None:
            return tokens
        return prefill.grant(self._step, request, computed, tokens)

    def _better_newcomer(self, step: Step) -> RequestView | None:
        """Return a newcomer of a better class than some prefill, or None."""
        if step.class_of is one_class or not step.prefills:
            return None
        head = step.newcomer()
        if head is None or step.class_of(head) >= step.class_of(step.prefills[-1]):
            return None
        return head

    def _extrapolation(self, step: Step) -> float:
        """Return the possible error of the prediction beyond the longest context seen."""
        context = max((r.num_computed_tokens for r in step.prefills), default=0)
        beyond = (context + self._measured.tokens / 2) / self._longest_context
        return min(max(beyond, 1.0), MAX_EXTRAPOLATION)

    def _allowed_s(self, step: Step) -> float:
        ttft_ms, gap_s = self.settings.ttft_ms, self._least_gap_s(step)
        itl_s = gap_s / self._stages
        if ttft_ms is None or not self._is_at_risk(step, itl_s, ttft_ms / 1000):
            return itl_s
        first = min(r.arrival_time + gap_s * r.num_output_tokens for r in step.decoding)
        lead_s = first + step.clock_offset + ttft_ms / 1000 - step.now
        allowed_s = min(max(lead_s / self._stages, itl_s), MAX_GAPS * itl_s)
        self._slack_steps += allowed_s > itl_s
        return allowed_s

    def _least_gap_s(self, step: Step) -> float:
        if not (requested := self._requested_gaps_s):
            return self._usual_gap_s
        gaps = (requested.get(request.request_id, self._usual_gap_s) for request in step.decoding)
        return max(min(gaps, default=self._usual_gap_s), sys.float_info.min)

    def _is_at_risk(self, step: Step, itl_s: float, ttft_s: float) -> bool:
        """Return whether a prompt will be late at the current pace."""
        pace = max(min(self._prefill_tokens, self._measured.tokens), 1.0) / itl_s
        before, head = 0, step.next_to_enter()
        for request in step.prefills if head is None else (*step.prefills, head):
            before += step.tokens_left(request)
            due = request.arrival_time + step.clock_offset + ttft_s
            if step.now + before / pace > due:
                return True
        return False

    def observe(self, result: StepResult) -> None:
        if not self.learns:
            return
        allowed_s = self._pop_limit(result.index)
        shape, seconds = self.fit.slowest(result.shape, result.others), result.seconds
        self._steps_of_gap.append(TimedStep(shape, seconds))
        tokens = shape.prefill_tokens
        for chunk in result.chunks:
            middle = chunk.context + chunk.tokens / 2
            self._longest_context = max(self._longest_context, middle)
        if tokens >= MIN_PREFILL_TOKENS and shape.decodes:
            # With stages, a long step also delays the results of the steps before it.
            mean_s = fmean([step.seconds for step in self._steps_of_gap])
            self._learn_error(tokens, mean_s, allowed_s)
        self.fit.observe(shape, seconds)

    def _pop_limit(self, index: int) -> float:
        allowed_s = self._itl_s
        while self._limits_in_flight and self._limits_in_flight[0][0] <= index:
            number, limit = self._limits_in_flight.popleft()
            allowed_s = limit if number == index else allowed_s
        return allowed_s

    def _learn_error(self, tokens: int, seconds: float, allowed_s: float) -> None:
        error, measured = self.prediction_error, self._measured
        if (model := self.fit.model) is not None:
            self._predicted_s = fmean([model.seconds(step.shape) for step in self._steps_of_gap])
            # Steps full in time with few tokens count: otherwise a large drift would never fall.
            planned_s = self._predicted_s * error.margin * error.drift
            full = measured.is_full(tokens) or planned_s >= PLANNED_FULL_SHARE * allowed_s
            if full and self._predicted_s > 0:
                error.learn(seconds / self._predicted_s)
        self._long_steps += seconds > allowed_s
        measured.observe(tokens, seconds, limit_s=self._itl_s, margin=error.margin)

    def gauges(self) -> Mapping[str, float]:
        return {
            "chunk_budget_tokens": float(self._prefill_tokens),
            "margin": self.prediction_error.margin,
            "drift": self.prediction_error.drift,
            "predicted_step_seconds": self._predicted_s,
            **{f"fit_{name}": value for name, value in self.fit.coefficients().items()},
        }

    def counters(self) -> Mapping[str, float]:
        return {"long_steps": float(self._long_steps), "slack_steps": float(self._slack_steps)}

"""Limits on long prompts, with a fast lane for short ones.

Idea: a prompt is long while more than a threshold of its tokens is left to compute. A second long
prompt waits, and short prompts pass it. A short prompt that arrives waits for the step in progress,
so a long chunk stretches a step to at most `long_step_stretch` times a step without prefill. A step
that serves short prompts has no long chunk, at most four times in a row. By default a step without
a long prompt is vLLM's own. With classes of service, the limits apply per class.
Source: concurrent partial prefills of vLLM V0 (`max_num_partial_prefills`), which V1 lacks.
Cost per step: O(running prefills).
How it fails: if the stretch is too small, the fixed cost of many steps slows long prompts. Several
long prompts share one limit and finish together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from vllm_sched.cost.pace import StepPace
from vllm_sched.errors import UsageError
from vllm_sched.policies.fluid_effects import FluidEffects, LongPromptLimits
from vllm_sched.policies.long_prompts.division import (
    DivisionRules,
    NoLongChunk,
    StepDivision,
    StepPrompts,
)
from vllm_sched.policies.long_prompts.lookups import LongPromptLookups
from vllm_sched.policies.long_prompts.pacing import (
    QUIET_S,
    QUIET_STRETCH,
    SHORTEST_STEP_S,
    STAND_BACK,
    LongPacing,
)
from vllm_sched.policies.types import (
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

SHORT, LONG = "short", "long"

V0_THRESHOLD_SHARE = 0.04  # of max_model_len
DEFAULT_SHARING = 4
EMPTY = LaneCount()


class LongPromptSettings(Settings):
    max_num_partial_prefills: int | None = Field(
        None,
        ge=1,
        description="prompts that share each step's budget, as in V0; None = 4 share steps with a"
        " long prompt, and other steps are vLLM's own; 1 turns the limits off",
    )
    max_long_partial_prefills: int = Field(
        1, ge=1, description="maximum long prompts in prefill; short prompts are never held"
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="tokens left to compute above which a prompt is long; 0 = 4 % of max_model_len,"
        " at least max_num_batched_tokens",
    )
    long_prefill_share: float | Literal["auto"] = Field(
        "auto",
        description="share of a step's budget for long prompts while other requests are present;"
        " auto = sized by measured step times",
    )
    long_step_stretch: float = Field(
        12.0,
        ge=2.0,
        le=1000.0,
        description="with share auto: time of a step with a long chunk over one without prefill",
    )
    max_wait_s: float = Field(
        60.0,
        gt=0,
        description="wait after which a long prompt enters beyond max_long_partial_prefills",
    )

    @property
    def sharing(self) -> int:
        return self.max_num_partial_prefills or DEFAULT_SHARING

    @model_validator(mode="after")
    def _consistent(self) -> LongPromptSettings:
        if self.max_long_partial_prefills > self.sharing:
            raise ValueError(
                f"max_long_partial_prefills={self.max_long_partial_prefills} must not exceed "
                f"max_num_partial_prefills={self.sharing}"
            )
        share = self.long_prefill_share
        if share != "auto" and not 0 < share <= 1:
            raise ValueError(
                f"long_prefill_share={share} is out of range: give 'auto' or 0 < share <= 1"
            )
        return self


class LongPrompt(Policy):
    name: ClassVar[str] = "long_prompt"
    settings_type: ClassVar[type[Settings]] = LongPromptSettings
    held_reasons = ("long_limit", "shorts_first")
    settings: LongPromptSettings

    def __init__(self, facts: EngineFacts, settings: LongPromptSettings) -> None:
        super().__init__(facts, settings)
        threshold = settings.long_prefill_token_threshold
        if threshold > facts.max_model_len:
            raise UsageError(
                f"long_prompt.long_prefill_token_threshold={threshold} exceeds max_model_len="
                f"{facts.max_model_len}, so no prompt would be long; "
                f"give 0 to {facts.max_model_len}"
            )
        budget = facts.max_num_batched_tokens
        self.arranges = self._active = settings.sharing > 1
        # As in V0, in every step; by default only in steps with a long prompt.
        self._shorts_share = settings.max_num_partial_prefills is not None
        self._places = settings.max_long_partial_prefills
        # An overdue long prompt needs one place among all prompts.
        self._places_overdue = max(settings.sharing, self._places + 1)
        self.pace = StepPace()
        self._pacing = LongPacing(settings.long_step_stretch)
        # V0's threshold, but at least a step's budget.
        default = max(int(facts.max_model_len * V0_THRESHOLD_SHARE), budget)
        self._lookups = LongPromptLookups(threshold or default)
        self._rules = DivisionRules(
            settings.sharing, settings.long_prefill_share, self._lookups, self._pacing
        )
        self._prefilling: list[str] = []  # when the step began
        self._entered_long: set[str] = set()  # prompts in prefill that were long on admission
        self._releases = 0

        # Of the current step.
        self._step = Step(index=0, now=0.0, budget=budget, decodes=0, prefills=())
        self._prompts = StepPrompts()
        self._division = self._divide()
        # False if the gates must be asked before held requests are counted.
        self._counts_are_current = True
        self._overdue: set[str] = set()  # fronts that may enter after max_wait_s

    def resolved(self) -> dict[str, object]:
        return super().resolved() | {"long_prefill_token_threshold": self._lookups.threshold}

    def fluid_effects(self) -> FluidEffects:
        settings = self.settings
        if not self._active:
            return FluidEffects()
        share = settings.long_prefill_share
        return FluidEffects(
            longs=LongPromptLimits(
                above_tokens=self._lookups.threshold,
                places=settings.max_long_partial_prefills,
                prompts_per_step=settings.sharing,
                share=None if share == "auto" else share,
                stretch=settings.long_step_stretch,
                max_wait_s=settings.max_wait_s,
                min_step_s=SHORTEST_STEP_S,
                quiet_s=QUIET_S,
                quiet_stretch=QUIET_STRETCH,
                max_short_steps=STAND_BACK,
            )
        )

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        """Return the lane of long or of short prompts; cached tokens do not count."""
        lookups = self._lookups
        # A preempted request with output is short: shorts would take its KV blocks.
        if request.num_tokens <= lookups.threshold or request.num_output_tokens or not self._active:
            return SHORT
        return LONG if lookups.waits_as_long(request, cached, self._step.now) else SHORT

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        """Divide the budget between long and short prompts."""
        if not self._active:
            return
        before = self._division
        self._pacing.end_step(
            self._step.now,
            shorts_waited=before.shorts_waited,
            stood_back=before.no_long_chunk is NoLongChunk.SHORTS_FIRST,
            probed=before.no_long_chunk is NoLongChunk.PROBE,
        )
        self._step = step
        self._lookups.begin_step()
        self._overdue.clear()
        # The cache grows mainly when prefills change.
        prefilling = [request.request_id for request in step.prefills]
        if prefilling != self._prefilling:
            self._lookups.cache_changed(step.now)
            self._prefilling = prefilling
        self._entered_long.intersection_update(prefilling)
        waiting_longs, waiting_shorts = lanes.get(LONG, EMPTY), lanes.get(SHORT, EMPTY)
        longs = self._longs_in_prefill()
        overdue = waiting_longs.waited >= self.settings.max_wait_s
        places = self._places_overdue if overdue else self._places
        free_places = max(min(places - len(longs), step.free_slots), 0)
        self._prompts = prompts = StepPrompts(
            longs,
            [step.class_of(r) for r in longs],
            waiting_shorts,
            waiting_longs,
            free_places,
            entering=min(waiting_longs.asking, free_places),
        )
        may_enter = waiting_shorts.requests or prompts.entering or self._one_may_pass()
        self._counts_are_current = step.free_slots <= 0 or not may_enter
        self._division = self._divide()

    def _longs_in_prefill(self) -> list[RequestView]:
        is_long = self._lookups.is_long
        return [r for r in self._step.prefills if is_long(r, r.num_computed_tokens)]

    def _divide(self) -> StepDivision:
        return StepDivision(
            self._rules,
            self.pace,
            self._step,
            self._prompts,
            cuts=self._shorts_share or bool(self._entered_long),
        )

    def _update_division(self) -> None:
        """Divide again if other policies hold other requests than before, or pause decodes."""
        self._counts_are_current = True
        prompts = self._prompts
        before = prompts.waiting_shorts.asking, prompts.entering, self._division.decodes
        self._step.ask_gates()
        entering = min(prompts.waiting_longs.asking, prompts.free_places)
        prompts.entering = entering or self._count_passing()
        if (prompts.waiting_shorts.asking, prompts.entering, self._step.decodes) != before:
            prompts.longs = self._longs_in_prefill()
            self._division = self._divide()

    def _one_may_pass(self) -> bool:
        prompts = self._prompts
        if not (prompts.waiting_longs.asking and prompts.classes):
            return False
        return self._step.class_of is not one_class

    def _count_passing(self) -> int:
        """Return 1 if a long passes longs of lower classes, without a free place."""
        head = self._step.may_enter() if self._one_may_pass() else None
        if head is None or head.request_id == self._step.refused:
            return 0
        return int(head.request_id in self._lookups)

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Hold a long prompt while the places are taken, at most for `max_wait_s`."""
        if lane != LONG:
            return Gate.OPEN
        overdue = waited >= self.settings.max_wait_s
        places = self._places_overdue if overdue else self._places
        taken = self._places_taken(head)
        if taken >= places or self._division.long_left <= 0:
            return Gate.CLOSED
        if overdue and taken >= self._places:
            self._overdue.add(head.request_id)
        # Shorts need not wait behind a long that lacks KV blocks.
        stuck = self._step.refused == head.request_id and not overdue
        return Gate.LAST if stuck else Gate.OPEN

    def _places_taken(self, head: RequestView) -> int:
        classes = self._prompts.classes
        if len(classes) < self._places:
            return len(classes)
        own = self._step.class_of(head)
        return sum(taken <= own for taken in classes)

    def stays(self, lane: str, head: RequestView) -> bool:
        """Return False if a short prompt has become long, because cached blocks were evicted."""
        return lane == LONG or self._lookups.is_still_short(head)

    def admitted(self, request: RequestView) -> None:
        self._lookups.admitted(request.request_id)
        if self._lookups.is_long(request, request.num_computed_tokens):
            self._entered_long.add(request.request_id)
            self._prompts.classes.append(self._step.class_of(request))
        self._releases += request.request_id in self._overdue

    def departed(self, request: RequestView, now: float) -> None:
        self._lookups.departed(request.request_id)

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        if not self._active:
            return tokens
        if not self._counts_are_current or self._step.decodes != self._division.decodes:
            self._update_division()
        division = self._division
        if self._step.budget < division.budget:
            division.shrink(self._longs_in_prefill())
        # A request that entered as short stays short, so that it does not block shorts behind it.
        name = request.request_id
        may_be_long = name in self._lookups or name in self._prefilling
        as_long = may_be_long and self._lookups.is_long(request, computed)
        return division.grant(request, computed, tokens, as_long=as_long)

    def taken_back(self, request: RequestView, tokens: int) -> None:
        if self._active:
            self._division.take_back(request, tokens)

    def rank(self, request: RequestView) -> float:
        """Place shorts before longs, so that a long is preempted first.

        A preempted long keeps its place so that it completes. A request with output goes first.
        """
        if request.num_output_tokens:
            return -1.0
        if request.num_preemptions:
            return 0.0
        return float(self._lookups.is_long(request, request.num_computed_tokens))

    def observe(self, result: StepResult) -> None:
        self.pace.observe(result.seconds, result.chunks)
        self._pacing.observe(result)

    def gauges(self) -> Mapping[str, float]:
        """Return the longs in prefill and the longest step that a chunk may cause."""
        shown = {"long_prefills": float(len(self._prompts.classes))}
        limit_s = self._division.limit_s
        return shown if limit_s is None else shown | {"step_limit_seconds": limit_s}

    def counters(self) -> Mapping[str, float]:
        """Return the longs admitted beyond the limit after `max_wait_s`."""
        return {"starvation_releases": float(self._releases)}

    def held_reason(self, lane: str) -> str:
        """Return whether the places are taken, or the step serves shorts."""
        return "long_limit" if len(self._prompts.classes) >= self._places else "shorts_first"

"""Once the engine is full, hold admissions until K requests have departed.

Idea: a step with prefill has a fixed extra cost, which several prompts can share. With `departures:
auto`, requests are held only if the fitted step times predict a gain, and K is half of the best K.
A hold also ends if fewer requests wait than fill the batch, and after `max_delay_ms`. Never held:
mostly cached or preempted requests, requests with remote KV, and the first of several classes of
service. `itl_ms` limits K and the prompts that enter together.
Source: deferred prefill, which pauses decodes for a batch of prefills (add `prefill_first`).
Cost per step: O(1), and O(1) for each prefill.
How it fails: idle slots during a hold cost throughput if the fixed cost is small. A prompt that
takes longer than `itl_ms` by itself is not split; add `chunk_budget`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field

from vllm_sched.cost.fit import OnlineFit
from vllm_sched.cost.step_time import Chunk, StepShape
from vllm_sched.errors import UsageError
from vllm_sched.policies.deferral.front_waits import FrontWaits
from vllm_sched.policies.deferral.hold import ENDS, End, Hold
from vllm_sched.policies.deferral.lengths import RequestLengths
from vllm_sched.policies.deferral.prefill_time import PrefillTime
from vllm_sched.policies.deferral.threshold import DepartureThreshold
from vllm_sched.policies.fluid_effects import AdmissionHold, FluidEffects
from vllm_sched.policies.prefix_lookups import PrefixLookups
from vllm_sched.policies.types import (
    FIRST_CLASS,
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

# From this cached share, a request is never held.
CACHED_SHARE: Final = 0.5
LOOK_UP_INTERVAL_STEPS: Final = 8
# Mixed steps in a row before a step without prefill measures decoding.
PROBE_EVERY: Final = 64
EMPTY: Final = LaneCount()


class DeferredPrefillSettings(Settings):
    departures: int | Literal["auto"] = Field(
        "auto",
        description="departures that a hold waits for; auto = chosen from measured costs; set it to"
        " repeat a measurement",
    )
    itl_ms: float | None = Field(
        None,
        gt=0,
        description="gap between tokens that a batch of prefills may cause; set it if streams"
        " stutter",
    )
    max_delay_ms: float = Field(
        1000.0,
        gt=0,
        description="maximum time that a request is held; lower it if first tokens are late",
    )
    # Former settings.
    max_delay_steps: int = Field(512, ge=1, description="former; maximum length of a hold in steps")
    exclusive: bool = Field(False, description="former; without effect")
    former: ClassVar[Mapping[str, str]] = {
        "max_delay_steps": "use max_delay_ms",
        "exclusive": "it has no effect; add --policy prefill_first to pause decodes",
    }


class DeferredPrefill(Policy):
    name: ClassVar[str] = "deferred_prefill"
    settings_type: ClassVar[type[Settings]] = DeferredPrefillSettings
    held_reasons = ("departures", "probe", "itl")
    settings: DeferredPrefillSettings

    def __init__(self, facts: EngineFacts, settings: DeferredPrefillSettings) -> None:
        super().__init__(facts, settings)
        departures = None if settings.departures == "auto" else settings.departures
        _check_departures(departures, facts.max_num_seqs)
        self.fit = OnlineFit()
        self.lengths = RequestLengths()
        self._itl_s = None if settings.itl_ms is None else settings.itl_ms / 1000
        self._max_hold_s = max(settings.max_delay_ms / 1000, sys.float_info.min)
        self.learns = departures is None or self._itl_s is not None
        self._threshold = DepartureThreshold(
            departures,
            self.fit,
            self.lengths,
            itl_s=self._itl_s,
            max_hold_s=self._max_hold_s,
            decodes_pause=facts.decodes_pause,
            budget=facts.max_num_batched_tokens,
        )
        self._running_full = facts.max_num_seqs  # running requests when the engine is full
        self._free_left = facts.max_num_seqs  # free slots after the admissions of the last step
        self._hold: Hold | None = None
        self._fronts = FrontWaits()
        # Other policies may hold either lane, so both results are kept.
        self._deferrable = PrefixLookups()
        self._direct = PrefixLookups()
        self._mixed_in_a_row = 0
        self._ended: dict[End, int] = dict.fromkeys(ENDS, 0)
        self._held_s = 0.0

        # Of the current step.
        self._step = Step(index=0, now=0.0, budget=0, decodes=0, prefills=())
        self._prefill_time = PrefillTime(self.fit)
        self._probing = False

    def fluid_effects(self) -> FluidEffects:
        settings = self.settings
        departures, max_s = settings.departures, settings.max_delay_ms / 1000
        return FluidEffects(
            hold=AdmissionHold(None if departures == "auto" else departures, max_s, self._itl_s)
        )

    @property
    def threshold(self) -> int:
        return self._threshold.k

    @property
    def holding(self) -> bool:
        return self._hold is not None

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        if request.num_preemptions:
            return DIRECT
        if not self.learns and self._threshold.k == 1:
            return DEFERRABLE  # never held, so a look-up is useless
        name, now = request.request_id, self._step.now
        if self._deferrable.holds(name, now):
            return DEFERRABLE
        if self._direct.holds(name, now):
            return DIRECT
        known = cached()
        mostly_cached = known >= CACHED_SHARE * request.num_tokens
        (self._direct if mostly_cached else self._deferrable).add(name, known, now)
        return DIRECT if mostly_cached else DEFERRABLE

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        waiting = lanes.get(DEFERRABLE, EMPTY).asking
        free_before, self._free_left = self._free_left, step.free_slots
        before, self._step = self._step, step
        if self._itl_s is not None:
            self._prefill_time = PrefillTime(self.fit)
        self._update_lookups(step, before)
        slots_full = free_before <= 0 or step.free_slots <= 0
        if slots_full or step.refused is not None:
            self._running_full = max(step.running + step.departed, 1)
        if self.learns:
            self._threshold.begin_step(step.index, self._running_full)
        self._probing = self._probe_due(step, full=slots_full)
        self._fronts.begin_step()
        if (hold := self._hold) is not None:
            hold.begin_step(step)
            self._held_s += max(step.now - before.now, 0.0)
        elif self._threshold.holds and waiting and self._may_hold(step, full=slots_full):
            hold = self._hold = Hold.begin(step, slots_full=slots_full)
        if hold is not None and (end := self._end(hold, step, waiting)):
            self._hold = None
            self._ended[end] += 1

    def _update_lookups(self, step: Step, before: Step) -> None:
        prefills, prefills_before = ([r.request_id for r in s.prefills] for s in (step, before))
        # The cache grows mainly when prefills change.
        if prefills != prefills_before or step.index % LOOK_UP_INTERVAL_STEPS == 0:
            self._deferrable.changed(step.now)
            self._direct.changed(step.now)

    def _may_hold(self, step: Step, *, full: bool) -> bool:
        return (full or step.refused is not None) and not self._fronts.any_released

    def _end(self, hold: Hold, step: Step, waiting: int) -> End | None:
        if not step.running:
            return "idle"
        lasted = max(step.now - hold.since, self._fronts.longest(step.now))
        progress = max(lasted / self._max_hold_s, hold.steps / self.settings.max_delay_steps)
        if progress >= 1:
            self._fronts.release(step.now, self._max_hold_s)
            return "overdue"
        return hold.end(
            step, waiting, k=self.threshold, progress=progress, running_full=self._running_full
        )

    def _probe_due(self, step: Step, *, full: bool) -> bool:
        if self._mixed_in_a_row < PROBE_EVERY or step.prefills or not full:
            return False
        self._mixed_in_a_row = 0
        return True

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Return CLOSED during a hold, and if the prompt does not fit into `itl_ms`."""
        if lane != DEFERRABLE:
            return Gate.OPEN
        self._fronts.ask(head.request_id)
        held = self._probing or (self._hold is not None and not self._is_urgent(head))
        if (not held or self._fits(head)) and self._in_time(head):
            return Gate.OPEN
        self._fronts.hold(head.request_id, self._step.now)
        return Gate.CLOSED

    def _is_urgent(self, head: RequestView) -> bool:
        class_of = self._step.class_of
        return class_of is not one_class and class_of(head) <= FIRST_CLASS

    def _fits(self, head: RequestView) -> bool:
        if (hold := self._hold) is None or hold.slots_full or self.facts.kv_cache is None:
            return False
        return hold.fits(head.request_id, self.facts.kv_share(head))

    def _in_time(self, head: RequestView) -> bool:
        """Return whether decodes keep `itl_ms` if the head enters."""
        step, model = self._step, self.fit.model
        decodes = step.running - len(step.prefills)
        if self._itl_s is None or model is None or not decodes:
            return True
        pausing = self.facts.decodes_pause and step.paused_s > 0
        # The first prompt of a step or pause, and an overdue prompt, may always enter.
        first = not (self._prefill_time.admitted or pausing)
        if first or self._fronts.waited(head.request_id, step.now) >= self._max_hold_s:
            return True
        left = self._itl_s / (1 + self.fit.spread) - self._prefill_time.total_s
        if self.facts.decodes_pause:
            # The gap: pause so far, this step, a decode step.
            shape = StepShape(decodes=decodes, context_tokens=step.context_tokens)
            left -= step.paused_s + model.seconds(shape)
            decodes = 0
        fitting = model.prefill_within(left, decodes, step.context_tokens, 0)
        return fitting >= min(head.num_tokens, self.facts.max_num_batched_tokens)

    def admitted(self, request: RequestView) -> None:
        if self._itl_s is not None:
            computed = request.num_computed_tokens
            rest = Chunk(request.num_tokens - computed, computed)
            self._prefill_time.admit(request.request_id, rest)
        if self._hold is not None:
            self._hold.kv_left -= self.facts.kv_share(request)
        self._free_left -= 1
        self.lengths.admitted()
        self._fronts.forget(request.request_id)

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Return all tokens; only their predicted time counts."""
        if self._itl_s is not None:
            self._prefill_time.set_chunk(request.request_id, Chunk(tokens, computed))
        return tokens

    def taken_back(self, request: RequestView, tokens: int) -> None:
        if self._itl_s is not None:
            self._prefill_time.take_back(request.request_id, tokens)

    def observe(self, result: StepResult) -> None:
        tokens = sum(chunk.tokens for chunk in result.chunks)
        self.lengths.prefilled(tokens)
        if not self.learns:
            return
        if tokens and result.decodes:
            self._mixed_in_a_row += 1
        elif result.decodes:
            self._mixed_in_a_row = 0
        shape = self.fit.slowest(result.shape, result.others)
        self.fit.observe(shape, result.seconds)

    def departed(self, request: RequestView, now: float) -> None:
        self._fronts.forget(request.request_id)
        if request.num_output_tokens > 0:
            self.lengths.departed(request.num_output_tokens)

    def held_reason(self, lane: str) -> str:
        """Return whether a hold, a probe or `itl_ms` closes the gate."""
        if self.holding:
            return "departures"
        return "probe" if self._probing else "itl"

    def gauges(self) -> Mapping[str, float]:
        threshold = self._threshold
        shown = {
            "k": float(threshold.k),
            "k_best": threshold.best,
            "holding": float(self.holding),
        }
        if self.lengths.known:
            shown |= {
                "mean_output_tokens": self.lengths.output,
                "mean_prompt_tokens": self.lengths.prompt,
            }
        if self.fit.model is not None:
            shown |= {f"fit_{name}": value for name, value in self.fit.model.to_json().items()}
        return shown

    def counters(self) -> Mapping[str, float]:
        """Return the holds by their end, and the time spent in holds."""
        return {
            **{f"holds_ended_{end}": float(count) for end, count in self._ended.items()},
            "starvation_releases": float(self._ended["overdue"]),
            "held_seconds": self._held_s,
        }


def _check_departures(departures: int | None, max_num_seqs: int) -> None:
    out_of_range = f"deferred_prefill.departures={departures} is out of range"
    if departures is not None and departures < 1:
        raise UsageError(f"{out_of_range}: at least 1 departs; give 1 or more, or auto")
    if departures is not None and departures > max_num_seqs:
        raise UsageError(
            f"{out_of_range}: no more than max_num_seqs={max_num_seqs} can depart; "
            f"give 1 to {max_num_seqs}, or auto"
        )

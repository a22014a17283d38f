"""Limits on long prompts, with a fast lane for short ones.

Idea: a prompt is long while more than a threshold of its tokens is left to compute, and stays long
until it is computed. A second long prompt waits, and shorter ones pass it. Of waiting longs, the
one enters first that would end first had each begun when it arrived. While other requests are
present, a long prompt's chunk is the smallest without notable loss, found by comparing step times
(`long_prompts.chunk_size`). Shorts are computed before it. Mediums pass longs and enter after
shorts (`long_prompts.medium_prompts`). With classes of service, the limits apply per class.
Source: concurrent partial prefills of vLLM V0 (`max_num_partial_prefills`), which V1 lacks.
Cost per step: O(running prefills).
How it fails: the work of shorts that pass delays longs by as much, so under a steady load of shorts
longs are later than with vLLM's scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, Literal

from pydantic import Field, field_validator

from vllm_sched.policies.fluid_effects import FluidEffects, LongPromptLimits
from vllm_sched.policies.long_prompts.chunk_size import ChunkSize, LongChunk
from vllm_sched.policies.long_prompts.division import StepDivision, StepPrompts
from vllm_sched.policies.long_prompts.kv_reserve import KvReserve
from vllm_sched.policies.long_prompts.lookups import LONG, MEDIUM, SHORT, LengthLookups
from vllm_sched.policies.long_prompts.medium_prompts import MediumPrompts
from vllm_sched.policies.types import (
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

MIN_OVERDUE_PLACES: Final = 4
# Without decodes and shorts for this time, a long prompt has whole steps.
QUIET_S: Final = 1.0


class LongPromptSettings(Settings):
    long_prefill_token_threshold: int = Field(0, ge=0)
    """tokens left to compute above which a prompt is long; 0 = 4 % of max_model_len, at most 8192
    and at least max_num_batched_tokens; lower it if shorter prompts make streams stutter"""
    max_long_partial_prefills: int = Field(1, ge=1)
    """long prompts in prefill at once; raise it if longs should progress together rather than one
    after the other"""
    itl_ms: float = Field(100.0, gt=0)
    """gap between two tokens above which chunks of long prompts may lose twice as much time to
    become smaller; lower it if streams stutter"""
    max_wait_s: float = Field(60.0, gt=0)
    """wait after which a long prompt enters beyond max_long_partial_prefills; lower it if longs
    starve"""
    max_num_partial_prefills: int | None = Field(None, ge=1)
    """former: short prompts are no longer limited; 1 turns the policy off (name no policy
    instead), other values limit overdue long prompts"""
    long_prefill_share: float | Literal["auto"] = "auto"
    """former: chunks are sized by measured step times; a share fixes them"""
    long_step_stretch: float | None = Field(None, ge=2.0, le=1000.0)
    """former: it has no effect, because chunks are sized by what smaller ones lose; see itl_ms"""

    @field_validator("long_prefill_share")
    @classmethod
    def _in_range(cls, share: float | str) -> float | str:
        if isinstance(share, float | int) and not 0 < share <= 1:
            raise ValueError("give 'auto' or 0 < share <= 1")
        return share

    @property
    def off(self) -> bool:
        return self.max_num_partial_prefills == 1


class LongPrompt(Policy):
    name: ClassVar[str] = "long_prompt"
    settings_type: ClassVar[type[Settings]] = LongPromptSettings
    held_reasons = ("long_limit", "shorts_first", "kv_of_longs")
    settings: LongPromptSettings
    sorts_running = True

    def __init__(self, facts: EngineFacts, settings: LongPromptSettings) -> None:
        super().__init__(facts, settings)
        budget = facts.max_num_batched_tokens
        self._places = settings.max_long_partial_prefills
        places = settings.max_num_partial_prefills or MIN_OVERDUE_PLACES
        self._places_overdue = max(places, self._places + 1)
        self._lookups = LengthLookups(facts, settings.long_prefill_token_threshold)
        self.chunk_size = ChunkSize(budget, facts.block_tokens, settings.itl_ms / 1000)
        self._mediums = MediumPrompts(self._lookups)
        self._kv_reserve = KvReserve(facts)
        self._longs: set[str] = set()  # prompts in prefill that were long on admission
        self._short_seen_at = -math.inf
        self._releases = 0

        # Of the current step.
        self._step = Step(index=0, now=0.0, budget=budget, decode_tokens=0, prefills=())
        self._prompts = StepPrompts()
        self._chunk: LongChunk | None = None
        self._divide_step()
        # False if the gates must be asked before held requests are counted.
        self._counts_are_current = True

    def effective_settings(self) -> dict[str, object]:
        in_use = {"long_prefill_token_threshold": self._lookups.threshold}
        return super().effective_settings() | in_use

    def fluid_effects(self) -> FluidEffects:
        settings = self.settings
        share = settings.long_prefill_share
        return FluidEffects(
            longs=LongPromptLimits(
                above_tokens=self._lookups.threshold,
                max_short=self._lookups.max_short,
                places=self._places,
                places_overdue=self._places_overdue,
                share=None if share == "auto" else share,
                itl_s=settings.itl_ms / 1000,
                max_wait_s=settings.max_wait_s,
                quiet_s=QUIET_S,
            )
        )

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        return self._lookups.lane(request, cached, self._step.now)

    def urgency(self, lane: str, head: RequestView, waited: float) -> float:
        """Place mediums after shorts, and longs by their end had each begun on arrival."""
        if self.facts.orders_by_priority:
            return 0.0
        if lane == SHORT:
            return -waited
        kind, _, bits = lane.partition("/")
        overdue = waited >= self.settings.max_wait_s
        if kind == MEDIUM:
            later = self._mediums.urgency_after_shorts(head, int(bits), overdue=overdue)
            if later is not None:
                return later
        if kind == LONG and head.num_preemptions:
            return -math.inf  # as with vLLM's scheduler
        return -waited if overdue else self.chunk_size.token_s * (1 << int(bits)) - waited

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        self._step = step
        self._longs.intersection_update([request.request_id for request in step.prefills])
        self._mediums.begin_step(step)
        self._prompts = prompts = StepPrompts(
            longs=[r for r in step.prefills if r.request_id in self._longs],
            shorts=self._shorts_of(step),
            waiting_shorts=lanes.get(SHORT, NO_REQUESTS),
            medium_lanes=[lanes[name] for name in lanes if name.startswith(MEDIUM)],
            long_lanes=[lanes[name] for name in lanes if name.startswith(LONG)],
        )
        waiting = prompts.waiting_shorts.num_admissible + prompts.waiting_mediums.num_admissible
        self._kv_reserve.begin_step(step, prompts.longs)
        if prompts.shorts or (waiting and step.free_slots > 0):
            self._short_seen_at = step.now
        self._chunk = self._chunk_for(prompts.longs)
        chunk_tokens = step.budget if self._chunk is None else self._chunk.tokens
        prompts.find_ending(chunk_tokens, step.class_of)
        taken = len(prompts.long_classes) + len(self._loading_longs())
        prompts.free_places = self._free_places(taken)
        self._counts_are_current = step.free_slots <= 0 or not step.num_waiting
        self._divide_step()

    def _shorts_of(self, step: Step) -> list[RequestView]:
        """Return the shorts in prefill, and the shorts that enter with all KV here."""
        shorts = [r for r in step.prefills if r.request_id not in self._longs]
        is_long = self._lookups.is_long
        return shorts + [r for r in step.loaded_requests() if not is_long(r, r.num_computed_tokens)]

    def _free_places(self, taken: int) -> int:
        free = self._places - taken
        if self._prompts.waiting_longs.waited >= self.settings.max_wait_s:  # one after the other
            free = min(max(free, 0) + 1, self._places_overdue - taken)
        return max(min(free, self._step.free_slots), 0)

    def _chunk_for(self, longs: Sequence[RequestView]) -> LongChunk | None:
        step = self._step
        if not step.decode_tokens and step.now - self._short_seen_at > QUIET_S:
            return None
        share = self.settings.long_prefill_share
        if share == "auto":
            return self.chunk_size.next_chunk() if longs else self.chunk_size.usual_chunk
        tokens = max(int(step.budget * share), 1)
        return LongChunk(tokens, tokens)

    def _divide_step(self, passing: int = 0) -> None:
        step, prompts = self._step, self._prompts
        lacks_kv = prompts.kv_blocked or self._lookups.was_long(step.kv_blocked)
        entering = 0 if lacks_kv else min(prompts.waiting_longs.num_admissible, prompts.free_places)
        prompts.num_entering = entering or passing
        self._division = StepDivision(step, prompts, self._chunk, self._lookups.threshold)

    def _recount_and_divide(self) -> None:
        """Count the waiting requests anew; other policies may hold others, or pause decodes."""
        self._counts_are_current = True
        step = self._step
        step.recount_held()
        self._prompts.count_waiting()
        lacks_kv = step.kv_blocked is not None or self._kv_reserve.held_before
        self._prompts.kv_blocked = lacks_kv and step.newcomer() is None
        self._divide_step(self._count_passing())

    def _count_passing(self) -> int:
        """Return 1 if a long passes longs of lower classes, without a free place."""
        step, prompts = self._step, self._prompts
        may_pass = prompts.long_classes and prompts.waiting_longs.num_admissible
        head = step.newcomer() if may_pass and step.class_of is not one_class else None
        return int(head is not None and self._lookups.was_long(head.request_id))

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Hold a long prompt while the places are taken, and others if longs need the KV blocks."""
        has_room = self._kv_reserve.has_room(head, self._lookups.tokens_left(head))
        if not (has_room and lane.startswith(LONG)):
            return Gate.OPEN if has_room else Gate.CLOSED
        overdue = waited >= self.settings.max_wait_s or head.num_preemptions > 0
        places = self._places_overdue if overdue else self._places
        taken = self._count_places_taken(head)
        if taken >= places or self._division.long_left <= 0:
            return Gate.CLOSED
        # Shorts need not wait behind longs that lack KV blocks.
        lacks_kv = self._lookups.was_long(self._step.kv_blocked)
        return Gate.LAST if lacks_kv and not overdue else Gate.OPEN

    def _count_places_taken(self, head: RequestView) -> int:
        head_class = self._step.class_of(head)
        classes = (*self._prompts.long_classes, *map(self._step.class_of, self._loading_longs()))
        return sum(its_class <= head_class for its_class in classes)

    def _loading_longs(self) -> list[RequestView]:
        loading = self._step.loading_requests()
        return [r for r in loading if self._lookups.is_long(r, r.num_computed_tokens)]

    def keeps_lane(self, lane: str, head: RequestView) -> bool:
        """Return False if a short prompt has become longer, because cached blocks were evicted."""
        return lane != SHORT or self._lookups.is_still_short(head)

    def admitted(self, request: RequestView) -> None:
        request_id = request.request_id
        had_lane = self._lookups.was_long(request_id)
        was_medium = self._lookups.was_medium(request_id)
        self._lookups.forget(request_id)
        is_long = self._lookups.is_long(request, request.num_computed_tokens)
        if is_long or request_id in self._longs:
            self._longs.add(request_id)
            self._releases += had_lane and self._count_places_taken(request) >= self._places
            self._prompts.long_classes.append(self._step.class_of(request))
        self._kv_reserve.admitted(request, is_long=request_id in self._longs)
        self._mediums.admitted(request, is_medium=was_medium and request_id not in self._longs)

    def departed(self, request: RequestView, now: float) -> None:
        self._lookups.forget(request.request_id)

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        if not self._counts_are_current or self._step.decode_tokens != self._division.decode_tokens:
            self._recount_and_divide()
        division = self._division
        if self._step.budget < division.budget:
            division.reserve()
        request_id = request.request_id
        was_longer = self._lookups.was_long(request_id) or self._lookups.was_medium(request_id)
        if was_longer and self._lookups.is_long(request, computed):
            # When it is noted as admitted, its first chunk may already count as computed.
            self._longs.add(request_id)
        return division.grant(request, computed, tokens, as_long=request_id in self._longs)

    def taken_back(self, request: RequestView, tokens: int) -> None:
        self._division.take_back(request, tokens)

    def rank(self, request: RequestView) -> float:
        """Place shorts before longs, so that a long is preempted first.

        A preempted long keeps its place so that it completes. A request with output goes first.
        """
        if request.num_output_tokens:
            return -1.0
        return float(request.request_id in self._longs and not request.num_preemptions)

    def observe(self, result: StepResult) -> None:
        self.chunk_size.observe(result)

    def gauges(self) -> Mapping[str, float]:
        tokens = self.chunk_size.tokens if self._chunk is None else self._chunk.tokens
        longs = self._prompts.long_classes
        return {"long_prefills": float(len(longs)), "long_chunk_tokens": float(tokens)}

    def counters(self) -> Mapping[str, float]:
        return {"starvation_releases": float(self._releases)}

    def held_reason(self, lane: str) -> str:
        """Return whether the places or KV blocks are taken, or the step serves shorts."""
        if not lane.startswith(LONG):
            return "kv_of_longs"
        return "long_limit" if len(self._prompts.long_classes) >= self._places else "shorts_first"

"""The division of one step's tokens between long and short prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from vllm_sched.cost.pace import StepPace, cut_chunk
from vllm_sched.policies.long_prompts.lookups import LongPromptLookups
from vllm_sched.policies.long_prompts.pacing import LongPacing
from vllm_sched.policies.types import LaneCount, RequestView, Step, one_class


@dataclass(frozen=True, slots=True)
class DivisionRules:
    """What all divisions of an engine have in common."""

    sharing: int  # prompts that share a step
    share: float | Literal["auto"]  # share of the step for long prompts
    lookups: LongPromptLookups
    pacing: LongPacing


@dataclass(slots=True)
class StepPrompts:
    """The prompts of one step: in prefill, and waiting."""

    longs: list[RequestView] = field(default_factory=list)  # in prefill when the step began
    classes: list[float] = field(default_factory=list)  # of longs, including newcomers
    waiting_shorts: LaneCount = field(default_factory=LaneCount)
    waiting_longs: LaneCount = field(default_factory=LaneCount)
    free_places: int = 0  # for waiting longs
    entering: int = 0  # waiting longs that may enter


class NoLongChunk(Enum):
    """Why the long prompts of a step get no tokens."""

    SHORTS_FIRST = auto()
    PROBE = auto()  # the step measures decoding alone


@dataclass(slots=True)
class ClassChunks:
    """The chunks of one step by class of service."""

    longs_behind: list[float]  # classes of longs without their chunk
    shorts_took: dict[float, int] = field(default_factory=dict)  # tokens


class StepDivision:
    """The tokens for each prompt of one step."""

    def __init__(
        self, rules: DivisionRules, pace: StepPace, step: Step, prompts: StepPrompts, *, cuts: bool
    ) -> None:
        self._pace = pace
        self._step = step
        self._prompts = prompts
        shorts_wait = prompts.waiting_shorts.asking
        self.decodes = step.decodes
        self.shorts_waited = shorts_wait > 0
        self.no_long_chunk: NoLongChunk | None = None
        self.limit_s: float | None = None  # the longest step that one prefill may cause
        best = min(prompts.classes, default=math.inf)
        is_long = rules.lookups.is_long
        # Shorts of a lower class than the longs come after the longs.
        shorts = sum(
            step.class_of(r) <= best for r in step.prefills if not is_long(r, r.num_computed_tokens)
        )
        self._shorts = shorts + min(shorts_wait, max(step.free_slots, 0))
        self._longs_due = len(prompts.classes) + prompts.entering  # longs without their chunk
        self._sharing = max(min(self._shorts + self._longs_due, rules.sharing), 1)
        self._slot = max(step.budget // self._sharing, 1)  # tokens of one prefill
        self._cuts = cuts or self._longs_due > 0
        self._last_was_long = False
        self._computed = step.decodes  # tokens of decodes and granted chunks
        classes = step.class_of is not one_class
        self._by_class = ClassChunks(prompts.classes.copy()) if classes else None
        self.long_left = self._for_longs(rules)  # tokens for all longs together
        self._reserve()

    def _for_longs(self, rules: DivisionRules) -> int:
        step, share = self._step, rules.share
        if self._shorts + self._longs_due <= 1 and not step.decodes:
            return step.budget
        if share != "auto":
            return max(int(step.budget * share), self._longs_due, 1)
        pacing, longs = rules.pacing, self._prompts.classes
        if longs and self._shorts and pacing.stands_back(self._pace, step, self._slot):
            self.no_long_chunk = NoLongChunk.SHORTS_FIRST
            self._sharing = min(self._shorts, self._sharing)
            self._slot = max(step.budget // self._sharing, 1)
        self.limit_s = pacing.limit_s(
            self._pace, step.now, sharing=self._sharing, shorts_wait=self.shorts_waited
        )
        undisturbed = bool(longs and not self._shorts and step.decodes)
        if undisturbed and pacing.probe_due(step.now):
            self.no_long_chunk = NoLongChunk.PROBE
        return step.budget if self.no_long_chunk is None else 0

    def _reserve(self) -> None:
        step, prompts = self._step, self._prompts
        self.budget = step.budget
        room = max(step.budget - step.decodes, 0)
        if self._shorts:
            reserved = max(room // self._sharing, min(room, 1))
            self.long_left = min(self.long_left, room - reserved)
        else:
            # With one token left, the engine tries a barred request again.
            reserved = int(prompts.waiting_shorts.barred > 0 and step.free_slots > 0)
            self.long_left = min(self.long_left, max(room - reserved, 1))
        has_place = prompts.free_places > prompts.entering
        self._for_barred_long = int(prompts.waiting_longs.barred > 0 and has_place)
        # Shorts run before longs, so the longs' tokens must be reserved.
        due = sum(self._fit(r, r.num_computed_tokens, step.budget) for r in prompts.longs)
        self._reserved_for_longs = min(due, self.long_left)
        self._short_left = max(room - self._reserved_for_longs, 1)

    def shrink(self, longs: Sequence[RequestView]) -> None:
        """Divide the rest of a budget that a later policy has reduced."""
        self._prompts.longs = list(longs)
        self._slot = max(self._step.budget // self._sharing, 1)
        self._reserve()

    def grant(self, request: RequestView, computed: int, tokens: int, *, as_long: bool) -> int:
        """Return the tokens that a prefill gets; longs also share one limit."""
        self._last_was_long = as_long
        granted = self._fit(request, computed, tokens)
        if self._by_class is not None:
            part = self._part_of_share(self._by_class, request, computed, tokens)
            granted = min(granted, part)
        if as_long:
            left = max(self.long_left - self._for_barred_long, min(self.long_left, 1))
            granted = min(granted, math.ceil(left / max(self._longs_due, 1)))
            if self.limit_s is not None and granted < request.num_tokens - computed:
                granted = cut_chunk(granted, self._computed, computed)
            self.long_left -= granted
            self._longs_due -= 1
        else:
            granted = min(granted, self._short_left)
            self._short_left -= granted
            self._count_short(request, granted)
        self._computed += granted
        return granted

    def take_back(self, request: RequestView, tokens: int) -> None:
        """Return tokens of the last chunk to prompts of the same length."""
        self._computed -= tokens
        if self._last_was_long:
            self.long_left += tokens
        else:
            self._short_left += tokens
            self._count_short(request, -tokens)

    def _count_short(self, request: RequestView, tokens: int) -> None:
        if self._by_class is not None:
            own = self._step.class_of(request)
            took = self._by_class.shorts_took
            took[own] = took.get(own, 0) + tokens

    def _fit(self, request: RequestView, computed: int, tokens: int) -> int:
        tokens = min(tokens, request.num_tokens - computed)
        if not self._cuts:
            return tokens
        tokens = min(tokens, self._slot)
        if self.limit_s is None:
            return tokens
        fitting = self._pace.chunk_within(self.limit_s, computed)
        return tokens if fitting is None else min(tokens, max(fitting, 1))

    def _part_of_share(
        self, chunks: ClassChunks, request: RequestView, computed: int, tokens: int
    ) -> int:
        """Divide the tokens of a class of service that has only a share of the step.

        The share shows where `tokens` is less than the prompt could use. A short prompt that
        `tokens` completes leaves nothing to longs.
        """
        own = self._step.class_of(request)
        if self._last_was_long and own in chunks.longs_behind:
            chunks.longs_behind.remove(own)
        if tokens >= min(request.num_tokens - computed, self._step.budget - self._computed):
            return tokens
        slot = (tokens + chunks.shorts_took.get(own, 0)) // self._sharing
        if self._last_was_long:
            return max(slot, 1) if self._shorts else tokens
        longs = min(chunks.longs_behind.count(own), self._sharing - 1)
        return max(tokens - min(longs * slot, self._reserved_for_longs), 0)

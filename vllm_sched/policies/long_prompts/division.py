"""The division of one step's tokens between long and short prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from vllm_sched.policies.long_prompts.chunk_size import LongChunk
from vllm_sched.policies.types import LaneCount, RequestView, Step, one_class

# Shorts leave this share of the step to longs.
MIN_SHARE_OF_LONGS: Final = 1 / 4
# Prompts of one class of service among which its share of a step is divided.
MAX_PARTS: Final = 4


@dataclass(slots=True)
class StepPrompts:
    """The prompts of one step: in prefill, and waiting."""

    longs: list[RequestView] = field(default_factory=list)
    shorts: list[RequestView] = field(default_factory=list)
    ending: set[str] = field(default_factory=set)  # longs that the step may complete
    long_classes: list[float] = field(default_factory=list)  # of other longs, including newcomers
    waiting_shorts: LaneCount = field(default_factory=LaneCount)
    medium_lanes: Sequence[LaneCount] = ()
    long_lanes: Sequence[LaneCount] = ()
    waiting_mediums: LaneCount = field(init=False)  # of all their lanes
    waiting_longs: LaneCount = field(init=False)
    free_places: int = 0  # for waiting longs
    num_entering: int = 0  # waiting longs that may enter
    kv_blocked: bool = False  # no request enters, because the next one lacks KV blocks

    def __post_init__(self) -> None:
        self.count_waiting()

    def find_ending(self, tokens: int, class_of: Callable[[RequestView], float]) -> None:
        """Let longs that a chunk of `tokens` completes leave their places to the next ones."""
        self.ending = {
            r.request_id for r in self.longs if r.num_tokens - r.num_computed_tokens <= tokens
        }
        self.long_classes = [class_of(r) for r in self.longs if r.request_id not in self.ending]

    def count_waiting(self) -> None:
        """Add up the lanes; their counts change when gates are asked."""
        self.waiting_mediums = LaneCount.sum_of(self.medium_lanes)
        self.waiting_longs = LaneCount.sum_of(self.long_lanes)


class StepDivision:
    def __init__(
        self, step: Step, prompts: StepPrompts, chunk: LongChunk | None, threshold: int
    ) -> None:
        self._step = step
        self._prompts = prompts
        self._chunk = chunk
        self.decode_tokens = step.decode_tokens
        best = min(prompts.long_classes, default=None)  # of the longs
        # Shorts of a lower class come after the longs, those of a higher class before them.
        higher_class = [r for r in prompts.shorts if best is not None and step.class_of(r) < best]
        same_class = [r for r in prompts.shorts if best is None or step.class_of(r) == best]
        self._num_shorts = len(higher_class) + len(same_class)
        self._tokens_of_same_class = _tokens_left(same_class)
        self._tokens_of_higher_class = _tokens_left(higher_class)
        slots = 0 if prompts.kv_blocked else max(step.free_slots, 0)
        entering = min(prompts.waiting_shorts.num_admissible, slots)
        self._expect(prompts.waiting_shorts, entering, threshold)
        mediums = prompts.waiting_mediums
        used = step.decode_tokens + self._tokens_of_same_class + self._tokens_of_higher_class
        room = max(step.budget - used, 0)
        fitting = -(-room * mediums.requests // max(mediums.tokens, 1))
        self._expect(mediums, min(mediums.num_admissible, fitting, slots - entering), threshold)
        # Longs without their chunk.
        self._num_longs_due = len(prompts.long_classes) + prompts.num_entering
        self._parts = max(min(self._num_shorts + self._num_longs_due, MAX_PARTS), 1)
        self._last_was_long = False
        # The classes of longs without their chunk; None without classes of service.
        self._classes_due = prompts.long_classes.copy() if step.class_of is not one_class else None
        self._tokens_of_shorts: dict[float, int] = {}  # granted, by class
        self.reserve()

    def _expect(self, waiting: LaneCount, entering: int, threshold: int) -> None:
        self._num_shorts += entering
        # Tokens of waiting requests include cached ones.
        expected = waiting.tokens * entering // max(waiting.requests, 1)
        self._tokens_of_same_class += min(expected, entering * threshold)

    def reserve(self) -> None:
        """Divide the step's budget, which a later policy may have reduced."""
        step, prompts, chunk = self._step, self._prompts, self._chunk
        self.budget = step.budget
        room = max(step.budget - step.decode_tokens, 0)
        # With one token left, the engine tries a barred request again.
        barred = prompts.waiting_shorts.num_barred or prompts.waiting_mediums.num_barred
        for_barred = int(barred > 0 and step.free_slots > 0)
        for_higher_class = min(self._tokens_of_higher_class, room)
        max_for_shorts = room - int((room - for_higher_class) * MIN_SHARE_OF_LONGS)
        for_same_class = max(self._tokens_of_same_class, for_barred)
        for_shorts = min(for_higher_class + for_same_class, max_for_shorts)
        for_longs = room - for_shorts
        if chunk is not None:
            max_for_longs = max(chunk.tokens - for_shorts, chunk.min_tokens, self._num_longs_due)
            for_longs = min(for_longs, max_for_longs)
        # Tokens for all longs together.
        self.long_left = max(for_longs, min(room - for_higher_class, 1))
        has_place = prompts.free_places > prompts.num_entering
        self._for_barred_long = int(prompts.waiting_longs.num_barred > 0 and has_place)
        # Shorts run before longs, so the longs' tokens must be reserved.
        self._reserved_for_longs = min(_tokens_left(prompts.longs), self.long_left)
        self._short_left = max(room - self._reserved_for_longs, 1)

    def grant(self, request: RequestView, computed: int, tokens: int, *, as_long: bool) -> int:
        """Return the tokens that a prefill gets; longs also share one limit."""
        self._last_was_long = as_long
        left = request.num_tokens - computed
        granted = min(tokens, left)
        if self._classes_due is not None:
            granted = min(granted, self._part_of_class(self._classes_due, request, left, tokens))
        if not as_long:
            granted = min(granted, self._short_left)
            self._count_short(request, granted)
            return granted
        share = max(self.long_left - self._for_barred_long, min(self.long_left, 1))
        ends = request.request_id in self._prompts.ending
        granted = min(granted, share if ends else math.ceil(share / max(self._num_longs_due, 1)))
        self.long_left -= granted
        self._num_longs_due -= not ends
        return granted

    def take_back(self, request: RequestView, tokens: int) -> None:
        """Return tokens of the last chunk to prompts of the same length."""
        if self._last_was_long:
            self.long_left += tokens
        else:
            self._count_short(request, -tokens)

    def _count_short(self, request: RequestView, tokens: int) -> None:
        self._short_left -= tokens
        if self._classes_due is not None:
            its_class = self._step.class_of(request)
            granted = self._tokens_of_shorts.get(its_class, 0)
            self._tokens_of_shorts[its_class] = granted + tokens

    def _part_of_class(
        self, classes_due: list[float], request: RequestView, left: int, tokens: int
    ) -> int:
        """Divide the tokens of a class of service that has only a share of the step.

        An earlier policy gave the class a share if `tokens` is less than the prompt could use.
        A short prompt that `tokens` completes leaves nothing to longs.
        """
        its_class = self._step.class_of(request)
        if self._last_was_long and its_class in classes_due:
            classes_due.remove(its_class)
        if tokens >= min(left, self._step.budget - self.decode_tokens):
            return tokens
        part = (tokens + self._tokens_of_shorts.get(its_class, 0)) // self._parts
        if self._last_was_long:
            return max(part, 1) if self._num_shorts else tokens
        longs = min(classes_due.count(its_class), self._parts - 1)
        return max(tokens - min(longs * part, self._reserved_for_longs), 0)


def _tokens_left(requests: Sequence[RequestView]) -> int:
    return sum(request.num_tokens - request.num_computed_tokens for request in requests)

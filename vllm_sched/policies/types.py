"""What a policy may see and say: the whole protocol between policies and whoever steps them.

The engine (and later the simulator) asks, in this order:

1. `arrived` once when a request comes, `lane` when it starts to wait, and again for a lane's head
   when it may have changed;
2. `begin_step` once a step, with everything countable about that step; then `budget` and
   `pauses_decodes`, once each;
3. `gate` and `urgency` whenever the head of a lane could be admitted, `admitted` once it was; of a
   head that an earlier policy holds the later ones hear nothing; `stays` of one that nobody holds;
4. `chunk` for each prefill, as the last word on how many tokens it gets, and `taken_back` at once
   where a later policy leaves it less, or where the engine ends it at a block boundary;
5. `observe` once the step's result is back, `departed` once a request is over.

What several policies say is combined: the least budget, the least chunk, the strictest gate; one
that pauses the decodes is enough, and the bound on that is on the time that they stand still in
all (`Step.paused_s`), whoever's doing it is. `gauges`, `counters` and `held_reason` are for whoever
watches.

Nothing here does I/O, reads a clock or knows vLLM; time arrives as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import ClassVar, Final, Protocol

from pydantic import BaseModel, ConfigDict

from vllm_sched.cost.step_time import Chunk, StepShape
from vllm_sched.policies.kv_cache import KvCache


class RequestView(Protocol):
    """The part of a request that policies read; vLLM's own Request has this shape."""

    request_id: str
    arrival_time: float
    priority: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_preemptions: int

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far: what must be computed before the next token."""


class Gate(IntEnum):
    """May the head of a lane be admitted now? Lanes' answers combine by their maximum."""

    OPEN = 0
    LAST = 1  # yes, but only once no other lane has anybody to admit
    CLOSED = 2


@dataclass(slots=True)
class LaneCount:
    """Who waits in a lane."""

    requests: int = 0
    tokens: int = 0  # as each had when it began to wait
    # Seconds that the front request has waited when the step begins. A request whose LoRA adapter
    # has no slot is not a front.
    waited: float = 0.0
    held: int = 0  # of them, by other policies, as gates were found in the step before
    barred: int = 0  # of the rest, by the engine: for want of a LoRA slot, or a grammar

    @property
    def able(self) -> int:
        """Return the number of requests that the engine could begin, held ones included."""
        # Within a step held and barred requests may have left already.
        return max(self.requests - self.barred, 0)

    @property
    def asking(self) -> int:
        """Return the number of requests that would enter if this policy lets them."""
        return max(self.able - self.held, 0)


def nobody() -> None:
    """Say that nobody could enter."""


# The class of service of those who wait for no lesser one's sake.
FIRST_CLASS: Final = 0.0


def one_class(_: RequestView) -> float:
    """Say that all are of one class."""
    return FIRST_CLASS


@dataclass(slots=True)
class Step:
    """One scheduling step, seen before its first decision. It lives for that step only."""

    index: int
    now: float
    # Tokens the engine may schedule; by the time of `chunk`, what the policies left of them.
    budget: int
    # Tokens of those that running decodes need, drafts included; by then none if they are paused.
    decodes: int
    prefills: Sequence[RequestView]  # running requests whose prompt is not yet done
    free_slots: int = 0  # how many more may run
    refused: str | None = None  # the request offered earlier that found no room
    running: int = 0  # in prefill or past it
    decoding: Sequence[RequestView] = ()  # running requests past prefill
    context_tokens: int = 0  # of those that decode
    waiting: int = 0  # not holding KV blocks
    holding_kv: int = 0  # waiting too, but with KV blocks of their own; no gate holds them
    kv_free: float = 1.0  # share of the KV cache
    departed: int = 0  # requests that ended since the last step and left room in the KV cache
    # Since decodes were paused, by whichever policy, and in how many steps; nothing if they ran.
    paused_s: float = 0.0
    paused_steps: int = 0
    # What turns a request's arrival_time, which is by the wall clock, into a time such as `now`.
    clock_offset: float = 0.0
    # Who would be admitted now, room in the KV cache aside; None where nobody may. Ask it in
    # `budget`, `pauses_decodes` or `chunk`, when all policies have seen the step; it asks gates.
    may_enter: Callable[[], RequestView | None] = nobody
    # Counts anew who is `held` in each lane, unless it is known from the step before. When to: as
    # above.
    ask_gates: Callable[[], object] = nobody
    # Which class of service a request is of, FIRST_CLASS lowest, where a policy has classes.
    class_of: Callable[[RequestView], float] = one_class


@dataclass(frozen=True)
class StepResult:
    """What a finished step did, and how long it took."""

    # Those who decoded had to wait for so long, whatever the engine did between two steps; of a
    # step without them the engine's own time.
    seconds: float
    chunks: Sequence[Chunk]  # of prompts; empty in a step that only decoded
    decode_tokens: int
    decodes: int = 0  # how many decoded
    context_tokens: int = 0  # tokens before the new one, of all that decoded
    index: int = 0  # its step's
    # What other ranks computed in the same step, where it lasts as long as the slowest rank's.
    others: Sequence[StepShape] = ()

    @cached_property
    def shape(self) -> StepShape:
        """What it computed, as the model of a step's time has it."""
        return StepShape.of(self.chunks, self.decodes, self.context_tokens)


class Settings(BaseModel):
    """A policy's settings: frozen, and strict about types and about keys it does not know."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(slots=True, frozen=True)
class EngineFacts:
    """What a policy may know of the engine it is built for."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache: KvCache | None = None  # None until it is allocated
    cuts_prompts: bool = True  # with chunked prefill
    pipeline_stages: int = 1  # a request decodes once in so many steps

    def kv_share(self, request: RequestView) -> float:
        """Return the share of the KV cache that a request takes; 0 if its size is unknown."""
        if (cache := self.kv_cache) is None or not cache.blocks:
            return 0.0
        return cache.blocks_of(request.num_tokens) / cache.blocks


class Policy:
    """Ask nothing, change nothing: the base every policy overrides in part."""

    name: ClassVar[str]
    settings_type: ClassVar[type[Settings]] = Settings
    # Why its gates may be closed: the metrics show each as 0 from the first step on.
    held_reasons: ClassVar[tuple[str, ...]] = ()
    # Whether running requests are arranged before each step: decodes first, then by `rank`.
    arranges: bool = False
    # Whether prefills stand before decodes, so that they get all they can use of the budget.
    prefills_lead: bool = False
    # Whether it has classes of service: limits of later policies then hold within each.
    classes: bool = False
    # Counted up when one who decodes is of another class than it was before, so that all of them
    # need not be asked about in each step; None = ask.
    reclassed: int | None = None
    # Whether its `fit` learns what every step takes: then whoever watches need not learn the same.
    learns: bool = False

    def __init__(self, facts: EngineFacts, settings: Settings) -> None:
        self.facts = facts
        self.settings = settings

    def resolved(self) -> dict[str, object]:
        """Return the settings as they came out, for the line logged at start."""
        return self.settings.model_dump()

    def arrived(self, request: RequestView, wishes: Mapping[str, object]) -> None:
        """Hear of a new request, and what its client wrote under `vllm_xargs`."""

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        """Name the lane the request waits in; `cached()` looks up its cached prefix, at a cost."""
        return ""

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        """See the step before its first decision, and who waits in this policy's lanes."""

    def budget(self, step: Step) -> int:
        """Say how many tokens the step may compute; decodes get theirs in any case."""
        return step.budget

    def pauses_decodes(self, step: Step) -> bool:
        """Say whether running decodes sit this step out."""
        return False

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """May the head of this lane enter, having waited so many seconds?"""
        return Gate.OPEN

    def stays(self, lane: str, head: RequestView) -> bool:
        """Whether the head is of this lane still; for what is too dear to look at while it waits.

        If not it enters no more in this step, and its lane is asked for anew in the next.
        """
        return True

    def urgency(self, lane: str, head: RequestView, waited: float) -> float:
        """Place this lane's head before those of higher number; among equals arrival decides."""
        return 0.0

    def admitted(self, request: RequestView) -> None:
        """Hear that a waiting request was admitted in this step."""

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Say how many of `tokens` this prefill gets now, given what is computed already."""
        return tokens

    def taken_back(self, request: RequestView, tokens: int) -> None:
        """Note that this prefill gets so many tokens less than `chunk` has just returned.

        Later policies leave it less, or the engine ends the chunk at a block boundary. Other
        prefills may have these tokens.
        """

    def rank(self, request: RequestView) -> float:
        """Place a running prefill behind those of lower rank; the last is preempted first."""
        return 0.0

    def service_class(self, request: RequestView) -> float:
        """Say which class it is of, FIRST_CLASS lowest; asked where there are `classes`."""
        return FIRST_CLASS

    def observe(self, result: StepResult) -> None:
        """Hear how a past step went."""

    def departed(self, request: RequestView, now: float) -> None:
        """Hear that a request is over, aborted ones included; preempted ones come back."""

    def gauges(self) -> Mapping[str, float]:
        """Return what is worth seeing now, by name."""
        return {}

    def counters(self) -> Mapping[str, float]:
        """Return what only ever grows, by name."""
        return {}

    def held_reason(self, lane: str) -> str:
        """Say why this lane's gate is closed, in one of `held_reasons`."""
        return "held"

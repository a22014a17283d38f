"""The protocol between scheduling policies and the engine.

The engine calls the methods of a policy in this order:

1. `arrived` for a new request; `lane` when the request starts to wait, and again if the head of a
   lane may belong to another lane.
2. `begin_step` once per step, then `budget` and `pauses_decodes` at most once each.
3. `gate`, `keeps_lane` and `urgency` for the head of a lane; `admitted` after the head's admission.
4. `chunk` for each prefill; `taken_back` immediately afterwards if the prefill gets fewer tokens.
5. `observe` when the result of a step is back; `departed` when a request has ended.

The smallest budget, the smallest chunk and the strictest gate of all policies apply. One policy is
enough to pause decodes. If a policy holds a head, the engine does not ask later policies about it;
`keeps_lane` is asked only if no policy holds the head.

Policies do no I/O, read no clock (time is an argument) and do not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import ClassVar, Final, Protocol

from pydantic import BaseModel, ConfigDict

from vllm_sched.cost.step_time import Chunk, StepShape
from vllm_sched.policies.fluid_effects import FluidEffects
from vllm_sched.policies.kv_cache import KvCache


class RequestView(Protocol):
    """The attributes of a request that policies read, named as in vLLM's Request."""

    request_id: str
    arrival_time: float
    priority: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_preemptions: int

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""


class Gate(IntEnum):
    """Whether the head of a lane may be admitted; the maximum of all policies applies."""

    OPEN = 0
    LAST = 1  # only when no other lane has a head to admit
    CLOSED = 2


@dataclass(slots=True)
class LaneCount:
    """The requests that wait in one lane."""

    requests: int = 0
    tokens: int = 0  # counted when each request began to wait
    # Seconds since the head began to wait. A request without a LoRA slot is not a head.
    waited: float = 0.0
    num_held: int = 0  # requests that other policies held in the previous step
    num_barred: int = 0  # other requests that lack a LoRA slot or a compiled grammar

    @classmethod
    def sum_of(cls, lanes: Sequence[LaneCount]) -> LaneCount:
        return cls(
            sum(count.requests for count in lanes),
            sum(count.tokens for count in lanes),
            max((count.waited for count in lanes), default=0.0),
            sum(count.num_held for count in lanes),
            sum(count.num_barred for count in lanes),
        )

    @property
    def num_startable(self) -> int:
        """Return the requests that the engine could start, including held ones."""
        # Held and barred requests may have left since they were counted.
        return max(self.requests - self.num_barred, 0)

    @property
    def num_admissible(self) -> int:
        """Return the requests that enter if this policy admits them."""
        return max(self.num_startable - self.num_held, 0)


NO_REQUESTS: Final = LaneCount()


def no_request() -> None:
    """Return None: no request can enter."""


def no_tokens(_: RequestView) -> int:
    return 0


DEFAULT_BLOCK_TOKENS: Final = 16  # vLLM's

# The best class of service; greater values are worse.
FIRST_CLASS: Final = 0.0


def one_class(_: RequestView) -> float:
    return FIRST_CLASS


@dataclass(slots=True)
class Step:
    """The engine's state before a scheduling step. Each step has its own object."""

    index: int
    now: float
    # Tokens that the step may compute. When `chunk` is called, the policies' limits are applied.
    budget: int
    # Tokens for running decodes, including drafts. Zero once the decodes are paused.
    decode_tokens: int
    prefills: Sequence[RequestView]  # running requests with an incomplete prompt
    free_slots: int = 0
    kv_blocked: str | None = None  # id of the request that lacked KV blocks in the last step
    num_running: int = 0  # prefills and decodes
    decoding: Sequence[RequestView] = ()  # running requests with a complete prompt
    context_tokens: int = 0  # computed tokens of all decoding requests
    num_waiting: int = 0  # waiting requests without KV blocks
    num_holding_kv: int = 0  # waiting requests with KV blocks; gates do not apply to them
    kv_free: float = 1.0  # free share of the KV cache
    num_departed: int = 0  # requests that ended since the last step and released KV blocks
    # Duration of the current pause of decodes, by any policy; zero if decodes ran.
    paused_s: float = 0.0
    paused_steps: int = 0
    clock_offset: float = 0.0  # `now` minus wall-clock time; arrival_time is wall-clock time
    # Returns the next request to admit, ignoring KV blocks; None if none may enter. It asks gates,
    # so call it only after every policy's `begin_step`.
    next_to_enter: Callable[[], RequestView | None] = no_request
    # Updates `LaneCount.num_held`, which otherwise dates from the previous step. Same restriction.
    recount_held: Callable[[], object] = no_request
    class_of: Callable[[RequestView], float] = one_class  # class of service, FIRST_CLASS is best
    # Returns the requests that load KV from a tier; they enter without a gate.
    loading_requests: Callable[[], Sequence[RequestView]] = tuple
    # Returns these with all KV here, so they enter in this step.
    loaded_requests: Callable[[], Sequence[RequestView]] = tuple
    # Looks up the tokens of a waiting request that need no computation.
    cached_tokens_of: Callable[[RequestView], int] = no_tokens

    def newcomer(self) -> RequestView | None:
        """Return the request of `next_to_enter`, unless it lacked KV blocks in the last step."""
        head = self.next_to_enter()
        return None if head is None or head.request_id == self.kv_blocked else head

    def tokens_left(self, request: RequestView) -> int:
        """Return the tokens to compute of a prompt in prefill or of a newcomer."""
        return request.num_tokens - (request.num_computed_tokens or self.cached_tokens_of(request))


BEFORE_FIRST_STEP: Final = Step(index=0, now=0.0, budget=0, decode_tokens=0, prefills=())


@dataclass(frozen=True)
class StepResult:
    """The work and the duration of a finished step."""

    # Time between two tokens of a decode. Without decodes, the engine's own time.
    seconds: float
    chunks: Sequence[Chunk]  # prefill chunks
    decode_tokens: int
    decodes: int = 0  # requests that decoded
    context_tokens: int = 0  # computed tokens of these requests before the step
    index: int = 0  # `Step.index`
    others: Sequence[StepShape] = ()  # work of the data-parallel ranks in the same step

    @cached_property
    def shape(self) -> StepShape:
        return StepShape.from_chunks(self.chunks, self.decodes, self.context_tokens)


FORMER: Final = "former: "


class Settings(BaseModel):
    """A policy's settings. Unknown keys and wrong types are errors.

    The text below a setting is its description in error messages. A setting with a text that begins
    with `former:` is accepted with a warning, the rest of the text.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    former: ClassVar[dict[str, str]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        cls.former = {}
        for name, field in cls.model_fields.items():
            field.description = text = " ".join((field.description or "").split())
            if text.startswith(FORMER):
                cls.former[name] = text.removeprefix(FORMER)

    @property
    def off(self) -> bool:
        """Return whether the policy is left out."""
        return False


@dataclass(slots=True, frozen=True)
class EngineFacts:
    """The parts of the engine's configuration that policies need."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache: KvCache | None = None  # None before the cache is allocated
    chunked_prefill: bool = True  # prompts may be computed in parts
    pipeline_stages: int = 1  # a request decodes once in this many steps
    orders_by_priority: bool = False  # --scheduling-policy priority
    decodes_pause: bool = False  # an earlier policy pauses decodes during prefill

    @property
    def block_tokens(self) -> int:
        """Return the tokens of the smallest KV block."""
        groups = self.kv_cache.groups if self.kv_cache is not None else ()
        return min((group.block_tokens for group in groups), default=DEFAULT_BLOCK_TOKENS)

    def kv_share(self, request: RequestView) -> float:
        """Return the share of the KV cache that the request needs; 0 if the size is unknown."""
        if (cache := self.kv_cache) is None or not cache.blocks:
            return 0.0
        return cache.blocks_for(request.num_tokens) / cache.blocks


class Policy:
    """Base class of policies. Its methods leave vLLM's behavior unchanged."""

    name: ClassVar[str]
    settings_type: ClassVar[type[Settings]] = Settings
    held_reasons: ClassVar[tuple[str, ...]] = ()  # all results of `held_reason`
    sorts_running: bool = False  # running requests are sorted each step: decodes, then by `rank`
    decodes_pause: bool = False  # decodes pause during prefill
    has_classes: bool = False  # `service_class` is defined; later policies' limits apply per class
    # Incremented when a decoding request changes class. None disables the engine's class cache.
    class_changes: int | None = None
    learns: bool = False  # `fit` observes every step, so telemetry needs no model of its own

    def __init__(self, facts: EngineFacts, settings: Settings) -> None:
        self.facts = facts
        self.settings = settings

    def effective_settings(self) -> dict[str, object]:
        """Return the settings for the log, without former ones that were not given."""
        settings = self.settings
        return settings.model_dump(exclude=set(settings.former.keys() - settings.model_fields_set))

    def fluid_effects(self) -> FluidEffects | None:
        """Return the effects on the simulator's fluid engine, which refuses a policy with None."""
        return None

    def arrived(self, request: RequestView, extra_args: Mapping[str, object]) -> None:
        """Note a new request and its client's `vllm_xargs`."""

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        """Return the lane for a waiting request; `cached()` looks up its cached tokens (slow)."""
        return ""

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        """Prepare for a step; `lanes` counts the requests in this policy's lanes."""

    def budget(self, step: Step) -> int:
        """Return the token limit of the step; running decodes are never limited."""
        return step.budget

    def pauses_decodes(self, step: Step) -> bool:
        """Return True to leave running decodes out of this step."""
        return False

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Return whether the head of the lane may enter; `waited` is in seconds."""
        return Gate.OPEN

    def keeps_lane(self, lane: str, head: RequestView) -> bool:
        """Return False if the head belongs to another lane; for checks too slow to repeat.

        The head then does not enter in this step. `lane` is asked again in the next step.
        """
        return True

    def urgency(self, lane: str, head: RequestView, waited: float) -> float:
        """Return the sort key among heads, lowest first; earlier arrival breaks ties."""
        return 0.0

    def deadline(self, request: RequestView, since: float) -> float:
        """Return when a request that waits since then should enter; the least of a lane goes first.

        Asked again for a head that is not admitted by then. Earlier arrival breaks ties.
        """
        return since

    def admitted(self, request: RequestView) -> None:
        """Note an admission in this step."""

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Return how many of `tokens` the prefill gets, after `computed` tokens of its prompt."""
        return tokens

    def taken_back(self, request: RequestView, tokens: int) -> None:
        """Reduce the last `chunk` by `tokens`, which other prefills may use.

        A later policy granted less, or the engine ends the chunk at a block boundary.
        """

    def rank(self, request: RequestView) -> float:
        """Return the sort key among running prefills, lowest first; the last is preempted first."""
        return 0.0

    def service_class(self, request: RequestView) -> float:
        """Return the request's class of service; called only if `has_classes`."""
        return FIRST_CLASS

    def observe(self, result: StepResult) -> None:
        """Learn from a finished step."""

    def departed(self, request: RequestView, now: float) -> None:
        """Note a finished or aborted request. Preempted requests return."""

    def gauges(self) -> Mapping[str, float]:
        """Return the current values for the metrics, by name."""
        return {}

    def counters(self) -> Mapping[str, float]:
        """Return values that only increase, by name."""
        return {}

    def held_reason(self, lane: str) -> str:
        """Return why the gate of the lane is closed, one of `held_reasons`."""
        return "held"

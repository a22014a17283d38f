"""Prompts in prefill take turns: A1 B1 C1 A2 ..., so that no prompt has prefill to itself.

Idea: the next prompts of the round get a chunk and go to the end of the round. A newcomer has its
turn before prompts that had a chunk since it arrived. A turn is a whole step, or at least `chunk`
tokens. `order: shortest` serves the prompt with the fewest uncached tokens left instead. After
`max_wait_s` without a chunk a prompt has a turn. With classes of service, this applies per class.
Source: round robin, and shortest remaining time first.
Cost per step: O(running prefills).
How it fails: prompts that share the prefill all finish late, and hold KV blocks for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, Literal

from pydantic import Field

from vllm_sched.policies.fluid_effects import FluidEffects
from vllm_sched.policies.prefix_lookups import LOOK_AGAIN_S
from vllm_sched.policies.types import (
    EngineFacts,
    Gate,
    LaneCount,
    Policy,
    RequestView,
    Settings,
    Step,
)

# Subtracted from the rank of overdue prompts.
OVERDUE_ADVANCE: Final = 1 << 60
# Part of a step; running prompts follow its newcomers.
AFTER_NEWCOMERS: Final = 0.5


class RotationSettings(Settings):
    chunk: int = Field(
        0,
        ge=0,
        description="minimum tokens of a turn; 0 = the whole step; set it to let several prompts"
        " share a step",
    )
    order: Literal["rotate", "shortest"] = Field(
        "rotate",
        description="rotate = round robin; shortest = fewest tokens left first; shortest lowers the"
        " mean, and rotate treats prompts alike",
    )
    max_wait_s: float = Field(
        10.0,
        gt=0,
        description="maximum time that a prompt is held or has no chunk; lower it if long prompts"
        " starve",
    )


class Rotation(Policy):
    name: ClassVar[str] = "rotation"
    settings_type: ClassVar[type[Settings]] = RotationSettings
    held_reasons = ("kv_of_prefills",)
    settings: RotationSettings
    arranges = True

    def __init__(self, facts: EngineFacts, settings: RotationSettings) -> None:
        super().__init__(facts, settings)
        self._computed: dict[str, int] = {}  # tokens of each prefill when the step began
        self._last: dict[str, float] = {}  # end of each prefill's last chunk
        self._order: dict[str, float] = {}  # index of that step, plus AFTER_NEWCOMERS
        self._releases = 0
        self._let_in: set[str] = set()  # overdue requests that wait for KV blocks
        self._shortest = settings.order == "shortest"
        # Time of the next look-up, and uncached tokens.
        self._uncached: dict[str, tuple[float, int]] = {}

        # Of the current step.
        self._step = Step(index=0, now=0.0, budget=0, decodes=0, prefills=())
        self._head_since = 0.0  # when the oldest front began to wait
        # KV blocks that prefills and newcomers still need, by class.
        self._needed: dict[float, int] = {}
        self._coming = 0  # waiting requests that no other policy holds
        self._slot = facts.max_num_batched_tokens  # tokens of a turn
        self._left: int | None = None  # tokens left for running prefills; None before `_plan`
        self._kept_for: dict[str, int] = {}  # tokens reserved for each overdue prefill
        self._kept = 0  # their sum
        self._released: set[str] = set()  # overdue prefills that got a turn

    def fluid_effects(self) -> FluidEffects:
        return FluidEffects(ignored=True)

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        self._order = {r.request_id: self._last_turn(r) for r in step.prefills}
        served = {name for name, turn in self._order.items() if turn >= self._step.index}
        # Later policies may have cut the chunk of prompts still in prefill to nothing.
        done = self._released - self._order.keys()
        self._releases += len(done) + len(self._released & served)
        self._released.clear()
        self._last = {
            name: step.now if name in served else self._last[name] for name in self._order
        }
        self._computed = {r.request_id: r.num_computed_tokens for r in step.prefills}
        self._step = step
        self._head_since = step.now - max((lane.waited for lane in lanes.values()), default=0.0)
        self._needed = {}
        for request in step.prefills:
            self._will_take(request, request.num_computed_tokens)
        self._coming = sum([lane.asking for lane in lanes.values()])
        self._left = None

    def _will_take(self, request: RequestView, held: int = 0) -> None:
        if (cache := self.facts.kv_cache) is not None:
            own = self._step.class_of(request)
            blocks = cache.blocks_of(request.num_tokens) - (cache.blocks_of(held) if held else 0)
            self._needed[own] = self._needed.get(own, 0) + blocks

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        """Return a lane per power of two of uncached tokens, for `order: shortest`."""
        if not self._shortest:
            return ""
        name, now = request.request_id, self._step.now
        found = self._uncached.get(name)
        if found is None or now > found[0]:
            known = cached()
            found = now + LOOK_AGAIN_S * known, request.num_tokens - known
            self._uncached[name] = found
        return f"below_{1 << found[1].bit_length()}"

    def _tokens_left(self, waiting: RequestView) -> int:
        found = self._uncached.get(waiting.request_id)
        return waiting.num_tokens if found is None else found[1]

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Hold a prompt if prefills need its KV blocks, to avoid preemptions."""
        if (cache := self.facts.kv_cache) is None:
            return Gate.OPEN
        own = self._step.class_of(head)
        needed = sum([blocks for each, blocks in self._needed.items() if each <= own])
        fits = needed + cache.blocks_of(head.num_tokens) <= self._step.kv_free * cache.blocks
        if fits or not needed:
            return Gate.OPEN
        if waited < self.settings.max_wait_s:
            return Gate.CLOSED
        # No other request enters before this one, so blocks become free.
        self._let_in.add(head.request_id)
        return Gate.OPEN

    def urgency(self, lane: str, head: RequestView, waited: float) -> float:
        """Return the tokens left, for `order: shortest`."""
        if not self._shortest:
            return 0.0
        return -1.0 if waited >= self.settings.max_wait_s else float(self._tokens_left(head))

    def admitted(self, request: RequestView) -> None:
        self._uncached.pop(request.request_id, None)
        self._will_take(request)
        if request.request_id in self._let_in:
            self._let_in.remove(request.request_id)
            self._releases += 1

    def departed(self, request: RequestView, now: float) -> None:
        """Forget a request that left before there was room."""
        self._uncached.pop(request.request_id, None)
        self._let_in.discard(request.request_id)

    def held_reason(self, lane: str) -> str:
        return "kv_of_prefills"

    def rank(self, request: RequestView) -> float:
        """Return the last turn or, for `order: shortest`, the tokens left."""
        name = request.request_id
        if not self._shortest:
            return self._last_turn(request)
        if self._is_overdue(name):
            return self._order[name] - OVERDUE_ADVANCE
        return request.num_tokens - request.num_computed_tokens

    def _is_overdue(self, name: str) -> bool:
        return self._step.now - self._last.get(name, self._step.now) >= self.settings.max_wait_s

    def _last_turn(self, request: RequestView) -> float:
        # A later policy may have cut the chunk to nothing.
        before = self._computed.get(request.request_id)
        if before is None:
            return self._step.index  # newcomers have the first turn
        if request.num_computed_tokens > before:
            return self._step.index + AFTER_NEWCOMERS
        return self._order[request.request_id]

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Return a turn for newcomers, and for prefills while tokens are left."""
        if self._left is None:
            self._left = self._plan()
        name = request.request_id
        granted = min(tokens, self._slot)
        if name in self._last:
            self._kept -= self._kept_for.pop(name, 0)
            granted = min(granted, max(self._left - self._kept, 0))
            self._left -= granted
            if granted and self._is_overdue(name):
                self._released.add(name)
        return granted

    def taken_back(self, request: RequestView, tokens: int) -> None:
        if self._left is not None and request.request_id in self._last:
            self._left += tokens

    def _plan(self) -> int:
        """Set the length of a turn, and return the tokens for running prefills."""
        step, chunk = self._step, self.settings.chunk
        tokens = max(step.budget - step.decodes, 1)
        head = self._entering()
        newcomers = max(min(self._coming, step.free_slots), 1) if head else 0
        turns = max(tokens // chunk, 1) if chunk else 1
        peers = self._of_best_class([head] if head else [])
        serving = min(turns, max(len(peers) + newcomers, 1))
        self._slot = -(-tokens // serving)
        # Other policies may order prefills differently.
        overdue = [r.request_id for r in peers if self._is_overdue(r.request_id)][:serving]
        self._kept_for = dict.fromkeys(overdue, self._slot)
        self._kept = self._slot * len(overdue)
        if head is None:
            return tokens
        turns, head_left = serving - len(overdue), self._tokens_left(head)
        ahead = [r for r in peers if r.request_id not in self._kept_for]
        if self._shortest:
            lefts = [r.num_tokens - r.num_computed_tokens for r in ahead]
            shorter = sum(min(left, self._slot) for left in lefts if left <= head_left)
        else:
            turns -= sum(self._last[r.request_id] < self._head_since for r in ahead)
            shorter = 0
        wanted = min(self._slot, head_left) * min(newcomers, max(turns, 0))
        return tokens - min(wanted, max(tokens - self._kept - shorter, 0))

    def _of_best_class(self, entering: Sequence[RequestView]) -> list[RequestView]:
        class_of, prefills = self._step.class_of, self._step.prefills
        best = min(map(class_of, [*prefills, *entering]), default=0.0)
        return [r for r in prefills if class_of(r) == best]

    def _entering(self) -> RequestView | None:
        step = self._step
        if step.refused is not None or (head := step.may_enter()) is None:
            return None  # no KV blocks
        # A request of a lower class than a prefill has no turn.
        own = step.class_of(head)
        return None if any(step.class_of(r) < own for r in step.prefills) else head

    def gauges(self) -> Mapping[str, float]:
        return {"prompts_in_rotation": float(len(self._last)), "turn_tokens": float(self._slot)}

    def counters(self) -> Mapping[str, float]:
        return {"starvation_releases": float(self._releases)}

"""Chunks rotate over those in prefill: A1 B1 C1 A2 ..., so that no prompt has prefill to itself.

Idea: round robin over prompts, as over processes. Each step the prompts whose turn it is get a
chunk; whoever had one goes to the end of the round. One who waits has its turn like the others: it
comes before those who had a chunk since it arrived, and room for its first chunk is kept in the
step. Without `chunk` a turn is a whole step. With it a step has as many turns as fit, longer ones
if fewer are about, so that no step is left half empty.

`order: shortest` gives the turn to the prompt with the fewest tokens left to compute, waiting
prompts included. Cached tokens do not count. This order makes the mean time to first token
shortest, and the longest prompt waits. In whatever order, after `max_wait_s` without a chunk a
prompt in prefill has a turn kept for it, whatever other policies' order is. No prompt passes one
that has waited as long for the KV blocks that running prefills will take. Beside a policy with
classes of service all of this holds for each class: a turn is of the best class present, others
have what it leaves, and no prompt waits for the KV blocks of a lesser class.

Cost per step: O(running prefills). How it fails: prompts that share the prefill all finish late,
where one after the other the first would have finished early; KV blocks are held for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, Literal

from pydantic import Field

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

# Further ahead than any prompt is long.
BEFORE: Final = 1 << 60
NOT_NEW: Final = 0.5  # of a step


class RotationSettings(Settings):
    """How long a turn is, and whose it is."""

    chunk: int = Field(
        0, ge=0, description="tokens of a turn, more if few are about; 0 = the whole step"
    )
    order: Literal["rotate", "shortest"] = Field(
        "rotate", description="whose turn it is: each in turn, or the one with the fewest left"
    )
    max_wait_s: float = Field(
        10.0, gt=0, description="a prompt that was held or without a chunk so long has its turn"
    )


class Rotation(Policy):
    """See the module's text."""

    name: ClassVar[str] = "rotation"
    settings_type: ClassVar[type[Settings]] = RotationSettings
    held_reasons = ("kv_of_prefills",)
    settings: RotationSettings
    arranges = True

    def __init__(self, facts: EngineFacts, settings: RotationSettings) -> None:
        super().__init__(facts, settings)
        self._computed: dict[str, int] = {}  # tokens of those in prefill, when the step began
        self._last: dict[str, float] = {}  # when the last chunk of each ended
        self._order: dict[str, float] = {}  # the step it was in, and its place in that
        self._releases = 0
        self._let_in: set[str] = set()  # who was held for too long, until there is room for them
        self._shortest = settings.order == "shortest"
        # Tokens of waiting prompts that are not cached, each with the time of the next look-up.
        self._uncached: dict[str, tuple[float, int]] = {}

        # What follows is of the current step alone.
        self._step = Step(index=0, now=0.0, budget=0, decodes=0, prefills=())
        self._head_since = 0.0  # when the one in front began to wait
        # Blocks of KV cache that those in prefill, and admitted now, will take, by class.
        self._needed: dict[float, int] = {}
        self._coming = 0  # who wait, and are held by no other policy
        self._slot = facts.max_num_batched_tokens  # tokens of a turn
        self._left: int | None = None  # tokens for running prefills; None until it is asked for
        self._kept_for: dict[str, int] = {}  # those of overdue prefills
        self._kept = 0
        self._released: set[str] = set()  # who is given a turn for a long wait

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        """Note who had a turn, and forget those who are no longer in prefill."""
        self._order = {r.request_id: self._last_turn(r) for r in step.prefills}
        served = {name for name, turn in self._order.items() if turn >= self._step.index}
        # Its last turn takes one out of prefill; of another a later policy may have left nothing.
        done = self._released - self._order.keys()
        self._releases += len(done) + len(self._released & served)
        self._released.clear()
        # Who had one in the step before has been waiting since now.
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

    # Who waits

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        """Return a lane for each factor of two in uncached tokens if the shortest goes first."""
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
        """Return the tokens that a waiting prompt still has to compute."""
        found = self._uncached.get(waiting.request_id)
        return waiting.num_tokens if found is None else found[1]

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Hold a prompt that those in prefill leave no KV blocks for: they'd preempt each other."""
        if (cache := self.facts.kv_cache) is None:
            return Gate.OPEN
        own = self._step.class_of(head)
        needed = sum([blocks for each, blocks in self._needed.items() if each <= own])
        fits = needed + cache.blocks_of(head.num_tokens) <= self._step.kv_free * cache.blocks
        if fits or not needed:
            return Gate.OPEN
        if waited < self.settings.max_wait_s:
            return Gate.CLOSED
        # The engine stops at one that finds no room, so that the cache empties for it.
        self._let_in.add(head.request_id)
        return Gate.OPEN

    def urgency(self, lane: str, head: RequestView, waited: float) -> float:
        """Put the shortest first if that is the order, and before it a prompt that waited long."""
        if not self._shortest:
            return 0.0
        return -1.0 if waited >= self.settings.max_wait_s else float(self._tokens_left(head))

    def admitted(self, request: RequestView) -> None:
        """Count the KV blocks that it will take."""
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
        """Say what is missing."""
        return "kv_of_prefills"

    # Who gets how much

    def rank(self, request: RequestView) -> float:
        """Order by the last turn, or by what is left."""
        name = request.request_id
        if not self._shortest:
            return self._last_turn(request)
        if self._is_overdue(name):
            return self._order[name] - BEFORE
        return request.num_tokens - request.num_computed_tokens

    def _is_overdue(self, name: str) -> bool:
        return self._step.now - self._last.get(name, self._step.now) >= self.settings.max_wait_s

    def _last_turn(self, request: RequestView) -> float:
        """Say in which step it had a turn last, once the step at hand is over.

        By what was computed: of a turn that is given here a later policy may leave nothing.
        """
        before = self._computed.get(request.request_id)
        if before is None:
            return self._step.index  # newcomers are admitted last, but theirs was the first turn
        if request.num_computed_tokens > before:
            return self._step.index + NOT_NEW
        return self._order[request.request_id]

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Give a turn to running prefills while there are any left, and to each newcomer."""
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
        """Leave it to the next in line; what newcomers leave is for nobody else in this step."""
        if self._left is not None and request.request_id in self._last:
            self._left += tokens

    def _plan(self) -> int:
        """Set the length of a turn; return what of the step is for running prefills."""
        step, chunk = self._step, self.settings.chunk
        tokens = max(step.budget - step.decodes, 1)
        head = self._entering()
        newcomers = max(min(self._coming, step.free_slots), 1) if head else 0
        turns = max(tokens // chunk, 1) if chunk else 1
        like = self._of_best_class([head] if head else [])
        serving = min(turns, max(len(like) + newcomers, 1))
        self._slot = -(-tokens // serving)
        # Whatever other policies' order is: who has gone without for too long has its turn.
        overdue = [r.request_id for r in like if self._is_overdue(r.request_id)][:serving]
        self._kept_for = dict.fromkeys(overdue, self._slot)
        self._kept = self._slot * len(overdue)
        if head is None:
            return tokens
        turns, head_left = serving - len(overdue), self._tokens_left(head)
        ahead = [r for r in like if r.request_id not in self._kept_for]
        if self._shortest:
            lefts = [r.num_tokens - r.num_computed_tokens for r in ahead]
            shorter = sum(min(left, self._slot) for left in lefts if left <= head_left)
        else:
            turns -= sum(self._last[r.request_id] < self._head_since for r in ahead)
            shorter = 0
        wanted = min(self._slot, head_left) * min(newcomers, max(turns, 0))
        return tokens - min(wanted, max(tokens - self._kept - shorter, 0))

    def _of_best_class(self, entering: Sequence[RequestView]) -> list[RequestView]:
        """Return those in prefill whose turn it can be: others may be given nothing."""
        class_of, prefills = self._step.class_of, self._step.prefills
        best = min(map(class_of, [*prefills, *entering]), default=0.0)
        return [r for r in prefills if class_of(r) == best]

    def _entering(self) -> RequestView | None:
        """Return who enters and has its turn; others have what is left over, if anything is."""
        step = self._step
        if step.refused is not None or (head := step.may_enter()) is None:
            return None  # one that found no room can't use a turn
        # Nor need one of a lesser class than somebody in prefill: it may be given nothing.
        own = step.class_of(head)
        return None if any(step.class_of(r) < own for r in step.prefills) else head

    # What it does

    def gauges(self) -> Mapping[str, float]:
        """Show how many share the prefill, and the length of a turn."""
        return {"prompts_in_rotation": float(len(self._last)), "turn_tokens": float(self._slot)}

    def counters(self) -> Mapping[str, float]:
        """Count turns given for a long wait."""
        return {"starvation_releases": float(self._releases)}

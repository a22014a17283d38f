"""Prompts in prefill take turns: A1 B1 C1 A2 ..., so that no prompt has prefill to itself.

Idea: the prompt with the oldest last chunk has the next turn: a whole step, or at least `chunk`
tokens. A newcomer goes before prompts that had a chunk since it arrived. It is held while prefills
need the free KV blocks. With classes of service, this applies per class.
Source: round robin.
Cost per step: O(running prefills).
How it fails: prompts that share the prefill all finish late, and hold KV blocks for longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from vllm_sched.policies.fluid_effects import FluidEffects
from vllm_sched.policies.types import Gate, LaneCount, Policy, RequestView, Settings, Step


class RotationSettings(Settings):
    chunk: int = Field(0, ge=0)
    """least tokens of a turn; 0 = a whole step; set it to let prompts share a step"""
    max_wait_s: float = Field(10.0, gt=0)
    """longest hold, and longest time without a chunk; lower it if prompts starve"""
    order: Literal["rotate", "shortest"] = "rotate"
    """former: leave it out, it has no effect; long_prompt serves short remaining work first"""


class Rotation(Policy):
    name: ClassVar[str] = "rotation"
    settings_type: ClassVar[type[Settings]] = RotationSettings
    held_reasons = ("kv_of_prefills",)
    settings: RotationSettings
    sorts_running = True

    _last_chunk_at: Mapping[str, float] = {}  # end of each prefill's last chunk
    _computed_before: Mapping[str, int] = {}  # tokens of each prefill when the step began
    _step: Step
    _waiting: LaneCount
    _kv_needed: list[tuple[float, float]]  # class, and share of the KV cache that is needed
    _turn_tokens = 0
    _tokens_left: int | None  # tokens left for running prefills; None before `_plan_turns`

    def fluid_effects(self) -> FluidEffects:
        return FluidEffects(ignored=True)

    def rank(self, request: RequestView) -> float:
        """Return the end of the last chunk; that of the last step is not known yet."""
        if (computed_before := self._computed_before.get(request.request_id)) is None:
            return math.nextafter(math.inf, 0)  # newcomers come first
        # Another policy may have cut the chunk to nothing.
        had_chunk = request.num_computed_tokens > computed_before
        return math.inf if had_chunk else self._last_chunk_at[request.request_id]

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        self._last_chunk_at = {r.request_id: min(self.rank(r), step.now) for r in step.prefills}
        self._computed_before = {r.request_id: r.num_computed_tokens for r in step.prefills}
        self._step, self._waiting, self._tokens_left = step, lanes.get("", LaneCount()), None
        self._kv_needed = [
            (step.class_of(r), (1 - r.num_computed_tokens / r.num_tokens) * self.facts.kv_share(r))
            for r in step.prefills
        ]

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Hold a prompt while prefills need the free KV blocks, to avoid preemptions."""
        head_class = self._step.class_of(head)
        needed = sum([share for its_class, share in self._kv_needed if its_class <= head_class])
        fits = not needed or needed + self.facts.kv_share(head) <= self._step.kv_free
        return Gate.OPEN if fits or waited >= self.settings.max_wait_s else Gate.CLOSED

    def held_reason(self, lane: str) -> str:
        return "kv_of_prefills"

    def admitted(self, request: RequestView) -> None:
        self._kv_needed.append((self._step.class_of(request), self.facts.kv_share(request)))

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Return a turn for newcomers, and for prefills while tokens are left."""
        if self._tokens_left is None:
            self._tokens_left = self._plan_turns()
        granted = min(tokens, self._turn_tokens)
        if request.request_id in self._last_chunk_at:
            granted = min(granted, self._tokens_left)
            self._tokens_left -= granted
        return granted

    def taken_back(self, request: RequestView, tokens: int) -> None:
        if self._tokens_left is not None and request.request_id in self._last_chunk_at:
            self._tokens_left += tokens

    def _plan_turns(self) -> int:
        """Set the length of a turn; return the tokens that newcomers leave to prefills."""
        step = self._step
        tokens = max(step.budget - step.decode_tokens, 1)
        head = step.newcomer()
        peers, newcomers = self._best_class(head)
        turns = max(min(tokens // (self.settings.chunk or tokens), len(peers) + newcomers), 1)
        self._turn_tokens = -(-tokens // turns)
        since = step.now - min(self._waiting.waited, self.settings.max_wait_s)
        turns -= sum(self._last_chunk_at[r.request_id] < since for r in peers)  # before newcomers
        newcomer_tokens = min(self._turn_tokens, step.tokens_left(head)) if head else 0
        return max(tokens - newcomer_tokens * max(min(turns, newcomers), 0), 0)

    def _best_class(self, head: RequestView | None) -> tuple[list[RequestView], int]:
        """Return the prefills of the best class of service, and the number of its newcomers."""
        step, heads = self._step, [] if head is None else [head]
        best = min(map(step.class_of, (*step.prefills, *heads)), default=math.inf)
        peers = [r for r in step.prefills if step.class_of(r) == best]
        enters = head is not None and step.class_of(head) == best
        return peers, max(min(self._waiting.num_admissible, step.free_slots), 1) if enters else 0

    def gauges(self) -> Mapping[str, float]:
        prompts, tokens = len(self._last_chunk_at), self._turn_tokens
        return {"prompts_in_rotation": float(prompts), "turn_tokens": float(tokens)}

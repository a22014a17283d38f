"""The KV blocks that long prompts in prefill still need; without them, a long is preempted."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_sched.policies.types import BEFORE_FIRST_STEP, EngineFacts, RequestView, Step


class KvReserve:
    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts
        self._step = BEFORE_FIRST_STEP
        self._needed: list[tuple[float, float]] = []  # class of service, and share of the cache
        self._has_longs = False
        self.holds = self.held_before = False  # in this step, and in the last one

    def begin_step(self, step: Step, longs: Iterable[RequestView]) -> None:
        self._step = step
        self.held_before, self.holds = self.holds, False
        self._has_longs, self._needed = False, []
        for request in longs:
            self.admitted(request, is_long=True)

    def admitted(self, request: RequestView, *, is_long: bool) -> None:
        self._has_longs = self._has_longs or is_long
        left = request.num_tokens - request.num_computed_tokens
        self._needed.append((self._step.class_of(request), self._share_of(request, left)))

    def has_room(self, head: RequestView, tokens_left: int) -> bool:
        """Return whether the head fits next to longs of its class or a better one."""
        if not self._has_longs:
            return True
        head_class = self._step.class_of(head)
        needed = sum([share for its_class, share in self._needed if its_class <= head_class])
        has_room = not needed or needed + self._share_of(head, tokens_left) <= self._step.kv_free
        self.holds = self.holds or not has_room
        return has_room

    def _share_of(self, request: RequestView, tokens_left: int) -> float:
        """Return the share for the tokens left; blocks of cached ones may be in use already."""
        return self._facts.kv_share(request) * tokens_left / request.num_tokens

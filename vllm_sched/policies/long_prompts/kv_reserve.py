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
        self._needed = [
            (step.class_of(r), (1 - r.num_computed_tokens / r.num_tokens) * self._facts.kv_share(r))
            for r in longs
        ]
        self._has_longs = bool(self._needed)

    def admitted(self, request: RequestView, *, is_long: bool) -> None:
        self._has_longs = self._has_longs or is_long
        self._needed.append((self._step.class_of(request), self._facts.kv_share(request)))

    def has_room(self, head: RequestView) -> bool:
        """Return whether the head fits next to longs of its class or a better one."""
        if not self._has_longs:
            return True
        head_class = self._step.class_of(head)
        needed = sum([share for its_class, share in self._needed if its_class <= head_class])
        has_room = not needed or needed + self._facts.kv_share(head) <= self._step.kv_free
        self.holds = self.holds or not has_room
        return has_room

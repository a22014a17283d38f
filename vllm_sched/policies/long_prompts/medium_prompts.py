"""Medium prompts: not long, but a few of them fill a step.

Shorts pass them, but not for scarce slots or KV blocks, which shorts keep until they end.
"""

from __future__ import annotations

from typing import Final

from vllm_sched.policies.long_prompts.lookups import LengthLookups
from vllm_sched.policies.types import RequestView, Step

# The urgency of overdue mediums that shorts pass: before other mediums.
OVERDUE: Final = 1.0


class MediumPrompts:
    def __init__(self, lookups: LengthLookups) -> None:
        self._lookups = lookups
        self._in_prefill: set[str] = set()
        self._free_slots = 1  # at the end of the last step
        self._keep_turn = False  # slots or KV blocks are scarce
        self._without_kv: str | None = None  # the last medium that lacked KV blocks

    def begin_step(self, step: Step) -> None:
        self._in_prefill.intersection_update([request.request_id for request in step.prefills])
        lookups, blocked = self._lookups, step.kv_blocked
        if lookups.was_medium(blocked):
            self._without_kv = blocked
        kv_is_scarce = blocked is not None and not lookups.was_long(blocked)
        self._keep_turn = kv_is_scarce or min(self._free_slots, step.free_slots) <= 0
        self._free_slots = step.free_slots

    def urgency_after_shorts(self, head: RequestView, bits: int, *, overdue: bool) -> float | None:
        """Return the urgency of a medium; None if it keeps its turn."""
        if self._keep_turn or self._lookups.was_medium(self._without_kv):
            return None
        # Shorts and overdue mediums alternate: hundreds may be overdue.
        if head.num_preemptions or (overdue and not self._in_prefill):
            return None
        return OVERDUE if overdue else float(bits)

    def admitted(self, request: RequestView, *, is_medium: bool) -> None:
        self._free_slots -= 1
        if is_medium:
            self._in_prefill.add(request.request_id)

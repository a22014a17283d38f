"""A hold of admissions, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, Self

from vllm_sched.policies.types import Step

# Share of the longest hold during which K is constant. Afterwards K falls to zero.
CONSTANT_K_SHARE: Final = 0.5
End = Literal["departures", "room", "few", "idle", "overdue"]
ENDS: Final[tuple[End, ...]] = ("departures", "room", "few", "idle", "overdue")


@dataclass(slots=True)
class Hold:
    """The state of a hold since it began."""

    since: float
    slots_full: bool  # the hold began because no slot was free
    refused: str | None  # id of the request that lacked KV blocks
    kv_free: float  # free share at that time
    kv_left: float  # kv_free without admissions during the hold
    departed: int
    steps: int = 0

    @classmethod
    def begin(cls, step: Step, *, slots_full: bool) -> Self:
        return cls(step.now, slots_full, step.refused, step.kv_free, step.kv_free, step.departed)

    def begin_step(self, step: Step) -> None:
        self.steps += 1
        self.departed += step.departed

    def fits(self, name: str, kv_share: float) -> bool:
        """Return whether a request of another lane than the refused one fits."""
        return not self.slots_full and name != self.refused and kv_share < self.kv_left

    def end(
        self, step: Step, waiting: int, *, k: int, progress: float, running_full: int
    ) -> End | None:
        """Return why the hold ends, or None; `progress` is its share of the longest hold."""
        wanted = math.ceil(k * min((1 - progress) / (1 - CONSTANT_K_SHARE), 1.0))
        if waiting < wanted:
            return "few"
        if (step.free_slots if self.slots_full else self.departed) >= wanted:
            return "departures"
        if not self.slots_full:
            typical = (1 - self.kv_free) / running_full
            if step.kv_free - self.kv_free >= wanted * typical:
                return "room"
        return None

"""A hold of admissions, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, Self

from vllm_sched.policies.types import Step

# Share of the longest hold during which K is constant. Afterwards K falls to zero.
CONSTANT_K_SHARE: Final = 0.5
HoldEnd = Literal["departures", "room", "few", "idle", "overdue"]
HOLD_ENDS: Final[tuple[HoldEnd, ...]] = ("departures", "room", "few", "idle", "overdue")


@dataclass(slots=True)
class Hold:
    since: float
    max_s: float
    slots_full: bool  # the hold began because no slot was free
    kv_blocked: str | None  # id of the request that lacked KV blocks
    kv_free: float  # free share at that time
    kv_left: float  # kv_free without admissions during the hold
    kv_typical: float  # share of a typical request
    num_departed: int

    @classmethod
    def begin(cls, step: Step, *, slots_full: bool, max_s: float, running_when_full: int) -> Self:
        free = step.kv_free
        return cls(
            since=step.now, max_s=max_s, slots_full=slots_full, kv_blocked=step.kv_blocked,
            kv_free=free, kv_left=free, kv_typical=(1 - free) / running_when_full,
            num_departed=step.num_departed,
        )  # fmt: skip

    def begin_step(self, step: Step) -> None:
        self.num_departed += step.num_departed

    def fits(self, request_id: str, kv_share: float) -> bool:
        """Return whether a request of another lane than the refused one fits."""
        return not self.slots_full and request_id != self.kv_blocked and kv_share < self.kv_left

    def end_reason(self, step: Step, waiting: int, k: int) -> HoldEnd | None:
        """Return why the hold ends in this step; None if it goes on."""
        progress = (step.now - self.since) / self.max_s
        needed = math.ceil(k * min((1 - progress) / (1 - CONSTANT_K_SHARE), 1.0))
        if not step.num_running:
            return "idle"
        if progress >= 1:
            return "overdue"
        if waiting < needed:
            return "few"
        if (step.free_slots if self.slots_full else self.num_departed) >= needed:
            return "departures"
        if not self.slots_full and step.kv_free - self.kv_free >= needed * self.kv_typical:
            return "room"
        return None

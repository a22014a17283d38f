"""Admit a batch and run it to its end before the next batch enters: a baseline.

Idea: a batch forms when no request runs, and admits requests until slots, KV cache or queue are
exhausted. The first step without admission and prefill closes it. Preempted members may return.
Source: request-level batching, as described by Orca (2022).
Cost per step: O(1).
How it fails: by design, slots are idle until the longest output is complete. Under overload every
request reaches `max_wait_s` and joins the running batch, which is continuous batching.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from pydantic import Field

from vllm_sched.policies.fluid_effects import BatchAdmission, FluidEffects
from vllm_sched.policies.types import (
    EngineFacts,
    Gate,
    LaneCount,
    Policy,
    RequestView,
    Settings,
    Step,
)

NEXT, MEMBER = "next", "member"


class StaticBatchingSettings(Settings):
    size: int = Field(0, ge=0)
    """maximum requests in a batch; 0 = max_num_seqs; set it to repeat a measurement"""
    max_wait_s: float = Field(60.0, gt=0)
    """wait after which a request joins the running batch; lower it if responses of a batch
    differ much in length"""


class StaticBatching(Policy):
    name: ClassVar[str] = "static_batching"
    settings_type: ClassVar[type[Settings]] = StaticBatchingSettings
    held_reasons = ("batch_full", "batch_running")
    settings: StaticBatchingSettings

    def __init__(self, facts: EngineFacts, settings: StaticBatchingSettings) -> None:
        super().__init__(facts, settings)
        self.size = settings.size or facts.max_num_seqs
        self._forming = True
        self._num_members = 0  # including departed ones
        self._num_joined = 0  # in this step
        self._overdue: set[str] = set()  # admissible in this step
        self._releases = 0

    def effective_settings(self) -> dict[str, object]:
        return super().effective_settings() | {"size": self.size}

    def fluid_effects(self) -> FluidEffects:
        return FluidEffects(batches=BatchAdmission(self.size, self.settings.max_wait_s))

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        return MEMBER if request.num_preemptions else NEXT

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        if not step.num_running:
            self._forming, self._num_members = True, 0
        elif not (step.prefills or self._num_joined) or step.kv_blocked is not None:
            self._forming = False
        self._num_joined = 0
        self._overdue.clear()

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        if lane == MEMBER or (self._forming and self._num_members < self.size):
            return Gate.OPEN
        if waited < self.settings.max_wait_s:
            return Gate.CLOSED
        self._overdue.add(head.request_id)
        return Gate.OPEN

    def admitted(self, request: RequestView) -> None:
        self._releases += request.request_id in self._overdue
        if not request.num_preemptions:
            self._num_members += 1
            self._num_joined += 1

    def gauges(self) -> Mapping[str, float]:
        return {"batch_members": float(self._num_members), "batch_forming": float(self._forming)}

    def counters(self) -> Mapping[str, float]:
        return {"starvation_releases": float(self._releases)}

    def held_reason(self, lane: str) -> str:
        return "batch_full" if self._forming else "batch_running"

"""A batch is admitted, runs until its last member is done, then the next: the baseline.

Idea: what servers did before continuous batching (Orca, 2022). A batch forms once nobody runs any
more. It takes whoever waits until the slots, the KV cache or the queue are exhausted, over as many
steps as its prompts need: the first step that admits nobody and leaves nobody in prefill closes
it. A member that was preempted comes back at once; requests that hold KV blocks join, as ever.

Cost per step: O(1). How it fails: by design. Slots stand empty while the longest answer is
written, and a request that just missed a batch waits for the whole of it. The one guard is
`max_wait_s`, after which a request joins the batch that runs, `size` or not: where more comes than
batches can serve all are overdue in the end, and this is continuous batching. For a baseline that
stays one, set it beyond what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from pydantic import Field

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
    """How large a batch may be, and how long one may wait for it."""

    size: int = Field(0, ge=0, description="requests in a batch at most; 0 = as many as may run")
    max_wait_s: float = Field(
        60.0, gt=0, description="a request held so long joins the batch that is running"
    )


class StaticBatching(Policy):
    """See the module's text."""

    name: ClassVar[str] = "static_batching"
    settings_type: ClassVar[type[Settings]] = StaticBatchingSettings
    held_reasons = ("batch_full", "batch_running")
    settings: StaticBatchingSettings

    def __init__(self, facts: EngineFacts, settings: StaticBatchingSettings) -> None:
        super().__init__(facts, settings)
        self.size = settings.size or facts.max_num_seqs
        self._forming = True
        self._members = 0  # of the batch that forms or runs, departed ones included
        self._joined = 0  # in this step
        self._overdue: set[str] = set()  # who may enter for a long wait, in this step
        self._releases = 0

    def resolved(self) -> dict[str, object]:
        """Show the size that the engine's slots gave."""
        return super().resolved() | {"size": self.size}

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        """Tell members that were preempted from those who wait for the next batch."""
        return MEMBER if request.num_preemptions else NEXT

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        """Open the next batch once nobody runs; close it once nobody could join."""
        if not step.running:
            self._forming, self._members = True, 0
        elif not (step.prefills or self._joined) or step.refused is not None:
            self._forming = False
        self._joined = 0
        self._overdue.clear()

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:
        """Admit members, and those who wait while a batch forms."""
        if lane == MEMBER or (self._forming and self._members < self.size):
            return Gate.OPEN
        if waited < self.settings.max_wait_s:
            return Gate.CLOSED
        self._overdue.add(head.request_id)
        return Gate.OPEN

    def admitted(self, request: RequestView) -> None:
        """Count a new member."""
        self._releases += request.request_id in self._overdue
        if not request.num_preemptions:
            self._members += 1
            self._joined += 1

    def gauges(self) -> Mapping[str, float]:
        """Show the batch."""
        return {"batch_members": float(self._members), "batch_forming": float(self._forming)}

    def counters(self) -> Mapping[str, float]:
        """Count those let in for their long wait."""
        return {"starvation_releases": float(self._releases)}

    def held_reason(self, lane: str) -> str:
        """Say whether the batch is full or under way."""
        return "batch_full" if self._forming else "batch_running"

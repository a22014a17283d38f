"""The baseline in 35 lines: hold the second long prompt, cap a long chunk, serve longs last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from vllm_sched.engine.scheduler import SyncPolicyScheduler
from vllm_sched.policies import registry
from vllm_sched.policies.types import (
    EngineFacts,
    Gate,
    LaneCount,
    Policy,
    RequestView,
    Settings,
    Step,
)


class HoldAndCap(Policy):
    """A second long prompt is held, and a long chunk is at most 75 % of the budget."""

    name: ClassVar[str] = "hold_and_cap"
    sorts_running = True

    def __init__(self, facts: EngineFacts, settings: Settings) -> None:
        super().__init__(facts, settings)
        budget = facts.max_num_batched_tokens
        self._threshold = max(int(facts.max_model_len * 0.04), budget)
        self._cap = int(budget * 0.75)
        self._longs = 0

    def lane(self, request: RequestView, cached: Callable[[], int]) -> str:
        return "long" if self._is_long(request, cached()) else ""

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:  # noqa: ARG002
        self._longs = sum(self._is_long(r, r.num_computed_tokens) for r in step.prefills)

    def gate(self, lane: str, head: RequestView, waited: float) -> Gate:  # noqa: ARG002
        return Gate.CLOSED if lane and self._longs else Gate.OPEN

    def admitted(self, request: RequestView) -> None:
        self._longs += self._is_long(request, request.num_computed_tokens)

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        return min(tokens, self._cap) if self._is_long(request, computed) else tokens

    def rank(self, request: RequestView) -> float:
        return float(self._is_long(request, request.num_computed_tokens))

    def _is_long(self, request: RequestView, computed: int) -> bool:
        return request.num_tokens - computed > self._threshold


@contextmanager
def registered_baseline() -> Iterator[None]:
    """Add the policy to the registry within a `with` block."""
    registry.POLICIES[HoldAndCap.name] = HoldAndCap
    try:
        yield
    finally:
        del registry.POLICIES[HoldAndCap.name]


class HoldAndCapScheduler(SyncPolicyScheduler):
    """For real workers, which run on processors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Not earlier: the check before the model loads refuses policies that are not registered.
        type(self).default_policies = {HoldAndCap.name: {}}
        with registered_baseline():
            super().__init__(*args, **kwargs)

"""The time of one step for prefill, and what a newcomer reserves of it."""

from __future__ import annotations

import pytest

from tests.policies.closed_loop import FakeRequest
from vllm_sched.cost.step_time import Chunk, StepTime
from vllm_sched.policies.chunks.prefill_seconds import PrefillSeconds
from vllm_sched.policies.types import Step

MODEL = StepTime(decode_fixed_s=0.001, prefill_s=1e-5, pair_s=1e-9, read_s=1e-7)


@pytest.mark.parametrize("cached", [0, 900])
def test_newcomer_reserves_the_time_of_its_remaining_tokens(cached: int) -> None:
    newcomer, other = FakeRequest("new", 1000), FakeRequest("other", 9000)
    step = Step(index=1, now=0.0, budget=2048, decode_tokens=1, prefills=[other])
    step.class_of = lambda request: float(request is other)
    step.cached_tokens_of = lambda _: cached
    prefill = PrefillSeconds(MODEL, 0.02, min_tokens=0, decodes=1, context_tokens=0)
    most = prefill.count_tokens(step, newcomer)
    granted = prefill.grant(step, other, 0, 9000)
    reserved = MODEL.chunk_seconds(Chunk(1000 - cached, cached))
    alone = MODEL.prefill_within(0.02 - reserved, 1, 0, 0)
    assert granted == alone < most

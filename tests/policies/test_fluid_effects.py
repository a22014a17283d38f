"""What each policy declares for the simulator's fluid engine."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_sched.policies import registry
from vllm_sched.policies.fluid_effects import (
    AdmissionHold,
    BatchAdmission,
    FluidEffects,
    LongPromptLimits,
    MixedStepLimit,
)
from vllm_sched.policies.long_prompt import QUIET_S
from vllm_sched.policies.types import EngineFacts

FACTS = EngineFacts(max_model_len=16_384, max_num_batched_tokens=512, max_num_seqs=16)


@pytest.mark.parametrize(
    ("name", "settings", "effects"),
    [
        ("static_batching", {}, FluidEffects(batches=BatchAdmission(16, 60.0))),
        (
            "static_batching",
            {"size": 4, "max_wait_s": 5.0},
            FluidEffects(batches=BatchAdmission(4, 5.0)),
        ),
        ("prefill_first", {"max_pause_s": 2.0}, FluidEffects(longest_pause_s=2.0)),
        ("lanes", {}, FluidEffects(ignored=True)),
        ("rotation", {}, FluidEffects(ignored=True)),
        ("chunk_budget", {"chunk": 128}, FluidEffects(mixed_steps=MixedStepLimit(chunk=128))),
        (
            "chunk_budget",
            {"itl_ms": 105.0, "min_chunk": 64},
            FluidEffects(mixed_steps=MixedStepLimit(step_s=pytest.approx(0.1), min_chunk=64)),
        ),
        (
            "deferred_prefill",
            {"itl_ms": 50.0},
            FluidEffects(hold=AdmissionHold(departures=None, max_s=1.0, itl_s=0.05)),
        ),
        (
            "deferred_prefill",
            {"departures": 4, "max_delay_ms": 700.0},
            FluidEffects(hold=AdmissionHold(departures=4, max_s=0.7, itl_s=None)),
        ),
        (
            "long_prompt",
            {"max_long_partial_prefills": 2, "max_wait_s": 3.0},
            FluidEffects(
                longs=LongPromptLimits(
                    above_tokens=655,  # 4 % of 16,384
                    max_short=512,  # the budget
                    places=2,
                    places_overdue=4,
                    share=None,
                    itl_s=0.1,
                    max_wait_s=3.0,
                    quiet_s=QUIET_S,
                )
            ),
        ),
    ],
)
def test_effects_follow_the_settings(
    name: str, settings: dict[str, Any], effects: FluidEffects
) -> None:
    (policy,) = registry.build({name: settings}, FACTS)
    assert policy.fluid_effects() == effects

"""The policies of a worker in the fluid engine: as they declare themselves, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.making import worker
from vllm_sched.errors import UsageError
from vllm_sched.policies import registry
from vllm_sched.policies.fluid_effects import (
    AdmissionHold,
    BatchAdmission,
    FluidEffects,
    MixedStepLimit,
)
from vllm_sched.policies.types import Policy
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.engines.policy_effects import combined_effects, declared_effects

PLAIN = worker()


class Undeclared(Policy):
    """A policy of another author, which declares nothing."""

    name = "undeclared"


def test_a_policy_that_declares_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.POLICIES, "undeclared", Undeclared)
    with pytest.raises(UsageError, match=r"undeclared of worker w0 .* --engine exact"):
        FluidEngine(replace(PLAIN, policies={"undeclared": {}}))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown policy 'nosuch'"):
        FluidEngine(replace(PLAIN, policies={"nosuch": {}}))


def test_without_policies_nothing_is_changed() -> None:
    assert combined_effects(PLAIN) == FluidEffects()


def test_the_effects_of_all_policies_apply() -> None:
    policies = {"chunk_budget": {"chunk": 64}, "lanes": {}, "static_batching": {}}
    model = replace(PLAIN, policies=policies)
    assert list(declared_effects(model)) == ["static_batching", "lanes", "chunk_budget"]
    assert combined_effects(model) == FluidEffects(
        batches=BatchAdmission(16, 60.0), mixed_steps=MixedStepLimit(chunk=64), ignored=True
    )


def test_pauses_and_holds_apply_together() -> None:
    policies = {"prefill_first": {}, "deferred_prefill": {"departures": 2}}
    assert combined_effects(replace(PLAIN, policies=policies)) == FluidEffects(
        longest_pause_s=5.0, hold=AdmissionHold(2, 1.0, None)
    )

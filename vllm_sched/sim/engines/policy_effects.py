"""The effects of a worker's policies on the fluid engine, as the policies declare them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm_sched.errors import UsageError
from vllm_sched.policies.fluid_effects import FluidEffects
from vllm_sched.policies.registry import build
from vllm_sched.policies.types import EngineFacts
from vllm_sched.sim.types import WorkerModel


def declared_effects(model: WorkerModel) -> dict[str, FluidEffects]:
    """Return the effects of each policy by name; refuse a policy that declares none."""
    facts = EngineFacts(
        max_model_len=model.max_model_len,
        max_num_batched_tokens=model.max_num_batched_tokens,
        max_num_seqs=model.max_num_seqs,
    )
    by_policy = {}
    for policy in build(model.policies, facts):
        effects = policy.fluid_effects()
        if effects is None:
            raise UsageError(
                f"policy {policy.name} of worker {model.name} declares no effects for the fluid "
                "engine; simulate it with --engine exact, or leave it out"
            )
        by_policy[policy.name] = effects
    return by_policy


def combined_effects(model: WorkerModel) -> FluidEffects:
    """Return the effects of all policies; of the same effect, the last policy's value holds."""
    combined: dict[str, Any] = {}
    for effects in declared_effects(model).values():
        values = {field.name: getattr(effects, field.name) for field in fields(effects)}
        combined |= {name: value for name, value in values.items() if value}
    return FluidEffects(**combined)

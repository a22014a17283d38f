"""The hooks that policies override. Hooks of the base class are not called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from vllm_sched.policies.types import Gate, Policy, RequestView, Step, StepResult


def overrides(policies: Sequence[Policy], name: str) -> list[tuple[int, Callable[..., Any]]]:
    """Return a method of each policy that overrides it, with the index of the policy."""
    base = getattr(Policy, name)
    return [
        (number, getattr(policy, name))
        for number, policy in enumerate(policies)
        if getattr(type(policy), name) is not base
    ]


def methods(policies: Sequence[Policy], name: str) -> list[Callable[..., Any]]:
    return [method for _, method in overrides(policies, name)]


@dataclass(slots=True)
class PolicyHooks:
    """The overridden hooks. A number before a hook is the index of its policy."""

    lane: list[tuple[int, Callable[[RequestView, Callable[[], int]], str]]]
    gate: list[tuple[int, Callable[[str, RequestView, float], Gate]]]
    keeps_lane: list[tuple[int, Callable[[str, RequestView], bool]]]
    urgency: list[tuple[int, Callable[[str, RequestView, float], float]]]
    deadline: list[Callable[[RequestView, float], float]]
    budget: list[Callable[[Step], int]]
    pauses_decodes: list[Callable[[Step], bool]]
    chunk: list[Callable[[RequestView, int, int], int]]
    taken_back: list[Callable[[RequestView, int], None]]  # one for each of `chunk`
    rank: list[Callable[[RequestView], float]]
    arrived: list[Callable[[RequestView, Mapping[str, object]], None]]
    admitted: list[Callable[[RequestView], None]]
    departed: list[Callable[[RequestView, float], None]]
    observe: list[Callable[[StepResult], None]]

    @classmethod
    def from_policies(cls, policies: Sequence[Policy]) -> Self:
        return cls(
            lane=overrides(policies, "lane"),
            gate=overrides(policies, "gate"),
            keeps_lane=overrides(policies, "keeps_lane"),
            urgency=overrides(policies, "urgency"),
            deadline=methods(policies, "deadline"),
            budget=methods(policies, "budget"),
            pauses_decodes=methods(policies, "pauses_decodes"),
            chunk=methods(policies, "chunk"),
            taken_back=[policies[n].taken_back for n, _ in overrides(policies, "chunk")],
            rank=methods(policies, "rank"),
            arrived=methods(policies, "arrived"),
            admitted=methods(policies, "admitted"),
            departed=methods(policies, "departed"),
            observe=methods(policies, "observe"),
        )

"""Compute new prompts whole and at once, while decodes wait: a baseline.

Idea: while a prompt is in prefill, or may enter, a step has prefill only.
Source: vLLM V0 before chunked prefill.
Cost per step: O(running) while decodes pause, otherwise O(1).
How it fails: by design, each new prompt is a gap in every stream. Decodes get a step at least every
`max_pause_s` and every `MAX_PAUSED_STEPS` steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from pydantic import Field

from vllm_sched.policies.fluid_effects import FluidEffects
from vllm_sched.policies.types import EngineFacts, LaneCount, Policy, Settings, Step

MAX_PAUSED_STEPS: Final = 1000


class PrefillFirstSettings(Settings):
    max_pause_s: float = Field(5.0, gt=0)
    """maximum time without a step for decodes; lower it if streams time out"""
    pause_decodes: bool = True
    """former: it has no effect, decodes always pause; lower max_pause_s if streams stop for too
    long"""


class PrefillFirst(Policy):
    name: ClassVar[str] = "prefill_first"
    settings_type: ClassVar[type[Settings]] = PrefillFirstSettings
    settings: PrefillFirstSettings
    sorts_running = True
    decodes_pause = True

    def __init__(self, facts: EngineFacts, settings: PrefillFirstSettings) -> None:
        super().__init__(facts, settings)
        self._pausing = False  # decodes pause in this step
        self._paused_steps = 0
        self._releases = 0

    def fluid_effects(self) -> FluidEffects:
        return FluidEffects(longest_pause_s=self.settings.max_pause_s)

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        self._pausing = False

    def pauses_decodes(self, step: Step) -> bool:
        # No pause for a request without KV blocks: only decodes release blocks.
        if not (step.prefills or (step.kv_blocked is None and step.next_to_enter() is not None)):
            return False
        if step.paused_s >= self.settings.max_pause_s or step.paused_steps >= MAX_PAUSED_STEPS:
            self._releases += 1
            return False
        self._paused_steps += 1
        self._pausing = True
        return True

    def gauges(self) -> Mapping[str, float]:
        return {"decodes_paused": float(self._pausing)}

    def counters(self) -> Mapping[str, float]:
        return {
            "paused_steps": float(self._paused_steps),
            "starvation_releases": float(self._releases),
        }

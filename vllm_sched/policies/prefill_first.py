"""Compute new prompts whole and at once, while decodes wait: a baseline.

Idea: while a prompt is in prefill, or may enter, a step has prefill only. With `pause_decodes:
false`, decodes get the tokens that prefills leave.
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
from vllm_sched.policies.types import (
    EngineFacts,
    LaneCount,
    Policy,
    RequestView,
    Settings,
    Step,
)

MAX_PAUSED_STEPS: Final = 1000


class PrefillFirstSettings(Settings):
    pause_decodes: bool = True
    """no decoding while a prompt is in prefill; false = decodes get the rest; set it to false if
    streams must not stop"""
    max_pause_s: float = Field(5.0, gt=0)
    """maximum time without a step for decodes; lower it if streams time out"""


class PrefillFirst(Policy):
    name: ClassVar[str] = "prefill_first"
    settings_type: ClassVar[type[Settings]] = PrefillFirstSettings
    settings: PrefillFirstSettings
    arranges = True

    def __init__(self, facts: EngineFacts, settings: PrefillFirstSettings) -> None:
        super().__init__(facts, settings)
        self.decodes_pause = settings.pause_decodes
        self.prefills_lead = not settings.pause_decodes
        self._pausing = False  # decodes pause in this step
        self._since: float | None = None  # when decodes began to wait behind prefills
        self._steps = 0  # steps since then
        self._left: int | None = None  # prefill tokens left in this step; None = no limit
        self._paused_steps = 0
        self._releases = 0

    def fluid_effects(self) -> FluidEffects:
        """Return the pauses; without pauses, the fluid engine's own chunked prefill applies."""
        pause_s = 0.0 if self.prefills_lead else self.settings.max_pause_s
        return FluidEffects(longest_pause_s=pause_s)

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        self._left = None
        self._pausing = False
        if self.prefills_lead and not self._may_starve_decodes(step):
            self._left = max(step.budget - step.decodes, 1)

    def pauses_decodes(self, step: Step) -> bool:
        """Return True while there is prefill to do, within the bounds."""
        if self.prefills_lead:
            return False
        # No pause for a request without KV blocks: only decodes release blocks.
        if not (step.prefills or (step.refused is None and step.may_enter() is not None)):
            return False
        if step.paused_s >= self.settings.max_pause_s or step.paused_steps >= MAX_PAUSED_STEPS:
            self._releases += 1
            return False
        self._paused_steps += 1
        self._pausing = True
        return True

    def _may_starve_decodes(self, step: Step) -> bool:
        if not (step.prefills and step.decoding):
            self._since = None
            return True
        if self._since is None:
            # Another policy may have paused the decodes until this step.
            self._since, self._steps = step.now - step.paused_s, step.paused_steps
        if step.now - self._since >= self.settings.max_pause_s or self._steps >= MAX_PAUSED_STEPS:
            self._since = None
            self._releases += 1
            return False
        self._steps += 1
        return True

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Return what decodes leave if they are overdue."""
        if self._left is None:
            return tokens
        granted = min(tokens, self._left)
        self._left -= granted
        return granted

    def taken_back(self, request: RequestView, tokens: int) -> None:
        if self._left is not None:
            self._left += tokens

    def gauges(self) -> Mapping[str, float]:
        return {"decodes_paused": float(self._since is not None or self._pausing)}

    def counters(self) -> Mapping[str, float]:
        """Return the paused steps, and the pauses that reached their limit."""
        return {
            "paused_steps": float(self._paused_steps),
            "starvation_releases": float(self._releases),
        }

"""A new prompt is computed whole and at once, and decodes wait for it: the baseline.

Idea: continuous batching as vLLM V0 did it before chunked prefill. While a prompt is in prefill, or
one could enter, steps are of prefill alone and have the whole budget. With `pause_decodes: false`
decodes take what prefill leaves of the budget: running prefills stand before them.

Cost per step: O(running) while decodes pause, else O(1). How it fails: by design. Each new prompt
is a gap in everybody's stream, and a steady flow of them is a long one, so decodes have a step at
least every `max_pause_s` and every `MOST_STEPS` steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from pydantic import Field

from vllm_sched.policies.types import (
    EngineFacts,
    LaneCount,
    Policy,
    RequestView,
    Settings,
    Step,
)

MOST_STEPS: Final = 1000


class PrefillFirstSettings(Settings):
    """Whether and how long decodes wait."""

    pause_decodes: bool = Field(
        True, description="no decoding while a prompt is in prefill; false = with what it leaves"
    )
    max_pause_s: float = Field(
        5.0, gt=0, description="decodes that have waited so long have a step in between"
    )


class PrefillFirst(Policy):
    """See the module's text."""

    name: ClassVar[str] = "prefill_first"
    settings_type: ClassVar[type[Settings]] = PrefillFirstSettings
    settings: PrefillFirstSettings
    arranges = True

    def __init__(self, facts: EngineFacts, settings: PrefillFirstSettings) -> None:
        super().__init__(facts, settings)
        self.prefills_lead = not settings.pause_decodes
        self._pausing = False  # in this step
        self._since: float | None = None  # since when they have waited behind prefills
        self._steps = 0  # that they have waited
        self._left: int | None = None  # tokens that prefills may take; None = all they can
        self._paused_steps = 0
        self._releases = 0

    def begin_step(self, step: Step, lanes: Mapping[str, LaneCount]) -> None:
        """Where prefills lead, leave the decodes their tokens when they have waited too long."""
        self._left = None
        self._pausing = False
        if not (step.prefills or step.waiting):
            self._since = None
        if self.prefills_lead and not self._goes_on(step, waits=bool(step.prefills)):
            self._left = max(step.budget - step.decodes, 1)

    def pauses_decodes(self, step: Step) -> bool:
        """Pause while there is prefill to do, within bounds."""
        if self.prefills_lead:
            return False
        # One that found no room is not waited for: room comes from decodes that end.
        if not (step.prefills or (step.refused is None and step.may_enter() is not None)):
            return False
        if step.paused_s >= self.settings.max_pause_s or step.paused_steps >= MOST_STEPS:
            self._releases += 1
            return False
        self._paused_steps += 1
        self._pausing = True
        return True

    def _goes_on(self, step: Step, *, waits: bool) -> bool:
        """Whether decodes may be left without for another step."""
        if not (waits and step.decoding):
            self._since = None
            return True
        if self._since is None:
            self._since, self._steps = step.now, 0
        if step.now - self._since >= self.settings.max_pause_s or self._steps >= MOST_STEPS:
            self._since = None
            self._releases += 1
            return False
        self._steps += 1
        return True

    def chunk(self, request: RequestView, computed: int, tokens: int) -> int:
        """Whatever is left, save in the step that the decodes are owed."""
        if self._left is None:
            return tokens
        granted = min(tokens, self._left)
        self._left -= granted
        return granted

    def taken_back(self, request: RequestView, tokens: int) -> None:
        """Leave it to the next."""
        if self._left is not None:
            self._left += tokens

    def gauges(self) -> Mapping[str, float]:
        """Show whether decodes are waiting now."""
        return {"decodes_paused": float(self._since is not None or self._pausing)}

    def counters(self) -> Mapping[str, float]:
        """Count steps in which decodes paused, and those made for their long wait."""
        return {
            "paused_steps": float(self._paused_steps),
            "starvation_releases": float(self._releases),
        }

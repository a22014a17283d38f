"""How long a step with a long chunk may take, and which steps have none."""

from __future__ import annotations

import math
from typing import Final

from vllm_sched.cost.pace import StepPace
from vllm_sched.policies.types import Step, StepResult

# Shorter steps are not divided further.
SHORTEST_STEP_S: Final = 0.010
# Slow steps and time before a step without prefill measures its duration.
PROBE_EVERY, PROBE_S = 4, 0.5
# Without a waiting short for QUIET_S, steps may be QUIET_STRETCH times longer.
QUIET_S, QUIET_STRETCH = 0.25, 3.0
# Maximum steps in a row without a long chunk.
STAND_BACK: Final = 4


class LongPacing:
    """The recent steps that decide the next step's long chunk."""

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._slow_steps = 0  # since the last step without prefill
        self._probed_at = -math.inf
        self._short_waited_at = -math.inf
        self._stood_back = 0  # steps in a row

    def end_step(self, now: float, *, shorts_waited: bool, stood_back: bool, probed: bool) -> None:
        """Record what the step that began at `now` did."""
        if shorts_waited:
            self._short_waited_at = now
        self._stood_back = self._stood_back + 1 if stood_back else 0
        if probed:
            self._slow_steps, self._probed_at = 0, now

    def observe(self, result: StepResult) -> None:
        if not result.chunks:
            self._slow_steps = 0
        elif result.seconds > SHORTEST_STEP_S:
            self._slow_steps += 1

    def stands_back(self, pace: StepPace, step: Step, slot: int) -> bool:
        """Return whether long prompts get no tokens, since their chunk would be slow."""
        if self._stood_back >= STAND_BACK:
            return False
        context = max([request.num_computed_tokens for request in step.prefills], default=0)
        fitting = pace.chunk_within(SHORTEST_STEP_S, context)
        return fitting is not None and fitting < slot

    def limit_s(
        self, pace: StepPace, now: float, *, sharing: int, shorts_wait: bool
    ) -> float | None:
        """Return the longest step that the chunk of one of `sharing` prompts may cause."""
        if (base := pace.base) is None:
            return None
        stretch = self._stretch
        if not shorts_wait and now - self._short_waited_at > QUIET_S:
            stretch *= QUIET_STRETCH
        longest = max(stretch * base, SHORTEST_STEP_S)
        return base + (longest - base) / sharing

    def probe_due(self, now: float) -> bool:
        """Return whether to measure a step without prefill.

        Otherwise step times from a moment when the machine was busy would size later chunks.
        """
        return self._slow_steps >= PROBE_EVERY and now - self._probed_at >= PROBE_S

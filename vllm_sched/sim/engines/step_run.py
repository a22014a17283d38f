"""A run of equal steps, computed at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_sched.sim.engines.kv_blocks import Task

NEVER = math.inf


class StepRun:
    """The current run of a fluid engine: its work, and how many steps have begun by a time."""

    __slots__ = ("began", "decodes", "end", "first_s", "growth_s", "parts", "steps")

    def __init__(self) -> None:
        self.began = 0.0
        self.end = NEVER
        self.steps = 0
        self.parts: list[tuple[Task, int]] = []
        self.decodes = 0
        self.first_s = self.growth_s = 0.0

    def cut(self, steps: int) -> None:
        self.steps = steps
        self.end = self.began + self.seconds(steps)

    def stop(self) -> None:
        self.end = NEVER
        self.steps = 0

    def seconds(self, steps: int) -> float:
        return self.first_s * steps + self.growth_s * (steps * (steps - 1) / 2)

    def passed(self, seconds: float) -> int:
        """Return how many steps have begun after `seconds`."""
        first, growth = self.first_s, self.growth_s
        if growth > 0:
            half = first - growth / 2
            steps = int((math.sqrt(half * half + 2 * growth * max(seconds, 0.0)) - half) / growth)
        else:
            steps = int(seconds / first) if first else 0
        steps = max(min(steps, self.steps), 1)
        while steps > 1 and self.seconds(steps - 1) >= seconds:
            steps -= 1
        while steps < self.steps and self.seconds(steps) < seconds:
            steps += 1
        return steps

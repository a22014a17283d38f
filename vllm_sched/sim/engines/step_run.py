"""Runs of equal steps, computed at once, and the gaps between their tokens."""

from __future__ import annotations

import math
from bisect import bisect_right

from vllm_sched.sim.engines.kv_blocks import Task
from vllm_sched.sim.engines.quantile_sketch import QuantileSketch

NEVER = math.inf


class StepRun:
    """The current run of a fluid engine: its work, and how many steps have begun by a time."""

    __slots__ = ("began", "chunks", "decodes", "end", "first_s", "growth_s", "steps")

    def __init__(self) -> None:
        self.began = 0.0
        self.end = NEVER
        self.steps = 0
        self.chunks: list[tuple[Task, int]] = []
        self.decodes = 0
        self.first_s = self.growth_s = 0.0

    def end_after(self, steps: int) -> None:
        self.steps = steps
        self.end = self.began + self.seconds(steps)

    def stop(self) -> None:
        self.end = NEVER
        self.steps = 0

    def seconds(self, steps: int) -> float:
        return self.first_s * steps + self.growth_s * (steps * (steps - 1) / 2)

    def steps_begun(self, seconds: float) -> int:
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


MAX_PEAKS = 4096  # remembered gaps: more than the distinct steps during one output


class TokenGaps:
    """The gaps of all decodes of one engine."""

    __slots__ = ("_peak_at", "_peak_s", "paused_s", "sketch")

    def __init__(self) -> None:
        self.sketch = QuantileSketch()
        self.paused_s = 0.0  # current pause of decodes
        # Gaps longer than all later gaps: the decode step at the end, and the seconds.
        self._peak_at: list[int] = []
        self._peak_s: list[float] = []

    def add_gaps(self, step: int, steps: int, seconds: float, decodes: int) -> None:
        """Count a gap per decode and step after `step`; the first includes the pause."""
        if self.paused_s:
            self.sketch.add(self.paused_s + seconds, decodes)
            self._add_peak(step + 1, self.paused_s + seconds)
            self.paused_s = 0.0
            steps -= 1
            if not steps:
                return
            self._add_peak(step + 1 + steps, seconds)
        else:
            self._add_peak(step + steps, seconds)
        self.sketch.add(seconds, steps * decodes)

    def longest_since(self, step: int) -> float:
        """Return the longest gap that ended after a decode step."""
        peak = bisect_right(self._peak_at, step)
        return self._peak_s[peak] if peak < len(self._peak_s) else 0.0

    def _add_peak(self, at: int, seconds: float) -> None:
        ats, peaks = self._peak_at, self._peak_s
        while peaks and peaks[-1] <= seconds:
            peaks.pop()
            ats.pop()
        ats.append(at)
        peaks.append(seconds)
        if len(ats) > MAX_PEAKS:
            del ats[: MAX_PEAKS // 2], peaks[: MAX_PEAKS // 2]

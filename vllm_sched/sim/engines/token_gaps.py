"""Gaps between tokens: all in a sketch, and the longest gap since a decode step."""

from __future__ import annotations

from bisect import bisect_right

from vllm_sched.sim.engines.quantile_sketch import QuantileSketch

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

    def note(self, step: int, steps: int, seconds: float, decodes: int) -> None:
        """Count a gap per decode and step after `step`; the first includes the pause."""
        if self.paused_s:
            self.sketch.add(self.paused_s + seconds, decodes)
            self._peak(step + 1, self.paused_s + seconds)
            self.paused_s = 0.0
            steps -= 1
            if not steps:
                return
            self._peak(step + 1 + steps, seconds)
        else:
            self._peak(step + steps, seconds)
        self.sketch.add(seconds, steps * decodes)

    def longest_since(self, step: int) -> float:
        """Return the longest gap that ended after a decode step."""
        peak = bisect_right(self._peak_at, step)
        return self._peak_s[peak] if peak < len(self._peak_s) else 0.0

    def _peak(self, at: int, seconds: float) -> None:
        ats, peaks = self._peak_at, self._peak_s
        while peaks and peaks[-1] <= seconds:
            peaks.pop()
            ats.pop()
        ats.append(at)
        peaks.append(seconds)
        if len(ats) > MAX_PEAKS:
            del ats[: MAX_PEAKS // 2], peaks[: MAX_PEAKS // 2]

"""Step time with a curve over the tokens of a step.

A step reads the weights once for all its tokens, of prefills and decodes alike. That part is a
curve: at few tokens memory is the limit (each expert's weights, in a mixture), at many compute. It
is linear between the `knots` and after the last; the other terms are `StepTime`'s.

How it fails: kernels take up to twice as long one token after a full tile; the curve goes between.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from vllm_sched.cost.step_time import UNBOUNDED, Chunk, StepTime
from vllm_sched.errors import UsageError

CURVE: Final = "token_curve_s"
FAR: Final = 1 << 22  # tokens, more than a step has


@dataclass(frozen=True, slots=True)
class CurvedStepTime(StepTime):
    knots: tuple[int, ...] = (0, 1)  # tokens
    knots_s: tuple[float, ...] = (0.0, 0.0)
    _slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        StepTime.__post_init__(self)
        if len(self.knots) != len(self.knots_s) or len(self.knots) < 2 or self.knots[0] != 0:
            raise UsageError(f"{CURVE}: give pairs of tokens and seconds, the first at 0 tokens")
        numbers = all(isinstance(s, int | float) and 0 <= s < math.inf for s in self.knots_s)
        if not numbers or any(after <= before for before, after in pairwise(self.knots)):
            raise UsageError(f"{CURVE}: give rising tokens, and seconds from 0 up")
        points = list(zip(self.knots, self.knots_s, strict=True))
        rises = [
            (after - before) / (end - start) for (start, before), (end, after) in pairwise(points)
        ]
        object.__setattr__(self, "_slopes", (*rises, max(rises[-1], 0.0)))

    def curve_seconds(self, tokens: float) -> float:
        at = bisect_right(self.knots, tokens) - 1
        return self.knots_s[at] + self._slopes[at] * (tokens - self.knots[at])

    def least_curve_seconds(self, tokens: float, steps: float) -> float:
        if steps <= 0:
            return 0.0
        # Jensen: with the convex hull below the curve, equal steps take least.
        step_tokens = tokens / steps
        hull: list[tuple[float, float]] = []
        points = [*zip(self.knots, self.knots_s, strict=True), (FAR, self.curve_seconds(FAR))]
        for point in points[1:]:  # not the knot at 0 tokens
            while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(point)
        # One token is the least that a step has.
        at = max(bisect_right(hull, (step_tokens, math.inf)) - 1, 0)
        start, end = hull[at], hull[min(at + 1, len(hull) - 1)]
        rise = _slope(start, end) if end > start else 0.0
        return steps * (start[1] + rise * max(step_tokens - start[0], 0.0))

    def prefill_within(
        self, seconds: float, decodes: int, context_tokens: int, context: int
    ) -> int:
        left = seconds - self._base_seconds(decodes, context_tokens) - self._prompt_seconds(context)
        left -= self.curve_seconds(decodes)
        if left <= 0 or seconds < self.floor_s:
            return 0
        knots, slopes, pair = self.knots, self._slopes, self.pair_s
        at = bisect_right(knots, decodes) - 1
        done = 0  # tokens of the parts of the curve that fit as a whole
        while True:
            linear = slopes[at] + self.prefill_s + pair * (context + done)
            if at + 1 < len(knots):
                wide = knots[at + 1] - decodes - done
                if (wide_s := (linear + pair * wide / 2) * wide) <= left:
                    left -= wide_s
                    done += wide
                    at += 1
                    continue
            # The positive root of: pair/2 x² + linear x = left
            divisor = linear + math.sqrt(max(linear * linear + 2 * pair * left, 0.0))
            return done + (int(min(2 * left / divisor, UNBOUNDED)) if divisor > 0 else UNBOUNDED)

    def chunk_seconds(self, chunk: Chunk) -> float:
        rise = self.curve_seconds(1 + chunk.tokens) - self.curve_seconds(1)
        return StepTime.chunk_seconds(self, chunk) + rise

    def linear_near(self, decodes: int, tokens: int) -> StepTime:
        decodes = max(decodes, 2)
        decodes_s = self.curve_seconds(decodes)
        per_decode_s = max((decodes_s - self.curve_seconds(1)) / (decodes - 1), 0.0)
        prefill = max(tokens, 1)
        prefill_s = max(self.curve_seconds(decodes + prefill) - decodes_s, 0.0)
        of_curve = {
            "decode_fixed_s": max(decodes_s - per_decode_s * decodes, 0.0),
            "decode_s": per_decode_s,
            "prefill_fixed_s": decodes_s,
            "prefill_s": prefill_s / prefill,
        }
        own = StepTime.to_json(self)
        return StepTime(**{name: own[name] + of_curve.get(name, 0.0) for name in own})

    def to_json(self) -> dict[str, Any]:
        curve = [list(pair) for pair in zip(self.knots, self.knots_s, strict=True)]
        return {**StepTime.to_json(self), CURVE: curve}


def _slope(start: tuple[float, float], end: tuple[float, float]) -> float:
    return (end[1] - start[1]) / (end[0] - start[0])


def step_time_of(content: object) -> StepTime:
    """Return the step time of a JSON object, with or without a curve."""
    if not isinstance(content, Mapping) or CURVE not in content:
        return StepTime.from_json(content)
    rest = {name: value for name, value in content.items() if name != CURVE}
    try:
        knots, seconds = zip(*content[CURVE], strict=True)
    except (TypeError, ValueError):
        raise UsageError(f"{CURVE}: give pairs of tokens and seconds") from None
    return CurvedStepTime(**StepTime.from_json(rest).to_json(), knots=knots, knots_s=seconds)

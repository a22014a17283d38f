"""How long a step takes here and now, learnt from the steps that were run.

A step's time is a fixed part, what decoding alone takes, plus what its prefill adds: a part per
token and a part per token and token of context before it (attention). The fixed part is seen in
steps without prefill; the two coefficients are a least-squares fit that forgets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Noise only ever adds to a time, so an estimate falls faster than it rises.
GAIN_DOWN, GAIN_UP = 0.3, 0.05
# The share of what was learnt that outlives one more step with prefill.
MEMORY = 0.95
# Below this many prefill tokens a step's time is mostly fixed cost and noise.
ENOUGH_TOKENS = 16


class Chunk(NamedTuple):
    """A part of a prompt computed in one step."""

    tokens: int
    context: int  # tokens before it

    @property
    def attention(self) -> float:
        """Pairs of tokens that attend to each other."""
        return self.tokens * (self.context + self.tokens / 2)


@dataclass(slots=True)
class StepPace:
    """The fitted model, and the sums of the fit."""

    base: float | None = None
    per_token: float | None = None
    per_pair: float = 0.0
    _tt: float = 0.0
    _tp: float = 0.0
    _pp: float = 0.0
    _ty: float = 0.0
    _py: float = 0.0

    def observe(self, seconds: float, chunks: Sequence[Chunk]) -> None:
        """Take in one finished step."""
        tokens = sum(chunk.tokens for chunk in chunks)
        if not tokens:
            if self.base is None:
                self.base = seconds
            gain = GAIN_DOWN if seconds < self.base else GAIN_UP
            self.base += gain * (seconds - self.base)
        elif self.base is not None and tokens >= ENOUGH_TOKENS:
            # Never nothing: a step with prefill can look as short as one without.
            added = max(seconds - self.base, 0.05 * seconds)
            self._fit(tokens, sum(chunk.attention for chunk in chunks), added)

    def chunk_within(self, seconds: float, context: int) -> int | None:
        """Size the chunk after so much context that makes a step so long; None while unknown."""
        if self.base is None or self.per_token is None:
            return None
        time_left = max(seconds - self.base, 0.0)
        # The positive root of: per_pair/2 x² + (per_token + per_pair context) x = time_left
        linear = self.per_token + self.per_pair * context
        if linear <= 0 and self.per_pair <= 0:
            return None
        root = math.sqrt(linear * linear + 2 * self.per_pair * time_left)
        return int(2 * time_left / (linear + root)) if linear + root else None

    def _fit(self, t: float, p: float, y: float) -> None:
        self._tt = MEMORY * self._tt + t * t
        self._tp = MEMORY * self._tp + t * p
        self._pp = MEMORY * self._pp + p * p
        self._ty = MEMORY * self._ty + t * y
        self._py = MEMORY * self._py + p * y
        determinant = self._tt * self._pp - self._tp * self._tp
        per_token = per_pair = 0.0
        if determinant > 1e-6 * self._tt * self._pp:
            per_token = (self._ty * self._pp - self._py * self._tp) / determinant
            per_pair = (self._py * self._tt - self._ty * self._tp) / determinant
        # Steps all alike, or a coefficient that time can't have: fit the other one alone.
        if per_token <= 0 and per_pair > 0:
            per_token, per_pair = 0.0, self._py / self._pp
        elif per_token <= 0 or per_pair < 0:
            per_token, per_pair = self._ty / self._tt, 0.0
        self.per_token, self.per_pair = per_token, per_pair

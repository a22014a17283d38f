"""The chunk size that measured steps support, without a model."""

from __future__ import annotations

import math
from typing import Final

FIRST_CHUNK_TOKENS: Final = 256
# A chunk may exceed those that fitted by this factor, and fall by this factor at once.
GROWTH, SHRINK = 1.5, 0.5


class MeasuredChunk:
    """The largest chunk that was seen to fit, and the estimate from the last full step."""

    def __init__(self, most: int, least: int) -> None:
        self.tokens = float(FIRST_CHUNK_TOKENS)
        self.fitting = math.inf
        self._most = most
        self._least = least

    def is_full(self, tokens: int) -> bool:
        """Return whether a step with this many prefill tokens says anything about full chunks."""
        return tokens >= SHRINK * self.tokens

    def observe(self, tokens: int, seconds: float, *, limit_s: float, margin: float) -> None:
        """Learn from a step; the remainder of a prompt that was in time says nothing."""
        if not self.is_full(tokens) and seconds <= limit_s:
            return
        # Proportional, as if a step had no fixed cost: the error is on the short side.
        self.fitting = fitting = tokens * limit_s / (margin * seconds)
        if fitting < self.tokens:
            self.tokens = max(fitting, SHRINK * self.tokens, self._least)
        else:
            grown = max(min(GROWTH * tokens, fitting), self.tokens)
            self.tokens = min(grown, self._most)

"""The chunk size that measured steps support, without a model."""

from __future__ import annotations

import math
from typing import Final

FIRST_CHUNK_TOKENS: Final = 256
# A chunk may exceed earlier chunks by GROWTH, and fall to SHRINK at once.
GROWTH, SHRINK = 1.5, 0.5


class MeasuredChunk:
    """The largest chunk that was seen to fit, and the estimate from the last full step."""

    def __init__(self, max_tokens: int, min_tokens: int) -> None:
        self.tokens = float(FIRST_CHUNK_TOKENS)
        self.fitting = math.inf
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens

    def is_full(self, tokens: int) -> bool:
        """Return whether the step is relevant for full chunks."""
        return tokens >= SHRINK * self.tokens

    def observe(self, tokens: int, seconds: float, *, limit_s: float, margin: float) -> None:
        """Learn from a full step, or from a step that was too long."""
        if not self.is_full(tokens) and seconds <= limit_s:
            return
        # Ignores a step's fixed cost: errs on the short side.
        self.fitting = fitting = tokens * limit_s / (margin * seconds)
        if fitting < self.tokens:
            self.tokens = max(fitting, SHRINK * self.tokens, self._min_tokens)
        else:
            grown = max(min(GROWTH * tokens, fitting), self.tokens)
            self.tokens = min(grown, self._max_tokens)

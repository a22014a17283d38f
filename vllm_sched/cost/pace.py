"""Online model of step time with prefill, for sizing chunks.

Step time = base + per token + per pair of attending tokens + per token of context, which each chunk
reads again. The base is the time of steps without prefill; the rest is a least-squares fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_sched.cost.fit import FitSums
from vllm_sched.cost.least_squares import non_negative
from vllm_sched.cost.step_time import Chunk

# Noise only adds time, so the base falls faster than it rises.
GAIN_DOWN, GAIN_UP = 0.5, 0.05
# Share of the sums that remains after a step with prefill.
SUMS_MEMORY = 0.97
# Errors are relative to at least this length.
MIN_ERROR_BASE_S = 0.030
# Equal chunks cannot separate reading from attention: attention gets the time.
RIDGE = (1e-5, 1e-5, 0.1)
# Limit of `per_read` relative to `per_token`.
MAX_READ_RATIO = 0.05
# Least chunk in tokens: smaller chunks mostly read context again.
MIN_CHUNK_TOKENS, MIN_CHUNK_PER_CONTEXT = 48, 1 / 128
# Kernels work in tiles, and some are specialized for each token count.
TILE_TOKENS = 16
# Steps with fewer prefill tokens are mostly fixed cost and noise.
MIN_OBSERVED_TOKENS = 16


def min_chunk_tokens(context: int) -> int:
    return min(MIN_CHUNK_TOKENS, int(context * MIN_CHUNK_PER_CONTEXT))


def cut_to_tiles(tokens: int, beside: int) -> int:
    """Cut a chunk by up to an eighth, so that the step with all tokens is whole tiles."""
    whole = (beside + tokens) // TILE_TOKENS * TILE_TOKENS - beside
    return whole if tokens - whole <= tokens // 8 else tokens


def cut_chunk(tokens: int, beside: int, context: int) -> int:
    return max(cut_to_tiles(tokens, beside), min(tokens, min_chunk_tokens(context)))


class StepPace:
    """The fitted model and its sums; solved on demand, not in each step."""

    def __init__(
        self,
        base: float | None = None,
        per_token: float | None = None,
        per_pair: float = 0.0,
        per_read: float = 0.0,
    ) -> None:
        self.base = base
        self._solved = (per_token, per_pair, per_read)
        self._stale = False
        self._sums = FitSums(3)

    @property
    def per_token(self) -> float | None:
        """Seconds per prefill token; None while unknown."""
        return self._coefficients()[0]

    @property
    def per_pair(self) -> float:
        return self._coefficients()[1]

    @property
    def per_read(self) -> float:
        return self._coefficients()[2]

    def observe(self, seconds: float, chunks: Sequence[Chunk]) -> None:
        tokens = sum(chunk.tokens for chunk in chunks)
        if not tokens:
            if self.base is None:
                self.base = seconds
            gain = GAIN_DOWN if seconds < self.base else GAIN_UP
            self.base += gain * (seconds - self.base)
        elif self.base is not None and tokens >= MIN_OBSERVED_TOKENS and seconds > 0:
            pairs = sum(chunk.attention for chunk in chunks)
            read = sum(chunk.context for chunk in chunks)
            # A step with prefill can measure as short as a step without.
            added = max(seconds - self.base, 0.05 * seconds)
            row = (float(tokens), pairs, float(read))
            self._sums.add(row, added, 1 / max(seconds, MIN_ERROR_BASE_S) ** 2, SUMS_MEMORY)
            self._stale = True

    def chunk_within(self, seconds: float, context: int) -> int | None:
        """Return the chunk size for a step of `seconds`; None while unknown.

        A chunk computes at least as long as it reads its context.
        """
        if self.base is None:
            return None
        per_token, per_pair, per_read = self._coefficients()
        if per_token is None:
            return None
        read = per_read * context
        time_left = max(seconds - self.base - read, min(read, seconds), 0.0)
        # The positive root of: per_pair/2 x² + (per_token + per_pair context) x = time_left
        linear = per_token + per_pair * context
        root = math.sqrt(linear * linear + 2 * per_pair * time_left)
        if not linear + root:
            return None
        return max(int(2 * time_left / (linear + root)), min_chunk_tokens(context))

    def _coefficients(self) -> tuple[float | None, float, float]:
        if self._stale:
            self._solved = self._solve()
            self._stale = False
        return self._solved

    def _solve(self) -> tuple[float, float, float]:
        tt, tp, tr, pp, pr, rr = self._sums.products
        matrix = ((tt, tp, tr), (tp, pp, pr), (tr, pr, rr))
        ty, py, ry = self._sums.times
        token, pair, read = non_negative(matrix, (ty, py, ry), RIDGE)
        if read > MAX_READ_RATIO * token:
            read = MAX_READ_RATIO * token
            rest = (ty - read * tr, py - read * pr)
            token, pair = non_negative(((tt, tp), (tp, pp)), rest, RIDGE)
        return token, pair, read

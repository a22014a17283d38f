"""How long a step takes here and now, learnt from the steps that were run.

A step's time is a fixed part, what decoding alone takes, plus what its prefill adds: a part per
token, a part per token and token of context before it (attention), and a part per token of that
context, which is read again however small the chunk. The fixed part is seen in steps without
prefill; the coefficients are a least-squares fit that forgets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_sched.cost.fit import FitSums
from vllm_sched.cost.least_squares import non_negative
from vllm_sched.cost.step_time import Chunk

# Noise only ever adds to a time, so an estimate falls faster than it rises.
GAIN_DOWN, GAIN_UP = 0.5, 0.05
# The share of what was learnt that outlives one more step with prefill.
MEMORY = 0.97
# Errors count relative to a step's length, down to this one: those of shorter steps are not felt,
# and a short prompt has costs of its own besides its tokens'.
SHORT_S = 0.030
# How much each coefficient is drawn towards nothing, relative to what speaks for it. Chunks all of
# one size do not tell the context that is read from that which is attended to: then it is the
# latter. To read a token again takes less than so much of what it takes to compute one.
RIDGE = (1e-5, 1e-5, 0.1)
MOST_READ = 0.05
# Far on in a prompt a chunk has so many tokens, however long they take: with less, reading what is
# before it again would be most of the work. Once chunks are small the fit can't tell.
LEAST_FAR_ON, LEAST_PER_CONTEXT = 48, 1 / 128
# Kernels work in tiles, and some are made anew for each number of tokens: steps whose numbers are
# multiples of this are quicker, since they are few.
TILE = 16
# Below this many prefill tokens a step's time is mostly fixed cost and noise.
ENOUGH_TOKENS = 16


def least_far_on(context: int) -> int:
    """Return the tokens that a chunk after so much context has at least."""
    return min(LEAST_FAR_ON, int(context * LEAST_PER_CONTEXT))


def whole_tiles(tokens: int, beside: int) -> int:
    """Cut a chunk so that the step's tokens, with so many of others, are whole tiles.

    Not where that would be more than an eighth of it: the step would cost nearly as much.
    """
    whole = (beside + tokens) // TILE * TILE - beside
    return whole if tokens - whole <= tokens // 8 else tokens


def tiled(tokens: int, beside: int, context: int) -> int:
    """Cut a chunk to whole tiles, but not below what one so far on has at least."""
    return max(whole_tiles(tokens, beside), min(tokens, least_far_on(context)))


class StepPace:
    """The fitted model, and the sums of the fit: it is solved when asked, not in each step."""

    def __init__(
        self,
        base: float | None = None,
        per_token: float | None = None,
        per_pair: float = 0.0,
        per_read: float = 0.0,
    ) -> None:
        """Know nothing, or what is given."""
        self.base = base
        self._solved = (per_token, per_pair, per_read)
        self._stale = False
        self._sums = FitSums(3)

    @property
    def per_token(self) -> float | None:
        """Seconds for a token; None while unknown."""
        return self._coefficients()[0]

    @property
    def per_pair(self) -> float:
        """Seconds for a token and a token that it attends to."""
        return self._coefficients()[1]

    @property
    def per_read(self) -> float:
        """Seconds for a token that was computed before."""
        return self._coefficients()[2]

    def observe(self, seconds: float, chunks: Sequence[Chunk]) -> None:
        """Take in one finished step."""
        tokens = sum(chunk.tokens for chunk in chunks)
        if not tokens:
            if self.base is None:
                self.base = seconds
            gain = GAIN_DOWN if seconds < self.base else GAIN_UP
            self.base += gain * (seconds - self.base)
        elif self.base is not None and tokens >= ENOUGH_TOKENS and seconds > 0:
            pairs = sum(chunk.attention for chunk in chunks)
            read = sum(chunk.context for chunk in chunks)
            # Never nothing: a step with prefill can look as short as one without.
            added = max(seconds - self.base, 0.05 * seconds)
            row = (float(tokens), pairs, float(read))
            self._sums.add(row, added, 1 / max(seconds, SHORT_S) ** 2, MEMORY)
            self._stale = True

    def chunk_within(self, seconds: float, context: int) -> int | None:
        """Size the chunk after so much context that makes a step so long; None while unknown.

        It is worth at least what it takes to read that context again: else a prompt far on would
        have its time spent on that.
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
        return max(int(2 * time_left / (linear + root)), least_far_on(context))

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
        if read > MOST_READ * token:
            read = MOST_READ * token
            rest = (ty - read * tr, py - read * pr)
            token, pair = non_negative(((tt, tp), (tp, pp)), rest, RIDGE)
        return token, pair, read

"""How long a KV transfer takes, learnt from what was seen.

    seconds = fixed + seconds per token x tokens

Seen is the time from when the decode leg was sent to its first token, less one step, which it would
have taken anyhow. Idea: least squares over observations that fade, each weighed by its prediction,
so that short transfers count as much as long ones. What lies far off what is known is moved nearer
first: the handshake behind a first transfer does no lasting harm. Where some take very long that is
the mean, and most are faster; so a factor follows the median: it grows a little with each transfer
that takes longer, by whatever that is, and shrinks with each that does not.

Each pair of workers has its own, as links differ: within a host, a rack, or across. Until it has
seen a few, the whole model's stands in for it.

Cost: some forty multiplications per observation, one and a look-up per prediction. How it fails: of
P x D pairs each learns for itself, so the first few transfers of each are predicted as the others'.
"""

from __future__ import annotations

from math import exp, log

# Before anything was seen: a handshake is done, and the network is decent.
FIXED_S, TOKEN_S = 0.01, 1e-6
LEAST_S = 1e-6
KEPT = 0.98  # of the weight of what was seen, with each observation
FARTHEST = 4.0  # times what was predicted, or that part of it
STEP, NEAR = 0.02, 0.1  # of the factor; what is no farther off moves it by less
LEAST_FACTOR, MOST_FACTOR = 0.5, 1.5
MOST_PAIRS = 10_000
YOUNG = 4  # so many observations are believed whatever they say
DISTINCT = 1e-3  # how different sizes have to be, to tell the two parts from each other


class TransferTime:
    """One pair's, or one model's."""

    __slots__ = ("_n", "_nn", "_nt", "_t", "_weight", "factor", "fixed_s", "seen", "token_s")

    def __init__(self) -> None:
        self.fixed_s = FIXED_S
        self.token_s = TOKEN_S
        self.factor = 1.0
        self.seen = 0
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    def seconds(self, tokens: float) -> float:
        """Predict the transfer of so many tokens."""
        return self.factor * (self.fixed_s + self.token_s * tokens)

    def saw(self, tokens: float, seconds: float) -> None:
        """Learn from a transfer."""
        self.seen += 1
        predicted = self.fixed_s + self.token_s * tokens
        seconds = max(seconds, LEAST_S)
        off = log(seconds / (self.factor * predicted)) / NEAR
        factor = self.factor * exp(STEP * min(max(off, -1.0), 1.0))
        self.factor = min(max(factor, LEAST_FACTOR), MOST_FACTOR)
        if self.seen > YOUNG:
            seconds = min(max(seconds, predicted / FARTHEST), predicted * FARTHEST)
        weight = 1.0 / max(predicted, LEAST_S) ** 2
        self._weight = KEPT * self._weight + weight
        self._n = KEPT * self._n + weight * tokens
        self._nn = KEPT * self._nn + weight * tokens * tokens
        self._t = KEPT * self._t + weight * seconds
        self._nt = KEPT * self._nt + weight * tokens * seconds
        self._fit()

    def _fit(self) -> None:
        weight, n, nn, t, nt = self._weight, self._n, self._nn, self._t, self._nt
        spread = weight * nn - n * n
        if spread <= DISTINCT * weight * nn:  # all of one size: both parts by one factor
            factor = t / (weight * self.fixed_s + n * self.token_s)
            self.fixed_s *= factor
            self.token_s *= factor
            return
        token_s = max((weight * nt - n * t) / spread, 0.0)
        fixed_s = (t - token_s * n) / weight
        if fixed_s <= 0.0:
            fixed_s, token_s = 0.0, nt / nn
        self.fixed_s, self.token_s = max(fixed_s, LEAST_S), token_s


class TransferTimes:
    """One model's, by the names of prefill and decode worker."""

    def __init__(self) -> None:
        self.all = TransferTime()
        self._pairs: dict[tuple[str, str], TransferTime] = {}

    def of(self, prefill: str, decode: str) -> TransferTime:
        """Return what is known of a pair, or if that is next to nothing of all."""
        if not self._pairs:
            return self.all
        found = self._pairs.get((prefill, decode))
        return found if found is not None and found.seen >= YOUNG else self.all

    def saw(self, prefill: str, decode: str, tokens: float, seconds: float) -> None:
        """Learn from a transfer."""
        found = self._pairs.get((prefill, decode))
        if found is None:
            if len(self._pairs) >= MOST_PAIRS:  # of workers that left long ago, most likely
                del self._pairs[next(iter(self._pairs))]
            found = self._pairs[prefill, decode] = TransferTime()
        self.all.saw(tokens, seconds)
        found.saw(tokens, seconds)

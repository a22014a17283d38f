"""Time of a KV transfer: seconds = fixed + seconds per token x tokens.

Observed: start of the decode leg to first token, less one step.

Idea: fading least squares, weighted by predictions. A factor moves the mean towards the median.
Each pair of workers learns; the model's estimate stands in first.

Cost: forty multiplications per observation.

How it fails: P x D pairs learn separately.
"""

from __future__ import annotations

from math import exp, log

# First values.
FIXED_S, TOKEN_S = 0.01, 1e-6
MIN_S = 1e-6
FADING = 0.98  # weight kept per observation
MAX_RATIO = 4.0
FACTOR_STEP, FULL_STEP_ERROR = 0.02, 0.1  # of the factor
MIN_FACTOR, MAX_FACTOR = 0.5, 1.5
MAX_PAIRS = 10_000
UNCLAMPED_TRANSFERS = 4
MIN_SIZE_SPREAD = 1e-3  # relative


class TransferTime:
    def __init__(self) -> None:
        self.fixed_s = FIXED_S
        self.token_s = TOKEN_S
        self.factor = 1.0
        self.seen = 0
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    def seconds(self, tokens: float) -> float:
        return self.factor * (self.fixed_s + self.token_s * tokens)

    def learn(self, tokens: float, seconds: float) -> None:
        self.seen += 1
        predicted = self.fixed_s + self.token_s * tokens
        seconds = max(seconds, MIN_S)
        off = log(seconds / (self.factor * predicted)) / FULL_STEP_ERROR
        factor = self.factor * exp(FACTOR_STEP * min(max(off, -1.0), 1.0))
        self.factor = min(max(factor, MIN_FACTOR), MAX_FACTOR)
        if self.seen > UNCLAMPED_TRANSFERS:
            seconds = min(max(seconds, predicted / MAX_RATIO), predicted * MAX_RATIO)
        weight = 1.0 / max(predicted, MIN_S) ** 2
        self._weight = FADING * self._weight + weight
        self._n = FADING * self._n + weight * tokens
        self._nn = FADING * self._nn + weight * tokens * tokens
        self._t = FADING * self._t + weight * seconds
        self._nt = FADING * self._nt + weight * tokens * seconds
        self._fit()

    def _fit(self) -> None:
        weight, n, nn, t, nt = self._weight, self._n, self._nn, self._t, self._nt
        spread = weight * nn - n * n
        if spread <= MIN_SIZE_SPREAD * weight * nn:  # equal sizes: scale both parts
            factor = t / (weight * self.fixed_s + n * self.token_s)
            self.fixed_s *= factor
            self.token_s *= factor
            return
        token_s = max((weight * nt - n * t) / spread, 0.0)
        fixed_s = (t - token_s * n) / weight
        if fixed_s <= 0.0:
            fixed_s, token_s = 0.0, nt / nn
        self.fixed_s, self.token_s = max(fixed_s, MIN_S), token_s


class TransferTimes:
    def __init__(self) -> None:
        self.all = TransferTime()
        self._pairs: dict[tuple[str, str], TransferTime] = {}

    def estimate_for(self, prefill: str, decode: str) -> TransferTime:
        """Return a pair's estimate, or the model's."""
        if not self._pairs:
            return self.all
        estimate = self._pairs.get((prefill, decode))
        return (
            estimate if estimate is not None and estimate.seen >= UNCLAMPED_TRANSFERS else self.all
        )

    def learn(self, prefill: str, decode: str, tokens: float, seconds: float) -> None:
        estimate = self._pairs.get((prefill, decode))
        if estimate is None:
            if len(self._pairs) >= MAX_PAIRS:  # probably of removed workers
                del self._pairs[next(iter(self._pairs))]
            estimate = self._pairs[prefill, decode] = TransferTime()
        self.all.learn(tokens, seconds)
        estimate.learn(tokens, seconds)

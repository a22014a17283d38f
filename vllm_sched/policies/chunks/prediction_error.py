"""How far measured step times are from the predicted ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import pairwise

# Weight of a ratio above and below the drift, and the maximum increase.
DRIFT_UP, DRIFT_DOWN, MAX_DRIFT_GROWTH = 1.0, 0.1, 1.5
# The margin is the largest of this many errors, once enough steps were seen.
MAX_ERRORS, MIN_ERRORS = 256, 64
# Up to this many largest errors are stalls if they exceed the next one by this factor. Stalls do
# not count: at most 1 % of steps are then too long.
MAX_STALLS, STALL_FACTOR = 2, 1.2
MIN_MARGIN, FIRST_MARGIN, MAX_MARGIN = 1.03, 1.15, 2.0


class PredictionError:
    def __init__(self) -> None:
        self.drift = 1.0  # lasting part of the ratio, at least 1
        self._last_ratio = 1.0
        self._errors: deque[float] = deque()  # ratios over the drift, by age
        self._sorted: list[float] = []  # the same, by size

    @property
    def margin(self) -> float:
        """Return the factor by which a step is planned shorter than its limit."""
        if len(self._sorted) < MIN_ERRORS:
            return FIRST_MARGIN
        stalls = MAX_STALLS * len(self._sorted) // MAX_ERRORS
        largest = self._sorted[-stalls - 1 :]
        usual = (less for less, more in pairwise(largest) if more > STALL_FACTOR * less)
        return min(max(next(usual, largest[-1]), MIN_MARGIN), MAX_MARGIN)

    def learn(self, ratio: float) -> None:
        if len(self._errors) >= MAX_ERRORS:
            del self._sorted[bisect_left(self._sorted, self._errors.popleft())]
        error = ratio / self.drift
        self._errors.append(error)
        insort(self._sorted, error)
        last_ratio, self._last_ratio = self._last_ratio, ratio
        # A single stall must not raise the drift; two long steps in a row do.
        if len(self._errors) >= MIN_ERRORS:
            ratio = min(ratio, max(last_ratio, self.drift))
        ratio = min(ratio, MAX_DRIFT_GROWTH * self.drift, MAX_MARGIN)
        gain = DRIFT_UP if ratio > self.drift else DRIFT_DOWN
        self.drift = max(self.drift + gain * (ratio - self.drift), 1.0)

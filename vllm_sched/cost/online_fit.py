"""Online least-squares fit of step time, with exponential forgetting.

Decode, prefill and mixed steps have separate sums, so that an hour of one kind does not erase the
others. Errors are relative. Outliers get less weight; a lasting change raises the usual error. The
first steps are weighted by their kind's median: a delayed result leaves a near-zero gap.

Ambiguous time goes to `decode_fixed_s` and to prompts, so deferred prefill does not wait in vain.

Cost: a few dozen multiplications a step. How it fails: `floor_s` is not linear and not fitted.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from typing import Final

from vllm_sched.cost.least_squares import non_negative
from vllm_sched.cost.step_time import StepKind, StepShape, StepTime

# Share of a kind's sums that remains after a step of that kind.
SUMS_MEMORY: Final = 0.995
SOLVE_EVERY: Final = 16
# Steps needed before the first solution.
MIN_STEPS, MIN_DECODE_STEPS, MIN_PREFILL_STEPS = 16, 8, 4
# First steps kept per kind; a lone step is an outlier below this share of other medians.
MAX_EARLY_STEPS, MIN_MEDIAN_RATIO = 64, 0.5
# An error is an outlier above this multiple of the usual error.
OUTLIER: Final = 3.0
INITIAL_SPREAD, MIN_SPREAD, SPREAD_GAIN = 0.25, 0.02, 0.02

FITTED_NAMES: Final = (
    "decode_fixed_s", "decode_s", "context_s", "prefill_fixed_s", "prefill_s", "pair_s", "mixed_s",
    "prompt_fixed_s", "read_s",
)  # fmt: skip
# Indices of each feature's coefficients; the constant comes first.
FEATURE_COEFFICIENTS: Final[dict[StepKind, tuple[tuple[int, ...], ...]]] = {
    "decode": ((0,), (1,), (2,)),
    "prefill": ((3,), (4,), (5,), (7,), (8,)),
    "mixed": ((0, 6), (1,), (2,), (4,), (5,), (7,), (8,)),
}
# Ridge terms by coefficient, on a diagonal scaled to ones: RIDGE + DOUBT x error variance / steps.
# Equal chunks: the cost of long prompts goes to pairs, not to `read_s`.
RIDGE: Final = (1e-9, 3e-5, 3e-5, 1e-5, 1e-9, 3e-5, 3e-5, 1e-6, 1e-2)
VARIANCE_RIDGE: Final = (0.0, 16.0, 16.0, 0.0, 0.0, 16.0, 16.0, 0.0, 64.0)
# Instead of a negative fixed part of decode steps, a slope is dropped.
FIXED: Final = 0
SLOPES: Final = (2, 1)


@dataclass(slots=True)
class FitSums:
    features: int
    products: list[float] = field(init=False)  # of each pair of features
    times: list[float] = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        self.products = [0.0] * (self.features * (self.features + 1) // 2)
        self.times = [0.0] * self.features

    def add(self, row: tuple[float, ...], seconds: float, weight: float, memory: float) -> None:
        new = [weight * left * right for index, left in enumerate(row) for right in row[index:]]
        self.products = [memory * old + add for old, add in zip(self.products, new, strict=True)]
        weighted = weight * seconds
        self.times = [memory * old + weighted * x for old, x in zip(self.times, row, strict=True)]
        self.steps += 1

    def fade(self, share: float) -> None:
        self.products = [share * product for product in self.products]
        self.times = [share * time for time in self.times]
        self.steps = math.ceil(share * self.steps)


def new_sums() -> dict[StepKind, FitSums]:
    return {kind: FitSums(len(features)) for kind, features in FEATURE_COEFFICIENTS.items()}


class OnlineFit:
    def __init__(self) -> None:
        self._sums = new_sums()
        self._early_steps: list[tuple[StepKind, StepShape, float]] = []  # not yet in the sums
        # Seconds of these steps.
        self._early_times: dict[StepKind, deque[float]] = {
            kind: deque(maxlen=MAX_EARLY_STEPS) for kind in FEATURE_COEFFICIENTS
        }
        self._step_counts: Counter[StepKind] = Counter()
        self._unsolved = 0
        self._model: StepTime | None = None
        self.spread = INITIAL_SPREAD  # the usual relative error of the prediction

    def observe(self, shape: StepShape, seconds: float) -> None:
        if not 0 < seconds < math.inf or not (shape.prefill_tokens or shape.decodes):
            return
        kind = shape.kind
        self._step_counts[kind] += 1
        self._unsolved += 1
        if (model := self._model) is None:
            self._early_steps.append((kind, shape, seconds))
        else:
            self._add_predicted(kind, shape, seconds, model.seconds(shape))
        if self._unsolved >= SOLVE_EVERY or (model is None and self._has_enough()):
            self._unsolved = 0
            self._add_early_steps()
            if self._has_enough():
                self._model = solve_coefficients(self._sums, self.spread, 1 / (1 - SUMS_MEMORY))

    def forget(self, kind: StepKind, share_left: float) -> None:
        """Give the steps of a kind so far only this share of their weight."""
        self._sums[kind].fade(share_left)

    @property
    def model(self) -> StepTime | None:
        return self._model

    def coefficients(self) -> Mapping[str, float]:
        """Return the coefficients by name, none before the first solution."""
        return {} if self._model is None else self._model.to_json()

    def count_of(self, kind: StepKind) -> int:
        return self._step_counts[kind]

    def slowest(self, shape: StepShape, others: Sequence[StepShape]) -> StepShape:
        """Return the shape that takes longest: ranks wait for each other."""
        if not others:
            return shape
        shapes = (shape, *others)
        if (model := self._model) is None:
            return max(shapes, key=lambda candidate: (candidate.prefill_tokens, candidate.decodes))
        return max(shapes, key=model.seconds)

    def _add(self, kind: StepKind, shape: StepShape, seconds: float, weight: float) -> None:
        self._sums[kind].add(row_of(kind, shape), seconds, weight, SUMS_MEMORY)

    def _add_early_steps(self) -> None:
        for kind, _, seconds in self._early_steps:
            self._early_times[kind].append(seconds)
        usual = {kind: statistics.median(s) for kind, s in self._early_times.items() if s}
        for kind, shape, seconds in self._early_steps:
            others = [median for other, median in usual.items() if other != kind]
            is_lone = len(self._early_times[kind]) == 1
            is_outlier = is_lone and seconds < MIN_MEDIAN_RATIO * min(others, default=0.0)
            larger = max(seconds, max(others) if is_outlier else usual[kind])
            self._add(kind, shape, seconds, 1.0 / (larger * larger))
        self._early_steps.clear()

    def _add_predicted(
        self, kind: StepKind, shape: StepShape, seconds: float, predicted_s: float
    ) -> None:
        """Add a step with less weight if it is an outlier, and learn the usual error."""
        larger = max(predicted_s, seconds)
        error = abs(seconds - predicted_s) / larger
        max_error = OUTLIER * self.spread
        weight = 1.0 if error <= max_error else max_error / error
        self._add(kind, shape, seconds, weight / (larger * larger))
        self.spread += SPREAD_GAIN * (error - self.spread)
        self.spread = max(self.spread, MIN_SPREAD)

    def _has_enough(self) -> bool:
        steps = self._step_counts
        decode, prefill, mixed = steps["decode"], steps["prefill"], steps["mixed"]
        return (
            decode + prefill + mixed >= MIN_STEPS
            and decode + mixed >= MIN_DECODE_STEPS
            and prefill + mixed >= MIN_PREFILL_STEPS
        )


def solve_coefficients(
    sums: Mapping[StepKind, FitSums], spread: float, most_steps: float = math.inf
) -> StepTime:
    """Return the best coefficients; `spread` is the usual relative error."""
    size = len(FITTED_NAMES)
    matrix = [[0.0] * size for _ in range(size)]
    right_side = [0.0] * size
    steps = [0.0] * size
    for kind, features in FEATURE_COEFFICIENTS.items():
        kind_sums = sums[kind]
        for rows, time in zip(features, kind_sums.times, strict=True):
            for row in rows:
                right_side[row] += time
                steps[row] += min(kind_sums.steps, most_steps)
        pairs = combinations_with_replacement(features, 2)
        for (rows, columns), total in zip(pairs, kind_sums.products, strict=True):
            for row, column in product(rows, columns):
                matrix[row][column] += total
                if rows != columns:
                    matrix[column][row] += total
    ridge = [
        base + doubt * spread * spread / max(count, 1.0)
        for base, doubt, count in zip(RIDGE, VARIANCE_RIDGE, steps, strict=True)
    ]
    solved = non_negative(matrix, right_side, ridge, protected=FIXED, dropped_instead=SLOPES)
    coefficients = dict(zip(FITTED_NAMES, solved, strict=True))
    if not sums["prefill"].steps:
        # No prefill-only steps: such a step reads the weights too.
        coefficients["prefill_fixed_s"] = coefficients["decode_fixed_s"] + coefficients["mixed_s"]
    return StepTime(**coefficients)


def row_of(kind: StepKind, shape: StepShape) -> tuple[float, ...]:
    """Return a step's features, in the order of `FEATURE_COEFFICIENTS`."""
    decode = float(shape.decodes), float(shape.context_tokens)
    if kind == "decode":
        return (1.0, *decode)
    tokens, prompts = float(shape.prefill_tokens), float(shape.prompts)
    prefill = tokens, shape.pairs, prompts, float(shape.read_tokens)
    return (1.0, *prefill) if kind == "prefill" else (1.0, *decode, *prefill)

"""Fit a step's time to steps that were seen: while running, with old ones forgotten.

For each kind of step (decode, prefill, both) the sums of a least-squares fit are kept, each kind
with its own forgetting, so that an hour of one kind does not wipe out what is known of the others.
Errors count relative to the step's length, else the few longest steps would decide everything. A
step that is off by more than is usual counts for less: a hiccup moves little, a lasting change is
followed, because what is usual grows with it. The first steps are weighed together, by the median
of their kind: a result that is handed on late makes the gap to the next one next to nothing, which
relative to its own length would outweigh thousands.

What the steps cannot tell apart goes to the harmless side: with batches all alike, time goes to
`decode_fixed_s` rather than to `decode_s`, and to a prompt or its tokens rather than to `mixed_s`.
So is deferred prefill never talked into waiting by steps that say nothing.

Cost: a few dozen multiplications a step; the equations are solved every `SOLVE_EVERY` steps. The
floor is not fitted here: it bends the line, and the line is refitted where the steps are.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from vllm_sched.cost.least_squares import non_negative
from vllm_sched.cost.step_time import StepShape, StepTime

Kind = Literal["decode", "prefill", "mixed"]

# The share of what was learnt of a kind of step that outlives one more of that kind.
MEMORY: Final = 0.995
SOLVE_EVERY: Final = 16
# Before these, the line would be drawn through noise.
ENOUGH_STEPS, ENOUGH_DECODES, ENOUGH_PREFILLS = 16, 8, 4
# Of a kind's first steps so many are kept, for their median; one is odd at such a part of others.
MOST_EARLY, ODD = 64, 0.5
# An error is unusual beyond so many times the usual one.
UNUSUAL: Final = 3.0
SPREAD_AT_START, LEAST_SPREAD, SPREAD_GAIN = 0.25, 0.02, 0.02

NAMES: Final = (
    "decode_fixed_s",
    "decode_s",
    "context_s",
    "prefill_fixed_s",
    "prefill_s",
    "pair_s",
    "mixed_s",
    "prompt_fixed_s",
    "read_s",
)
# Which coefficients a step's features (1 first) belong to. The 1 of a mixed step stands for two.
PLACES: Final[dict[Kind, tuple[tuple[int, ...], ...]]] = {
    "decode": ((0,), (1,), (2,)),
    "prefill": ((3,), (4,), (5,), (7,), (8,)),
    "mixed": ((0, 6), (1,), (2,), (4,), (5,), (7,), (8,)),
}
# How much each coefficient is drawn towards nothing, relative to what speaks for it: always, and
# besides by so many times the variance of an error over the number of steps. A decode step is
# never without its fixed part: where that comes out negative, a slope was too steep. With chunks
# all of one size, what a long prompt costs more goes to its pairs rather than to reading it.
RIDGE: Final = (1e-9, 3e-5, 3e-5, 1e-5, 1e-9, 3e-5, 3e-5, 1e-6, 1e-2)
DOUBT: Final = (0.0, 16.0, 16.0, 0.0, 0.0, 16.0, 16.0, 0.0, 64.0)
FIXED: Final = 0
SLOPES: Final = (2, 1)


def kind_of(shape: StepShape) -> Kind:
    """Name a step's kind."""
    if not shape.prefill_tokens:
        return "decode"
    return "mixed" if shape.decodes else "prefill"


@dataclass(slots=True)
class FitSums:
    """The upper triangle of features times features, and features times seconds."""

    features: int
    products: list[float] = field(init=False)
    times: list[float] = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        """Start from nothing."""
        self.products = [0.0] * (self.features * (self.features + 1) // 2)
        self.times = [0.0] * self.features

    def add(self, row: tuple[float, ...], seconds: float, weight: float, memory: float) -> None:
        """Take in one step."""
        new = [weight * left * right for index, left in enumerate(row) for right in row[index:]]
        self.products = [
            memory * old + added for old, added in zip(self.products, new, strict=True)
        ]
        weighted = weight * seconds
        self.times = [
            memory * old + weighted * each for old, each in zip(self.times, row, strict=True)
        ]
        self.steps += 1

    def fade(self, share: float) -> None:
        """Let what was taken in count for so much."""
        self.products = [share * each for each in self.products]
        self.times = [share * each for each in self.times]
        self.steps = math.ceil(share * self.steps)


class OnlineFit:
    """See the module's text."""

    def __init__(self, memory: float = MEMORY) -> None:
        self._memory = memory
        self._sums: dict[Kind, FitSums] = {kind: FitSums(len(PLACES[kind])) for kind in PLACES}
        self._early: list[tuple[Kind, StepShape, float]] = []  # not in the sums yet
        self._took: dict[Kind, deque[float]] = {kind: deque(maxlen=MOST_EARLY) for kind in PLACES}
        self._seen: Counter[Kind] = Counter()
        self._unsolved = 0
        self._model: StepTime | None = None
        # The usual error of the prediction, relative to the step.
        self.spread = SPREAD_AT_START

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Take in one finished step."""
        if not 0 < seconds < math.inf or not (shape.prefill_tokens or shape.decodes):
            return
        kind = kind_of(shape)
        self._seen[kind] += 1
        self._unsolved += 1
        if (model := self._model) is None:
            self._early.append((kind, shape, seconds))
        else:
            self._add(kind, shape, seconds, self._weight(model, shape, seconds))
        if self._unsolved >= SOLVE_EVERY or (model is None and self._enough()):
            self._unsolved = 0
            self._take_early()
            if self._enough():
                most = 1 / (1 - self._memory)
                self._model = solve(self._sums, self.spread, most)

    def forget(self, kind: Kind, outlives: float) -> None:
        """Let what was learnt of a kind of step so far count for so much beside what comes."""
        self._sums[kind].fade(outlives)

    @property
    def model(self) -> StepTime | None:
        """What was learnt; None until enough was seen."""
        return self._model

    def seen(self, kind: Kind) -> int:
        """How many steps of a kind were taken in."""
        return self._seen[kind]

    def slowest(self, shape: StepShape, others: Sequence[StepShape]) -> StepShape:
        """Return the shape that a step of several ranks lasts for: the one predicted to be longest.

        Until there is a model, it is the shape with the most prefill tokens.
        """
        if not others:
            return shape
        shapes = (shape, *others)
        if (model := self._model) is None:
            return max(shapes, key=lambda each: (each.prefill_tokens, each.decodes))
        return max(shapes, key=model.seconds)

    def _add(self, kind: Kind, shape: StepShape, seconds: float, weight: float) -> None:
        self._sums[kind].add(row_of(kind, shape), seconds, weight, self._memory)

    def _take_early(self) -> None:
        """Take in those that came before there was a model to judge them by."""
        for kind, _, seconds in self._early:
            self._took[kind].append(seconds)
        usual = {kind: statistics.median(took) for kind, took in self._took.items() if took}
        for kind, shape, seconds in self._early:
            others = [median for other, median in usual.items() if other != kind]
            # What is usual of its kind one alone does not tell; far below all others it is odd.
            odd = len(self._took[kind]) == 1 and seconds < ODD * min(others, default=0.0)
            larger = max(seconds, max(others) if odd else usual[kind])
            self._add(kind, shape, seconds, 1.0 / (larger * larger))
        self._early.clear()

    def _weight(self, model: StepTime, shape: StepShape, seconds: float) -> float:
        expected = model.seconds(shape)
        larger = max(expected, seconds)
        error = abs(seconds - expected) / larger
        usual = UNUSUAL * self.spread
        self.spread += SPREAD_GAIN * (error - self.spread)
        self.spread = max(self.spread, LEAST_SPREAD)
        return (1.0 if error <= usual else usual / error) / (larger * larger)

    def _enough(self) -> bool:
        decode, prefill, mixed = (self._seen[kind] for kind in ("decode", "prefill", "mixed"))
        return (
            decode + prefill + mixed >= ENOUGH_STEPS
            and decode + mixed >= ENOUGH_DECODES
            and prefill + mixed >= ENOUGH_PREFILLS
        )


def solve(sums: Mapping[Kind, FitSums], spread: float, most_steps: float = math.inf) -> StepTime:
    """Find the non-negative coefficients that fit best, given the usual error of a step."""
    size = len(NAMES)
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    steps = [0.0] * size
    for kind, places in PLACES.items():
        of_kind = sums[kind]
        products = iter(of_kind.products)
        for index, firsts in enumerate(places):
            for first in firsts:
                right[first] += of_kind.times[index]
                steps[first] += min(of_kind.steps, most_steps)
            for other in range(index, len(places)):
                value = next(products)
                for first in firsts:
                    for second in places[other]:
                        matrix[first][second] += value
                        if other != index:
                            matrix[second][first] += value
    ridge = [
        least + doubt * spread * spread / max(count, 1.0)
        for least, doubt, count in zip(RIDGE, DOUBT, steps, strict=True)
    ]
    solved = non_negative(matrix, right, ridge, kept=FIXED, rather=SLOPES)
    found = dict(zip(NAMES, solved, strict=True))
    if not sums["prefill"].steps:
        # Never seen alone: it reads the weights all the same.
        found["prefill_fixed_s"] = found["decode_fixed_s"] + found["mixed_s"]
    return StepTime(**found)


def row_of(kind: Kind, shape: StepShape) -> tuple[float, ...]:
    """Give a step's features, 1 first."""
    if kind == "decode":
        return (1.0, float(shape.decodes), float(shape.context_tokens))
    if kind == "prefill":
        return (
            1.0,
            float(shape.prefill_tokens),
            shape.pairs,
            float(shape.prompts),
            float(shape.read_tokens),
        )
    return (
        1.0,
        float(shape.decodes),
        float(shape.context_tokens),
        float(shape.prefill_tokens),
        shape.pairs,
        float(shape.prompts),
        float(shape.read_tokens),
    )

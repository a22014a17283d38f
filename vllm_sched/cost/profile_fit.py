"""Fit of a profile: the steps to sample from a source, the curve's fit, and its errors.

The fit is least squares of relative errors, in rounds that give large errors more weight, because
a profile promises its worst error too. Decode, prefill and mixed steps weigh the same.

How it fails: a source that jumps between neighbouring token counts keeps half the jump as error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_sched.cost.curved_step_time import CurvedStepTime
from vllm_sched.cost.least_squares import non_negative
from vllm_sched.cost.step_time import STEP_KINDS, Chunk, StepKind, StepShape, StepTime, TimedStep

KIB: Final = 1024
CONTEXTS: Final = tuple(n * KIB for n in (1, 2, 4, 8, 16, 32))
BATCHES: Final = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
WHOLE_PROMPTS: Final = (
    128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576,
    32_768, 49_152, 65_536, 98_304, 131_072,
)  # fmt: skip
CHUNKS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
EARLIER: Final = tuple(n * KIB for n in (1, 4, 16, 32, 64, 112))
TOGETHER: Final = (2, 4, 8, 16)
# Mixed steps fill a token budget, as vLLM's do.
BUDGETS: Final = (256, 512, 1024, 2048, 4096, 8192, 16_384)
MIXED_BATCHES: Final = (1, 4, 16, 32, 64, 128, 255)

KNOTS: Final = (
    0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16_384,
)  # fmt: skip
TERMS: Final = (
    "decode_fixed_s", "prefill_fixed_s", "decode_s", "context_s", "pair_s", "prompt_fixed_s",
    "read_s",
)  # fmt: skip
HELD_OUT_EVERY: Final = 4
ROUNDS: Final = 10
# An error of this size weighs as much again as an error of 0; at most MAX_WEIGHT.
USUAL_ERROR, MIN_WEIGHT, MAX_WEIGHT = 0.08, 0.3, 3.3
# With less, rounding changes the fifth digit: fixed terms and the curve's level are dependent.
RIDGE: Final = 1e-5

# The profile's promise: median error by kind, and worst error.
MEDIAN_TARGETS: Final[Mapping[StepKind, float]] = {"decode": 0.05, "prefill": 0.08, "mixed": 0.08}
WORST_TARGET: Final = 0.25


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors of one kind of step."""

    median: float
    worst: float
    steps: int


def sample_shapes() -> list[StepShape]:
    shapes = [StepShape(decodes=b, context_tokens=b * c) for b in BATCHES for c in CONTEXTS]
    shapes += [StepShape.from_chunks([Chunk(n, 0)], 0, 0) for n in WHOLE_PROMPTS]
    shapes += [StepShape.from_chunks([Chunk(n, c)], 0, 0) for n in CHUNKS for c in EARLIER]
    shapes += [
        StepShape.from_chunks([Chunk(n, 0)] * prompts, 0, 0)
        for prompts in TOGETHER
        for n in CHUNKS[:5]
    ]
    shapes += [
        StepShape.from_chunks([Chunk(n - b, earlier)], b, b * c)
        for n in BUDGETS
        for earlier in (0, *EARLIER[2:4])
        for b in MIXED_BATCHES
        for c in CONTEXTS[::2]
    ]
    return shapes


def fit(sampled: Sequence[TimedStep]) -> CurvedStepTime:
    """Return the best curve for the steps that are not held out."""
    steps = [step for n, step in enumerate(sampled) if n % HELD_OUT_EVERY]
    counts = {kind: sum(step.shape.kind == kind for step in steps) for kind in STEP_KINDS}
    rows = [_row(step.shape) for step in steps]
    weights = [1 / (counts[step.shape.kind] ** 0.5 * step.seconds) for step in steps]
    error_weights = [1.0] * len(steps)
    best_score, best = math.inf, CurvedStepTime()
    for _ in range(ROUNDS):
        both = [w * e for w, e in zip(weights, error_weights, strict=True)]
        time = _solve(rows, steps, both)
        step_errors = [abs(time.seconds(step.shape) / step.seconds - 1) for step in steps]
        score = _score(steps, step_errors)
        if score < best_score:
            best_score, best = score, time
        error_weights = [min(MIN_WEIGHT + error / USUAL_ERROR, MAX_WEIGHT) for error in step_errors]
    return best


def errors(time: StepTime, sampled: Sequence[TimedStep]) -> dict[StepKind, FitError]:
    fit_errors: dict[StepKind, FitError] = {}
    for kind in STEP_KINDS:
        step_errors = [
            abs(time.seconds(step.shape) / step.seconds - 1)
            for step in sampled
            if step.shape.kind == kind
        ]
        if step_errors:
            median = statistics.median(step_errors)
            fit_errors[kind] = FitError(median, max(step_errors), len(step_errors))
    return fit_errors


def misses(fit_errors: Mapping[StepKind, FitError]) -> list[str]:
    """Return what is above the targets, in words."""
    texts = [
        f"{kind} median {error.median:.1%}"
        for kind, error in fit_errors.items()
        if error.median > MEDIAN_TARGETS[kind]
    ]
    texts += [
        f"{kind} worst {error.worst:.0%}"
        for kind, error in fit_errors.items()
        if error.worst > WORST_TARGET
    ]
    return texts


def _score(steps: Sequence[TimedStep], step_errors: Sequence[float]) -> float:
    """Return how far the worst target or median is exceeded, or nearly reached."""
    score = max(step_errors) / WORST_TARGET
    for kind in STEP_KINDS:
        pairs = zip(steps, step_errors, strict=True)
        of_kind = [error for step, error in pairs if step.shape.kind == kind]
        if of_kind:
            score = max(score, 1.5 * statistics.median(of_kind) / MEDIAN_TARGETS[kind])
    return score


def _row(shape: StepShape) -> list[float]:
    row = [0.0] * (len(TERMS) + len(KNOTS) - 1)
    row[0] = float(shape.decodes > 0)
    row[1] = float(not shape.decodes)
    row[2:7] = [
        float(shape.decodes), float(shape.context_tokens), shape.pairs, float(shape.prompts),
        float(shape.read_tokens),
    ]  # fmt: skip
    # The value at each knot weighs by how near it is.
    tokens = shape.prefill_tokens + shape.decodes
    at = min(sum(knot <= tokens for knot in KNOTS), len(KNOTS) - 1)
    start, end = KNOTS[at - 1], KNOTS[at]
    share = (tokens - start) / (end - start)
    if at > 1:
        row[len(TERMS) + at - 2] = 1 - share
    row[len(TERMS) + at - 1] = share
    return row


def _solve(
    rows: Sequence[Sequence[float]], steps: Sequence[TimedStep], weights: Sequence[float]
) -> CurvedStepTime:
    size = len(rows[0])
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for row, step, weight in zip(rows, steps, weights, strict=True):
        square = weight * weight
        used = [index for index, value in enumerate(row) if value]
        for i in used:
            scaled = square * row[i]
            right[i] += scaled * step.seconds
            line = matrix[i]
            for j in used:
                line[j] += scaled * row[j]
    solved = non_negative(matrix, right, [RIDGE] * size)
    terms = dict(zip(TERMS, solved, strict=False))
    return CurvedStepTime(**terms, knots=KNOTS, knots_s=(0.0, *solved[len(TERMS) :]))

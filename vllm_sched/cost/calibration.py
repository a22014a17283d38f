"""Offline fit of step times: coefficients, bootstrap intervals, held-out errors.

The fit solves the equations of `online_fit` in rounds, with less weight for outliers. The floor is
chosen among the shortest prefill steps. Relative least squares underestimates totals by about 5 %,
so the coefficients are then scaled to the measured total.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vllm_sched.cost.online_fit import new_sums, row_of, solve_coefficients
from vllm_sched.cost.profiles import Profile
from vllm_sched.cost.step_time import STEP_KINDS, StepKind, StepTime, TimedStep
from vllm_sched.errors import UsageError

HELD_OUT_EVERY: Final = 4
SAMPLES: Final = 200
CONFIDENCE: Final = 0.95
ROUNDS, OUTLIER_ERRORS, MIN_SPREAD = 5, 2.0, 0.01
# Longer steps (in median errors above the prediction) count only up to this length.
HICCUP_ERRORS: Final = 4.0
MIN_STEPS_PER_KIND: Final = 4
# A floor must lower the median error to this share.
MAX_FLOOR_ERROR_RATIO: Final = 0.9


@dataclass(frozen=True, slots=True)
class Calibration:
    time: StepTime
    intervals: Mapping[str, tuple[float, float]]
    fitted: tuple[TimedStep, ...]
    held_out: tuple[TimedStep, ...]

    def error(self, kind: StepKind | None = None) -> float | None:
        return _error(self.time, [m for m in self.held_out if kind in (None, m.shape.kind)])


def calibrate(measured: Sequence[TimedStep], *, seed: int = 0) -> Calibration:
    by_kind: dict[StepKind, list[TimedStep]] = {kind: [] for kind in STEP_KINDS}
    for step in measured:
        if step.seconds > 0:
            by_kind[step.shape.kind].append(step)
    for kind, steps in by_kind.items():
        if len(steps) < MIN_STEPS_PER_KIND:
            raise UsageError(
                f"only {len(steps)} {kind} steps were seen, {MIN_STEPS_PER_KIND} are needed; "
                "measure again without other clients, and with tokens sent one by one (no "
                "speculative decoding, no --stream-interval)"
            )
    rng = random.Random(seed)
    fitted: list[TimedStep] = []
    held_out: list[TimedStep] = []
    for steps in by_kind.values():
        shuffled = rng.sample(steps, len(steps))
        held_out += shuffled[::HELD_OUT_EVERY]
        fitted += [step for n, step in enumerate(shuffled) if n % HELD_OUT_EVERY]
    time = _fit_with_floor(fitted)
    bootstrap = (rng.choices(fitted, k=len(fitted)) for _ in range(SAMPLES))
    samples = [_fit(steps, time.floor_s).to_json() for steps in bootstrap]
    tail = round((1 - CONFIDENCE) / 2 * SAMPLES)
    intervals = {}
    for name in time.to_json():
        values = sorted(sample[name] for sample in samples)
        intervals[name] = (values[tail], values[-1 - tail])
    return Calibration(time, intervals, tuple(fitted), tuple(held_out))


def _fit_with_floor(steps: Sequence[TimedStep]) -> StepTime:
    best = _fit(steps, 0.0)
    min_error = _error(best, steps) or 0.0
    alone = sorted(step.seconds for step in steps if step.shape.kind == "prefill")
    for floor in alone[MIN_STEPS_PER_KIND - 1 : len(alone) // 2 + 1]:
        time = _fit(steps, floor)
        error = _error(time, steps) or 0.0
        if error < MAX_FLOOR_ERROR_RATIO * min_error:
            best, min_error = time, error
    return best


def _fit(steps: Sequence[TimedStep], floor: float) -> StepTime:
    above = [m for m in steps if m.shape.kind != "prefill" or m.seconds > 1.05 * floor]
    time: StepTime | None = None
    spread = 0.1
    for _ in range(ROUNDS):
        sums = new_sums()
        for step in above:
            expected = step.seconds if time is None else time.seconds(step.shape)
            larger = max(expected, step.seconds)
            error = abs(step.seconds - expected) / larger
            weight = min(1.0, OUTLIER_ERRORS * spread / error) if error else 1.0
            kind = step.shape.kind
            sums[kind].add(row_of(kind, step.shape), step.seconds, weight / larger**2, 1.0)
        time = solve_coefficients(sums, spread)
        spread = max(_error(time, above) or 0.0, MIN_SPREAD)
    return replace(_scaled_to_total(time, above, spread), floor_s=floor) if time else StepTime()


def _scaled_to_total(time: StepTime, steps: Sequence[TimedStep], spread: float) -> StepTime:
    expected = [time.seconds(step.shape) for step in steps]
    max_ratio = 1 + HICCUP_ERRORS * spread
    capped = [
        min(step.seconds, max_ratio * usual) for step, usual in zip(steps, expected, strict=True)
    ]
    factor = sum(capped) / sum(expected)
    return StepTime(**{name: factor * value for name, value in time.to_json().items()})


def _error(time: StepTime, steps: Sequence[TimedStep]) -> float | None:
    errors = [abs(time.seconds(step.shape) / step.seconds - 1) for step in steps]
    return statistics.median(errors) if errors else None


@dataclass(frozen=True, slots=True)
class Distance:
    profile: Profile
    ratios: Mapping[StepKind, float]

    @property
    def size(self) -> float:
        return max(abs(math.log(ratio)) for ratio in self.ratios.values())


def nearest(steps: Sequence[TimedStep], candidates: Iterable[Profile]) -> Distance | None:
    """Return the profile whose steps are nearest to the measured ones in their worst kind."""
    distances = [Distance(profile, ratios_to(profile.time, steps)) for profile in candidates]
    comparable = [distance for distance in distances if distance.ratios]
    return min(comparable, key=lambda distance: distance.size, default=None)


def ratios_to(time: StepTime, steps: Sequence[TimedStep]) -> dict[StepKind, float]:
    """Return the median of measured over predicted seconds, by kind."""
    ratios: dict[StepKind, float] = {}
    for kind in STEP_KINDS:
        of_kind = [step for step in steps if step.shape.kind == kind and step.seconds > 0]
        if of_kind:
            ratios[kind] = statistics.median(s.seconds / time.seconds(s.shape) for s in of_kind)
    return ratios

"""The fit to measured steps, all at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.cost.test_online_fit import TRUE, shape
from tests.present import present
from vllm_sched.cost import calibration
from vllm_sched.cost.calibration import Calibration, calibrate
from vllm_sched.cost.step_time import STEP_KINDS, StepShape, StepTime, TimedStep
from vllm_sched.errors import UsageError


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw few samples: only the ends of intervals depend on their number."""
    monkeypatch.setattr(calibration, "SAMPLES", 40)


def measured(time: StepTime, *, noise: float = 0.0, count: int = 240) -> list[TimedStep]:
    """Return steps of all kinds, with noise that only adds."""
    rng = random.Random(2)
    steps = []
    for _ in range(count):
        step = shape(rng, batch=(1, 32))
        steps.append(TimedStep(step, time.seconds(step) * (1 + abs(rng.gauss(0, noise)))))
    return steps


def held_out_error(found: Calibration) -> float:
    return present(found.error())


def test_calibration_recovers_the_coefficients() -> None:
    found = calibrate(measured(TRUE))
    for name, value in TRUE.to_json().items():
        assert getattr(found.time, name) == pytest.approx(value, rel=0.05), name
    assert held_out_error(found) < 0.01
    assert all(found.error(kind) is not None for kind in ("decode", "prefill", "mixed"))


def test_intervals_contain_the_true_values_and_grow_with_noise() -> None:
    found = calibrate(measured(TRUE, noise=0.05))
    calm = calibrate(measured(TRUE, noise=0.005))
    assert calm == calibrate(measured(TRUE, noise=0.005))
    for name in ("decode_fixed_s", "decode_s", "prefill_s", "mixed_s"):
        low, high = found.intervals[name]
        # Noise only adds: by 4 % on average here.
        assert low * 0.9 <= getattr(TRUE, name) <= high
        assert high - low > calm.intervals[name][1] - calm.intervals[name][0]
    assert held_out_error(found) < 0.05


def test_total_predicted_time_matches_total_measured_time() -> None:
    steps = measured(TRUE, noise=0.2, count=600)
    time = calibrate(steps).time
    predicted_s = sum(time.seconds(each.shape) for each in steps)
    assert predicted_s == pytest.approx(sum(each.seconds for each in steps), rel=0.015)


def test_outliers_do_not_raise_the_error() -> None:
    steps = measured(TRUE, noise=0.01)
    steps = [replace(m, seconds=m.seconds * 10) if n % 20 == 0 else m for n, m in enumerate(steps)]
    assert held_out_error(calibrate(steps)) < 0.05


@pytest.mark.parametrize("noise", [0.1, 0.25])
def test_error_on_a_noisy_worker_is_at_most_15_percent(noise: float) -> None:
    """A busy CPU makes each step 8 to 20 % longer, and one in twenty five times as long."""
    rng = random.Random(4)
    steps = [
        replace(each, seconds=each.seconds * (5.0 if rng.random() < 0.05 else 1.0))
        for each in measured(TRUE, noise=noise)
    ]
    found = calibrate(steps)
    for kind in (None, *STEP_KINDS):
        error = present(found.error(kind))
        assert error <= 0.15, kind


def test_calibration_finds_a_prefill_floor() -> None:
    rng = random.Random(3)
    with_floor = replace(TRUE, floor_s=0.060)
    steps = measured(TRUE)
    for _ in range(60):
        tokens = rng.randint(10, 3000)
        step = StepShape(tokens, tokens * tokens / 2)
        steps.append(TimedStep(step, with_floor.seconds(step) * (1 + rng.random() / 100)))
    steps = [m for m in steps if m.shape.decodes or m.seconds >= 0.060]
    found = calibrate(steps)
    assert found.time.floor_s == pytest.approx(0.060, rel=0.03)
    assert found.time.prefill_s == pytest.approx(TRUE.prefill_s, rel=0.1)


def test_calibration_finds_no_floor_without_one() -> None:
    assert calibrate(measured(TRUE, noise=0.03)).time.floor_s == 0.0


def test_missing_mixed_steps_are_refused() -> None:
    steps = [m for m in measured(TRUE) if m.shape.kind != "mixed"]
    message = "only 0 mixed steps were seen, 4 are needed; measure again without other clients"
    with pytest.raises(UsageError, match=message):
        calibrate(steps)

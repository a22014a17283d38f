"""The growth of a queue, from the slope of waits."""

from __future__ import annotations

import random

import pytest

from vllm_sched.bench.results.stats import Trend


def trend(*seen: tuple[float, float]) -> Trend:
    found = Trend()
    for at, value in seen:
        found.add(at, value)
    return found


def test_too_few_samples_show_no_growth() -> None:
    assert trend().growth == 0.0
    assert trend((1.0, 5.0)).growth == 0.0
    assert trend((1.0, 5.0), (1.0, 9.0)).growth == 0.0


@pytest.mark.parametrize("start", [0.0, 1e6])
def test_growing_queue_has_its_slope(start: float) -> None:
    rng = random.Random(1)
    seen = [(start + at / 10, 2 + 0.3 * at / 10 + rng.gauss(0, 0.5)) for at in range(1000)]
    assert trend(*seen).growth == pytest.approx(0.3, rel=0.02)


def test_falling_or_constant_waits_show_no_growth() -> None:
    assert trend(*((float(at), 100.0 - at) for at in range(50))).growth == 0.0
    assert trend(*((float(at), 3.0) for at in range(50))).growth == pytest.approx(0.0, abs=1e-9)

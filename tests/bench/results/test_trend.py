"""Whether a queue grows, by the slope of waits."""

from __future__ import annotations

import random

import pytest

from vllm_sched.bench.results.trend import Trend


def trend(*seen: tuple[float, float]) -> Trend:
    """See these."""
    found = Trend()
    for at, value in seen:
        found.add(at, value)
    return found


def test_too_few_say_nothing() -> None:
    assert trend().growth == 0.0
    assert trend((1.0, 5.0)).growth == 0.0
    assert trend((1.0, 5.0), (1.0, 9.0)).growth == 0.0


@pytest.mark.parametrize("start", [0.0, 1e6])
def test_a_queue_that_grows(start: float) -> None:
    rng = random.Random(1)
    seen = [(start + at / 10, 2 + 0.3 * at / 10 + rng.gauss(0, 0.5)) for at in range(1000)]
    assert trend(*seen).growth == pytest.approx(0.3, rel=0.02)


def test_what_falls_or_stays_is_no_growth() -> None:
    assert trend(*((float(at), 100.0 - at) for at in range(50))).growth == 0.0
    assert trend(*((float(at), 3.0) for at in range(50))).growth == pytest.approx(0.0, abs=1e-9)

"""The drift and the margin of predicted step times."""

from __future__ import annotations

import pytest

from vllm_sched.policies.chunks.prediction_error import (
    MAX_ERRORS,
    MAX_MARGIN,
    MIN_ERRORS,
    MIN_MARGIN,
    PredictionError,
)


def test_drift_rises_at_once_and_falls_slowly() -> None:
    error = PredictionError()
    error.learn(1.2)
    assert error.drift == pytest.approx(1.2)
    error.learn(1.0)
    assert 1.15 < error.drift < 1.2


def test_margin_is_wide_until_enough_steps_were_seen() -> None:
    error = PredictionError()
    assert MIN_MARGIN < error.margin < MAX_MARGIN
    for _ in range(MIN_ERRORS):
        error.learn(1.0)
    assert error.margin == MIN_MARGIN


@pytest.mark.parametrize(
    ("steps", "stalls", "counts"),
    [(64, 1, True), (128, 1, False), (128, 2, True), (MAX_ERRORS, 2, False), (MAX_ERRORS, 3, True)],
)
def test_margin_leaves_out_one_stall_in_a_hundred_steps(
    steps: int, stalls: int, counts: bool
) -> None:
    error = PredictionError()
    for _ in range(steps - 2 * stalls):
        error.learn(1.0)
    for _ in range(stalls):
        error.learn(1.0)
        error.learn(1.6)
    assert error.drift == 1.0
    assert error.margin == pytest.approx(1.6 if counts else MIN_MARGIN)

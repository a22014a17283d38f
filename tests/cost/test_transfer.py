"""The time of a KV transfer."""

from __future__ import annotations

import random

import pytest

from vllm_sched.cost.transfer import MeasuredTransfer, TransferTime
from vllm_sched.errors import UsageError

TRUE = TransferTime(setup_s=0.002, descriptor_s=4e-6, byte_s=1 / 49e9)


def measured_transfers(noise: float = 0.0) -> list[MeasuredTransfer]:
    """Return transfers of many sizes and block sizes."""
    rng = random.Random(1)
    points = []
    for _ in range(60):
        tokens, block = rng.randint(100, 60_000), rng.choice([16, 32, 128])
        size, descriptors = tokens * 131_072, (tokens // block + 1) * 64
        seconds = TRUE.seconds(size, descriptors) * (1 + abs(rng.gauss(0, noise)))
        points.append(MeasuredTransfer(size, descriptors, seconds))
    return points


def test_fit_recovers_the_coefficients() -> None:
    found = TransferTime.fitted(measured_transfers())
    assert found.setup_s == pytest.approx(TRUE.setup_s, rel=0.01)
    assert found.descriptor_s == pytest.approx(TRUE.descriptor_s, rel=0.01)
    assert found.bandwidth == pytest.approx(49e9, rel=0.01)


def test_predictions_stay_close_despite_noise() -> None:
    found = TransferTime.fitted(measured_transfers(noise=0.1))
    for point in measured_transfers():
        predicted = found.seconds(point.size, point.descriptors)
        assert predicted == pytest.approx(point.seconds, rel=0.2)


def test_published_transfer_time_is_set_by_its_descriptors() -> None:
    assert TransferTime(0.0, 0.174 / 40_000, 0.0).seconds(313_000_000, 40_000) == pytest.approx(
        0.174
    )


def test_too_few_transfers_are_refused() -> None:
    with pytest.raises(UsageError, match="2 transfers are too few"):
        TransferTime.fitted(measured_transfers()[:2])

"""The time of a KV transfer."""

from __future__ import annotations

import pytest

from vllm_sched.cost.transfer import TransferTime


def test_published_transfer_time_is_set_by_its_descriptors() -> None:
    assert TransferTime(0.0, 0.174 / 40_000, 0.0).seconds(313_000_000, 40_000) == pytest.approx(
        0.174
    )


def test_time_is_linear_in_bytes_and_descriptors() -> None:
    assert TransferTime(0.002, 4e-6, 1 / 49e9).seconds(49_000, 500) == pytest.approx(0.004001)

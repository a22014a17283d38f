"""What a transfer takes, learnt."""

from __future__ import annotations

import random
from statistics import median

import pytest

from proxy.core.transfer_time import TransferTime


def taught(fixed_s: float, token_s: float, *, noise: float = 0.0, seed: int = 1) -> TransferTime:
    """Show 200 transfers."""
    chance = random.Random(seed)
    time = TransferTime()
    for _ in range(200):
        tokens = chance.choice([100, 500, 3000, 12_000])
        seconds = (fixed_s + token_s * tokens) * chance.lognormvariate(0.0, noise)
        time.saw(tokens, seconds)
    return time


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.004, 1e-6), (0.1, 2e-5), (0.5, 1e-7)])
def test_it_comes_to_predict_the_median(fixed_s: float, token_s: float) -> None:
    for seed in range(5):
        time = taught(fixed_s, token_s, noise=0.3, seed=seed)
        off = [time.seconds(n) / (fixed_s + token_s * n) for n in (100, 500, 3000, 12_000)]
        assert 0.7 < median(off) < 1.3
        assert all(0.5 < each < 2.0 for each in off)


def test_a_handshake_does_no_lasting_harm() -> None:
    time = taught(0.02, 1e-6)
    before = time.seconds(3000)
    time.saw(3000, 60.0)
    assert time.seconds(3000) < 1.2 * before


def test_no_time_at_all_is_still_some() -> None:
    time = TransferTime()
    for _ in range(1000):
        time.saw(100, 0.0)
    assert time.seconds(100) > 0

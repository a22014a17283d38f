"""The learned duration of transfers."""

from __future__ import annotations

import random
from statistics import median

import pytest

from proxy.core.learned import transfer_time as module
from proxy.core.learned.transfer_time import UNCLAMPED_TRANSFERS, TransferTime, TransferTimes


def taught(fixed_s: float, token_s: float, *, noise: float = 0.0, seed: int = 1) -> TransferTime:
    chance = random.Random(seed)
    time = TransferTime()
    for _ in range(200):
        tokens = chance.choice([100, 500, 3000, 12_000])
        seconds = (fixed_s + token_s * tokens) * chance.lognormvariate(0.0, noise)
        time.learn(tokens, seconds)
    return time


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.5])
@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.004, 1e-6), (0.1, 2e-5), (0.5, 1e-7)])
def test_prediction_converges_to_the_median(fixed_s: float, token_s: float, noise: float) -> None:
    found = []
    for seed in range(20):
        time = taught(fixed_s, token_s, noise=noise, seed=seed)
        off = [time.seconds(n) / (fixed_s + token_s * n) for n in (100, 500, 3000, 12_000)]
        found.append(median(off))
    assert sum(0.7 < ratio < 1.3 for ratio in found) >= 18
    assert 0.85 < median(found) < 1.15


def test_prediction_follows_a_changed_link() -> None:
    time = taught(0.01, 1e-6)
    for number in range(150):
        tokens = (100, 500, 3000, 12_000)[number % 4]
        time.learn(tokens, 0.1 + 1e-5 * tokens)
    assert time.seconds(3000) == pytest.approx(0.13, rel=0.3)


def test_one_slow_handshake_moves_the_prediction_little() -> None:
    time = taught(0.02, 1e-6)
    before = time.seconds(3000)
    time.learn(3000, 60.0)
    assert time.seconds(3000) < 1.2 * before


# Pairs


def test_new_pair_uses_the_times_of_all_pairs() -> None:
    times = TransferTimes()
    for _ in range(100):
        times.learn("p0", "d0", 1000, 0.5)
    assert times.estimate_for("p1", "d0") is times.all
    for _ in range(UNCLAMPED_TRANSFERS):
        assert times.estimate_for("p1", "d0") is times.all
        times.learn("p1", "d0", 1000, 0.01)
    assert times.estimate_for("p1", "d0").seconds(1000) == pytest.approx(0.01, rel=0.3)
    assert times.estimate_for("p0", "d0").seconds(1000) == pytest.approx(0.5, rel=0.01)


def test_number_of_pairs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAIRS", 2)
    times = TransferTimes()
    for name in ("p0", "p1", "p2"):
        for _ in range(UNCLAMPED_TRANSFERS):
            times.learn(name, "d0", 1000, 0.5)
    left = [name for name in ("p0", "p1", "p2") if times.estimate_for(name, "d0") is not times.all]
    assert left == ["p1", "p2"]

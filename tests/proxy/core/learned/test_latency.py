"""The learned latency model of a worker."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.learned.latency import FIXED_S, TOKEN_S, LatencyModel, PrefillWork


def taught(fixed: float, token: float, *, noise: float = 0.0, times: int = 200) -> LatencyModel:
    """Return a model taught with prompts of all sizes on a worker of known speed."""
    pace, rng = LatencyModel(), random.Random(1)
    for i in range(times):
        tokens = rng.choice([50, 200, 1000, 8000])
        seconds = (fixed + token * tokens) * rng.uniform(1 - noise, 1 + noise)
        pace.learn_first_token(PrefillWork(tokens), seconds, now=float(i))
    return pace


@pytest.mark.parametrize(("fixed", "token"), [(0.01, 1e-5), (0.05, 1e-3), (0.3, 5e-3)])
def test_short_and_long_prompts_are_predicted(fixed: float, token: float) -> None:
    pace = taught(fixed, token, noise=0.2)
    for tokens in (100, 1000, 8000):
        assert pace.first_token_s(tokens) == pytest.approx(fixed + token * tokens, rel=0.25)


def test_step_times_are_learnt_apart_from_prefill() -> None:
    pace, rng = LatencyModel(), random.Random(1)
    for i in range(300):
        beside = rng.choice([1, 8, 64])
        pace.learn_steps(beside, 0.01 + 0.002 * beside, now=float(i))
    assert pace.step_s(1) == pytest.approx(0.012, rel=0.3)
    assert pace.step_s(64) == pytest.approx(0.138, rel=0.2)
    assert (pace.fixed_s, pace.token_s) == (FIXED_S, TOKEN_S)


def test_passing_share_is_learnt_from_waits_behind_longs() -> None:
    fair, strict = LatencyModel(), LatencyModel()
    for i in range(50):
        for pace, waited in ((fair, 0.1), (strict, 1.0)):
            pace.learn_first_token(PrefillWork(200), 0.02 + 200 * 1e-4, now=float(i))
            seconds = 0.02 + 200 * 1e-4 + waited * 30_000 * 1e-4
            pace.learn_first_token(PrefillWork(200, 30_000), seconds, now=float(i))
    assert fair.long_share == pytest.approx(0.1, abs=0.1)
    assert strict.long_share == pytest.approx(1.0, abs=0.1)


seconds = st.floats(0, 1e6)
tokens = st.floats(0, 1e8)


@given(st.lists(st.tuples(tokens, tokens, seconds), max_size=60))
def test_parameters_stay_positive_and_finite(seen: list[tuple[float, float, float]]) -> None:
    pace = LatencyModel()
    for own, behind, took in seen:
        work = PrefillWork(own, behind, own)
        pace.learn_first_token(work, took, 0.0)
        pace.learn_steps(own, took, 0.0)
        pace.learn_total(work, 1, 10, took, 0.0)
    for part in (pace.fixed_s, pace.token_s, pace.base_s, pace.sequence_s, pace.long_share):
        assert 0 < part < 1e15
    assert pace.long_share <= 1

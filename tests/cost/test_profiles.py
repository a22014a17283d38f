"""The built-in profiles reproduce published figures and name their sources."""

from __future__ import annotations

import re

import pytest

from vllm_sched.cost.profiles import ASSUMED, PROFILES, find
from vllm_sched.cost.step_time import StepShape
from vllm_sched.errors import UsageError


@pytest.mark.parametrize("name", PROFILES)
def test_profile_names_the_source_of_each_figure(name: str) -> None:
    profile = find(name)
    # A title, an address, or a note that the figure is assumed.
    assert re.search(r'"[A-Z].+"|https://', profile.source) or ASSUMED in profile.source
    # Each figure that is neither derived nor from another machine.
    figures = [part for part in profile.source.split(";") if re.search(r"\d (ms|tokens/s)", part)]
    assert figures
    for part in figures:
        assert ASSUMED in part or "https://" in part, part
    assert profile.time.decode_fixed_s > 0
    assert 0.3 < profile.time.prefill_fixed_s / profile.time.decode_fixed_s < 1.3


@pytest.mark.parametrize(
    ("name", "shape", "seconds"),
    [
        ("h200-8b", StepShape(decodes=8), 0.0065),
        ("h200-70b-tp4", StepShape(decodes=8), 0.0162),
        ("h100-70b-tp4", StepShape(decodes=1, context_tokens=1000), 0.0295),
        ("h100-70b-tp4", StepShape(decodes=64, context_tokens=64_000), 0.0524),
        ("h100-70b-tp4", StepShape(prefill_tokens=64), 0.050),
        ("a100-opt-13b", StepShape(prefill_tokens=1000), 0.0221 + 0.1405),
    ],
)
def test_profile_matches_published_step_times(name: str, shape: StepShape, seconds: float) -> None:
    assert find(name).time.seconds(shape) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("h100-8b", 28_000), ("h100-70b-tp4", 12_600), ("a100-70b-tp4", 3_400)],
)
def test_profile_matches_published_prefill_rates(name: str, rate: float) -> None:
    time = find(name).time
    long, short = (time.seconds(StepShape(prefill_tokens=n)) for n in (40_000, 20_000))
    assert 20_000 / (long - short) == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(
    ("name", "more"), [("h100-8b", 1.6), ("h200-8b", 1.6), ("h100-70b-tp4", 0.9)]
)
def test_attention_cost_of_very_long_prompts_matches_theory(name: str, more: float) -> None:
    # 4 x layers x hidden operations a pair, against two a token for each parameter.
    time, tokens = find(name).time, 100_000
    assert time.pair_s * tokens**2 / 2 == pytest.approx(more * time.prefill_s * tokens, rel=0.05)


def test_unknown_profile_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown profile 'tpu'; valid: a100-8b"):
        find("tpu")

"""Estimates of tokens per text, learned from earlier texts."""

from __future__ import annotations

import random
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.learned.bytes_per_token import (
    FIRST_BAND,
    MAX_BYTES_PER_TOKEN,
    MIN_BYTES_PER_TOKEN,
    LearnedSizes,
)


def band(learned: LearnedSizes, text: int) -> float:
    """Return the error bound of an estimate as a share of the estimate."""
    return learned.error(text) / learned.tokens(text)


def holds(learned: LearnedSizes, text: int, tokens: float, within: float = 0.3) -> bool:
    """Return whether an estimate is near the truth and its band includes the truth."""
    off = abs(learned.tokens(text) - tokens)
    return off <= within * tokens and off <= learned.error(text)


@pytest.mark.parametrize("times", [1, 5, 200])
@pytest.mark.parametrize(
    ("text", "tokens"),
    [(2, 29), (19, 34), (48, 40), (2, 700), (200, 740), (2, 0)],
    ids=["hi", "hello", "weather", "a long template", "a long one, and text", "no template"],
)
def test_short_chats_teach_the_template_and_no_rate(text: int, tokens: int, times: int) -> None:
    learned = LearnedSizes()
    for _ in range(times):
        learned.learn_prompt(text, tokens)
    template = tokens - text / 4.5
    for size in (8_000, 20_000, 180_000):
        assert holds(learned, size, template + size / 4.5)
        assert band(learned, size) > 0.4 * FIRST_BAND  # no rate is learned yet
    if times > 1:
        assert learned.tokens(text) == pytest.approx(tokens, rel=0.1, abs=2)


@pytest.mark.parametrize("tools", [150, 3_000, 40_000])
@pytest.mark.parametrize("times", [1, 2, 50])
def test_unprinted_tools_do_not_change_bytes_per_token(tools: int, times: int) -> None:
    learned = LearnedSizes()
    for _ in range(times):
        learned.learn_prompt(8, 5, tools)
    assert holds(learned, 180_000, 40_000)
    if times > 2:
        assert learned.tokens(8, tools) < 30


def test_tools_have_their_own_rate() -> None:
    learned, noise = LearnedSizes(), random.Random(1)
    for _ in range(200):
        text, tools = noise.randint(100, 20_000), noise.choice([2_000, 12_000, 20_000])
        learned.learn_prompt(text, int(text / 4.6 + tools / 3.2 + 12), tools)
    assert learned.tokens(10_000, 12_000) == pytest.approx(10_000 / 4.6 + 12_000 / 3.2, rel=0.05)
    assert learned.tokens(20_000) == pytest.approx(20_000 / 4.6, rel=0.1)


def test_rare_long_chats_are_estimated_accurately() -> None:
    learned, noise = LearnedSizes(), random.Random(1)
    for _ in range(300):
        if noise.random() < 0.05:
            learned.learn_prompt(36_000, 8_029)
        else:
            learned.learn_prompt(48, 40)
    assert learned.tokens(36_000) == pytest.approx(8_029, rel=0.01)
    assert learned.tokens(48) == pytest.approx(40, abs=3)
    assert band(learned, 36_000) < 0.1


def test_new_texts_weigh_more_than_old_texts() -> None:
    learned, noise = LearnedSizes(), random.Random(1)
    for per_token in (4.5, 2.8):
        for _ in range(100):
            text = noise.randint(4_000, 12_000)
            learned.learn_prompt(text, int(text / per_token * noise.uniform(0.9, 1.1)))
        assert learned.bytes_per_token == pytest.approx(per_token, rel=0.05)


def test_each_of_several_prompts_counts_a_template() -> None:
    learned = LearnedSizes()
    for prompts in (1, 10, 100) * 10:
        learned.learn_prompt(400 * prompts, 120 * prompts, prompts=prompts)
    assert learned.tokens(4_000, prompts=10) == pytest.approx(1_200, rel=0.02)
    assert learned.tokens(400) == pytest.approx(120, rel=0.05)


SIZES = st.integers(0, 100_000_000)


@given(
    st.lists(st.tuples(SIZES, st.integers(-(2**20), 2**31), SIZES, st.integers(1, 999)), max_size=9)
)
def test_estimates_stay_finite_and_bounded(prompts: list[tuple[int, int, int, int]]) -> None:
    learned = LearnedSizes()
    for text, tokens, tools, count in prompts:
        learned.learn_prompt(text, tokens, tools, count)
        assert MIN_BYTES_PER_TOKEN <= learned.bytes_per_token <= MAX_BYTES_PER_TOKEN
        assert 0.0 <= learned.spread <= 1.0
        for size in (0, 1, text, 10_000_000):
            assert isfinite(learned.tokens(size, tools, count))
            assert 0.0 <= learned.error(size, tools) < 1e9


@pytest.mark.parametrize(
    ("text", "tokens"), [(2, 700), (200, 740), (1000, 2000), (1500, 3000), (1000, 100), (1900, 700)]
)
def test_one_short_prompt_teaches_its_size(text: int, tokens: int) -> None:
    """What its rate may not explain is the template's."""
    learned = LearnedSizes()
    learned.learn_prompt(text, tokens)
    assert learned.tokens(text) == pytest.approx(tokens, rel=0.05)

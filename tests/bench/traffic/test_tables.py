"""Generators reproduce the quantiles of their tables."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_sched.bench.traffic.tables import PERCENTS, TABLES, Quantiles

# Published means, which the tables do not contain.
MEANS = {
    "azure-conv": (1155, 211),
    "azure-code": (2048, 28),
    "mooncake-conv": (12035, 343),
    "mooncake-synthetic": (15325, 149),
    "sharegpt-like": (217, 200),
}
PUBLISHED = {
    "azure-conv": ((181, 396, 1020, 1189, 2734, 4083, 4142), (41, 85, 129, 395, 424, 451, 601)),
    "azure-code": ((75, 578, 1469, 2744, 5188, 7303, 7436), (6, 9, 13, 24, 55, 90, 251)),
    "mooncake-conv": (
        (901, 2306, 6909, 15367, 27367, 39550, 85400),
        (10, 156, 350, 472, 597, 698, 1119),
    ),
    "mooncake-synthetic": (
        (22, 277, 11587, 23175, 38611, 48905, 66456),
        (2, 11, 69, 250, 389, 519, 768),
    ),
}
DRAWN = 20_000


@pytest.mark.parametrize("name", TABLES)
def test_table_means_match_published(name: str) -> None:
    table = TABLES[name]
    assert (table.prompt.mean, table.output.mean) == pytest.approx(MEANS[name], rel=0.05)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("seed", [0, 1])
def test_drawn_lengths_have_the_published_quantiles(name: str, seed: int) -> None:
    requests = list(islice(TABLES[name].requests(random.Random(seed)), DRAWN))
    drawn = ([r.prompt_tokens for r in requests], [r.output_tokens for r in requests])
    for lengths, published in zip(drawn, PUBLISHED[name], strict=True):
        for percent, value in zip(PERCENTS, published, strict=True):
            # Compare shares, because lengths differ a lot where the table is steep.
            below = sum(length < value for length in lengths) / DRAWN
            at_most = sum(length <= value for length in lengths) / DRAWN
            assert below - 0.012 <= percent / 100 <= at_most + 0.012


@given(
    st.lists(st.integers(1, 10**6), min_size=7, max_size=7).map(sorted),
    st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted),
)
def test_any_table_is_monotonic_and_meets_its_quantiles(
    values: list[int], shares: list[float]
) -> None:
    table = Quantiles(*values)
    assert table.at(shares[0]) <= table.at(shares[1])
    for percent, value in zip(PERCENTS, values, strict=True):
        assert table.at(percent / 100) == value
    assert 1 <= table.at(0.0) <= values[0]
    assert values[-1] <= table.at(1.0) <= 1.5 * values[-1] + 1


@given(st.lists(st.integers(1, 10**5), min_size=7, max_size=7).map(sorted))
def test_computed_mean_matches_the_sampled_mean(values: list[int]) -> None:
    table = Quantiles(*values)
    drawn = [table.at((i + 0.5) / 4000) for i in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(table.mean, rel=0.01, abs=0.5)


def test_input_and_output_are_independent() -> None:
    requests = list(islice(TABLES["azure-conv"].requests(random.Random(3)), DRAWN))
    long = [r.output_tokens for r in requests if r.prompt_tokens > 2734]
    assert sum(output <= 129 for output in long) / len(long) == pytest.approx(0.5, abs=0.04)

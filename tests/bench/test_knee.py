from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_sched.bench.knee import (
    explore_concurrencies,
    explore_rates,
    served_rate,
    throughput_knee,
)


@given(st.floats(1 / 8, 1000), st.floats(0.5, 4))
async def test_a_capacity_within_reach_is_closed_in_on(times: float, start: float) -> None:
    capacity = times * start
    shares: dict[float, float] = {}

    async def measure(rate: float) -> float:
        shares[rate] = min(1.0, capacity / rate)
        return shares[rate]

    await explore_rates(measure, start)
    served = served_rate(shares)
    limit = capacity / 0.9
    assert len(shares) <= 16
    assert served is not None
    assert served <= limit * 1.001
    # Within the fourth root of two, but for rounding to three digits.
    assert served >= limit / 1.2


async def test_a_server_that_serves_nothing_is_given_up_on() -> None:
    asked: list[float] = []

    async def measure(rate: float) -> float:
        asked.append(rate)
        return 0.0

    await explore_rates(measure, 1.0)
    assert asked == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert served_rate(dict.fromkeys(asked, 0.0)) is None


async def test_a_server_without_limit_ends_the_search_too() -> None:
    asked: list[float] = []

    async def measure(rate: float) -> float:
        asked.append(rate)
        return 1.0

    await explore_rates(measure, 1.0)
    assert len(asked) <= 16


@pytest.mark.parametrize(("slots", "knee"), [(1, 1), (8, 8), (100, 128)])
async def test_concurrency_doubles_until_it_gains_nothing(slots: int, knee: int) -> None:
    found: dict[float, float] = {}

    async def measure(concurrency: float) -> float:
        found[concurrency] = min(concurrency, slots) * 10.0
        return found[concurrency]

    await explore_concurrencies(measure)
    assert throughput_knee(found) == knee
    assert max(found) <= 4 * knee


async def test_one_bad_run_does_not_end_the_search() -> None:
    found: dict[float, float] = {}

    async def measure(concurrency: float) -> float:
        found[concurrency] = 5.0 if concurrency == 4 else min(concurrency, 32) * 10.0
        return found[concurrency]

    await explore_concurrencies(measure)
    assert throughput_knee(found) == 32


def test_a_rate_counts_only_if_all_below_it_are_served() -> None:
    assert served_rate({1: 1.0, 2: 0.5, 4: 0.95}) == 1
    assert served_rate({}) is None
    assert throughput_knee({}) is None

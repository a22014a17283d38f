from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.present import present
from vllm_sched.bench.results.knee import (
    explore_concurrencies,
    explore_rates,
    kept_up,
    served_rate,
    throughput_knee,
)
from vllm_sched.bench.results.outcome import Outcome


class Asked(dict[float, float]):
    """The measurements of a server, by load."""

    def __init__(self, found: Callable[[float], float]) -> None:
        self._found = found

    async def measure(self, load: float) -> float:
        """Return what is found at a load."""
        self[load] = self._found(load)
        return self[load]


@given(st.floats(1 / 8, 1000), st.floats(0.5, 4))
async def test_a_capacity_within_reach_is_closed_in_on(times: float, start: float) -> None:
    capacity = times * start
    shares = Asked(lambda rate: min(1.0, capacity / rate))
    await explore_rates(shares.measure, start)
    served = present(served_rate(shares))
    limit = capacity / 0.9
    assert len(shares) <= 16
    assert served <= limit * 1.001
    # Within the fourth root of two, but for rounding to three digits.
    assert served >= limit / 1.2


async def test_a_server_that_serves_nothing_is_given_up_on() -> None:
    asked = Asked(lambda _: 0.0)
    await explore_rates(asked.measure, 1.0)
    assert [*asked] == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert served_rate(asked) is None


@pytest.mark.parametrize(("share", "played"), [(0.0, [4.0, 2.0, 1.0]), (1.0, [4.0, 8.0, 16.0])])
async def test_no_rate_is_played_at_which_nobody_or_too_many_would_come(
    share: float, played: list[float]
) -> None:
    asked = Asked(lambda _: share)
    await explore_rates(asked.measure, 4.0, least=0.6, most=30.0)
    assert [*asked] == played


async def test_a_server_without_limit_ends_the_search_too() -> None:
    asked = Asked(lambda _: 1.0)
    await explore_rates(asked.measure, 1.0)
    assert len(asked) <= 16


@pytest.mark.parametrize(("slots", "knee"), [(1, 1), (8, 8), (100, 128)])
async def test_concurrency_doubles_until_it_gains_nothing(slots: int, knee: int) -> None:
    found = Asked(lambda concurrency: min(concurrency, slots) * 10.0)
    await explore_concurrencies(found.measure)
    assert throughput_knee(found) == knee
    assert max(found) <= 4 * knee


async def test_one_bad_run_does_not_end_the_search() -> None:
    found = Asked(lambda concurrency: 5.0 if concurrency == 4 else min(concurrency, 32) * 10.0)
    await explore_concurrencies(found.measure)
    assert throughput_knee(found) == 32


async def test_where_nothing_is_answered_the_search_ends_and_finds_no_knee() -> None:
    found = Asked(lambda _: 0.0)
    await explore_concurrencies(found.measure)
    assert list(found) == [1, 2]
    assert throughput_knee(found) is None


def test_a_rate_counts_only_if_all_below_it_are_served() -> None:
    assert served_rate({1: 1.0, 2: 0.5, 4: 0.95}) == 1
    assert served_rate({}) is None
    assert throughput_knee({}) is None


def test_a_throughput_that_still_grows_has_no_knee() -> None:
    assert throughput_knee({1: 10.0, 2: 20.0}) is None
    assert throughput_knee({4: 10.0}) is None
    assert throughput_knee({1: 10.0, 2: 19.5, 4: 20.0}) == 2


def answers(latency: Callable[[float], float], failed: bool = False) -> list[Outcome]:
    """Ask each second for a minute."""
    return [
        Outcome(
            float(at), "a", 10, 5, sent=at, ticks=[at + latency(at)], error="no" if failed else ""
        )
        for at in range(60)
    ]


def test_a_rate_is_kept_up_with_while_later_requests_take_no_longer() -> None:
    rng = random.Random(3)
    # The last answer comes 20 s after the last request: that says nothing.
    assert kept_up(answers(lambda _: rng.uniform(4, 20))) > 0.9
    # A server of 0.8 requests/s: each second of arrivals leaves a quarter of one to be waited for.
    assert kept_up(answers(lambda at: 3 + at / 4)) == pytest.approx(0.8)
    assert kept_up(answers(lambda at: 30 - at / 4)) == 1.0
    assert kept_up(answers(lambda at: at, failed=True)) == kept_up([]) == 1.0

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


class MeasuredServer(dict[float, float]):
    def __init__(self, found: Callable[[float], float]) -> None:
        self._found = found

    async def measure(self, load: float) -> float:
        self[load] = self._found(load)
        return self[load]


@given(st.floats(1 / 8, 1000), st.floats(0.5, 4))
async def test_search_finds_the_capacity(times: float, start: float) -> None:
    capacity = times * start
    shares = MeasuredServer(lambda rate: min(1.0, capacity / rate))
    await explore_rates(shares.measure, start)
    served = present(served_rate(shares))
    limit = capacity / 0.9
    assert len(shares) <= 16
    assert served <= limit * 1.001
    # Within the fourth root of two, plus rounding to three digits.
    assert served >= limit / 1.2


@pytest.mark.parametrize(("share", "played"), [(0.0, [4.0, 2.0, 1.0]), (1.0, [4.0, 8.0, 16.0])])
async def test_search_stays_between_least_and_most(share: float, played: list[float]) -> None:
    server = MeasuredServer(lambda _: share)
    await explore_rates(server.measure, 4.0, min_rate=0.6, max_rate=30.0)
    assert [*server] == played


async def test_searches_end_if_the_server_serves_nothing_or_everything() -> None:
    nothing, silent = MeasuredServer(lambda _: 0.0), MeasuredServer(lambda _: 0.0)
    everything = MeasuredServer(lambda _: 1.0)
    await explore_rates(nothing.measure, 1.0)
    assert [*nothing] == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert served_rate(nothing) is None
    await explore_rates(everything.measure, 1.0)
    assert len(everything) <= 16
    await explore_concurrencies(silent.measure)
    assert list(silent) == [1, 2]
    assert throughput_knee(silent) is None


def test_served_rate_requires_all_lower_rates_and_a_knee_no_growth() -> None:
    assert served_rate({1: 1.0, 2: 0.5, 4: 0.95}) == 1
    assert served_rate({}) is None
    for growing in ({}, {1: 10.0, 2: 20.0}, {4: 10.0}):
        assert throughput_knee(growing) is None
    assert throughput_knee({1: 10.0, 2: 19.5, 4: 20.0}) == 2


@pytest.mark.parametrize(("slots", "knee"), [(1, 1), (8, 8), (100, 128)])
async def test_concurrency_doubles_until_throughput_stops_growing(slots: int, knee: int) -> None:
    server = MeasuredServer(lambda concurrency: min(concurrency, slots) * 10.0)
    await explore_concurrencies(server.measure)
    assert throughput_knee(server) == knee
    assert max(server) <= 4 * knee


async def test_one_bad_run_does_not_end_the_search() -> None:
    server = MeasuredServer(
        lambda concurrency: 5.0 if concurrency == 4 else min(concurrency, 32) * 10.0
    )
    await explore_concurrencies(server.measure)
    assert throughput_knee(server) == 32


def answers(latency: Callable[[float], float], failed: bool = False) -> list[Outcome]:
    """Return outcomes of one request per second for a minute."""
    return [
        Outcome(
            float(at), "a", 10, 5, sent=at, ticks=[at + latency(at)], error="no" if failed else ""
        )
        for at in range(60)
    ]


def test_kept_up_compares_latencies_of_early_and_late_requests() -> None:
    rng = random.Random(3)
    # The last answer comes 20 s after the last request, which is no sign of a backlog.
    assert kept_up(answers(lambda _: rng.uniform(4, 20))) > 0.9
    # A server of 0.8 requests/s: latency grows by a quarter second per second.
    assert kept_up(answers(lambda at: 3 + at / 4)) == pytest.approx(0.8)
    assert kept_up(answers(lambda at: 30 - at / 4)) == 1.0
    assert kept_up(answers(lambda at: at, failed=True)) == kept_up([]) == 1.0

"""The search for the highest rate that all draws sustain."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from tests.present import present
from vllm_sched.sim.engines.quantile_sketch import QuantileSketch
from vllm_sched.sim.fleet.figures import ClassFigures, FlowResult, merge_results
from vllm_sched.sim.planning.capacity_search import (
    RUNG_RATIO,
    CapacitySearch,
    CapacityVerdict,
    rate_at,
)
from vllm_sched.sim.planning.fleet_shapes import FleetShape

SHAPE = FleetShape(general=1)


def run(met: int = 9, growth: float = 0.0) -> FlowResult:
    """Return the result of ten requests."""
    figures = ClassFigures(arrived=10, done=10, met=met)
    return FlowResult(
        figures, {"long": ClassFigures(arrived=1, kept=1)}, 1.0, 2.0, QuantileSketch(), growth
    )


@dataclass
class Draws:
    """Draws that sustain rates up to a limit, and one more by luck."""

    limits: dict[int, float]
    lucky: dict[int, float] = field(default_factory=dict)
    played: list[tuple[float, int]] = field(default_factory=list)

    def play(self, _shape: FleetShape, rate: float, draw: int) -> FlowResult | None:
        self.played.append((rate, draw))
        near = abs(rate / self.lucky.get(draw, 1e-9) - 1) < 0.02
        return run() if rate <= self.limits[draw] or near else None

    def highest(
        self, start: float, min_rate: float = 0.0, max_rate: float = 1e9, alike: float = 1e9
    ) -> CapacityVerdict | None:
        """Return the verdict; merged results suffice up to rate `alike`."""
        judge = CapacitySearch(
            [*self.limits], self.play, lambda _whole: self.played[-1][0] <= alike
        )  # fmt: skip
        return judge.highest(SHAPE, start, min_rate=min_rate, max_rate=max_rate)


@pytest.mark.parametrize("start", [3.0, 10.0, 11.9, 40.0])
def test_rate_that_one_draw_sustains_by_luck_is_not_returned(start: float) -> None:
    # Draws 1 and 2 sustain a high rate by luck, as seen in `plan`.
    draws = Draws({1: 14.0, 2: 13.0, 3: 15.0, 4: 18.5}, lucky={1: 17.9, 2: 16.2})
    found = present(draws.highest(start))
    assert 13.0 / RUNG_RATIO < found.rate <= 13.0
    assert len(found.runs) == 4
    assert (found.run.all.arrived, found.run.all.met) == (40, 36)


def test_search_replays_the_draw_that_failed() -> None:
    draws = Draws({1: 90.0, 2: 90.0, 3: 90.0, 4: 10.0})
    judge = CapacitySearch([1, 2, 3, 4], draws.play, lambda _whole: True)
    assert judge.highest(FleetShape(general=2), 20.0) is not None
    del draws.played[:]
    present(judge.highest(SHAPE, 20.0))
    # Bisection over 24 rungs with one draw, then the other three draws at the result.
    assert [draw for _, draw in draws.played[-3:]] == [1, 2, 3]
    assert {draw for _, draw in draws.played[:-3]} == {4}
    assert len(draws.played) <= 10 + 3


def test_search_plays_the_draw_with_the_least_margin_first() -> None:
    limits = {1: 90.0, 2: 90.0, 3: 90.0, 4: 90.0, 5: 12.0, 6: 12.0}
    played: list[int] = []

    def play(_shape: FleetShape, rate: float, draw: int) -> FlowResult | None:
        played.append(draw)
        return run(9 if rate > limits[draw] / 2 else 10) if rate <= limits[draw] else None

    judge = CapacitySearch([1, 2, 3, 4, 5, 6], play, lambda _whole: True)
    assert judge.highest(FleetShape(general=2), 13.0) is not None
    del played[:]
    limits[6] = 11.0  # another fleet may differ
    found = present(judge.highest(SHAPE, 13.0))
    assert 11.0 / RUNG_RATIO < found.rate <= 11.0
    # The first four are not played at rates that the sixth fails.
    assert sorted(played[-6:]) == [1, 2, 3, 4, 5, 6]
    assert set(played[:-6]) == {5, 6}


def test_returned_rate_respects_least_and_most() -> None:
    draws = Draws({1: 20.0, 2: 10.0})
    assert draws.highest(30.0, min_rate=10.1) is None
    assert min(rate for rate, _ in draws.played) >= 10.1
    assert draws.highest(1.0, min_rate=12.0, max_rate=11.0) is None
    found = present(draws.highest(30.0, max_rate=7.0))
    assert 7.0 / RUNG_RATIO < found.rate <= 7.0
    at_least = present(draws.highest(1.0, min_rate=9.6))
    assert at_least.rate >= 9.6


def test_no_run_is_repeated() -> None:
    draws = Draws({1: 90.0, 2: 10.0, 3: 90.0})
    judge = CapacitySearch([3, 1, 2], draws.play, lambda _whole: True)
    first = present(judge.highest(SHAPE, 20.0))
    assert draws.played[0][1] == 3  # in the given order
    assert len(set(draws.played)) == len(draws.played)
    del draws.played[:]
    assert present(judge.highest(SHAPE, first.rate)).rate == first.rate
    assert draws.played == []


def test_merged_results_must_suffice() -> None:
    found = Draws({1: 20.0, 2: 20.0}).highest(30.0, alike=12.0)
    assert 12.0 / RUNG_RATIO < present(found).rate <= 12.0


def test_search_ends_if_no_rate_is_sustained() -> None:
    draws = Draws({1: 0.0})
    assert draws.highest(1.0) is None
    assert len(draws.played) < 1000


def test_rates_have_three_significant_digits() -> None:
    rates = [rate_at(rung) for rung in range(-150, 300)]
    assert all(rate == float(f"{rate:.3g}") for rate in rates)
    assert all(1.02 < high / low < 1.04 for low, high in pairwise(rates))


def test_merged_results_keep_the_worst_queue_growth() -> None:
    whole = merge_results([run(9, 0.01), run(7, 0.05)])
    assert (whole.all.arrived, whole.all.met, whole.growth) == (20, 16, 0.05)
    assert whole.classes["long"].arrived == 2
    assert (whole.span_s, whole.duration_s, whole.rate) == (2.0, 4.0, 10.0)


def test_start_far_below_the_rate_takes_few_runs() -> None:
    draws = Draws(dict.fromkeys(range(1, 7), 100.0))
    found = present(draws.highest(20.0))  # 54 rungs below
    assert 100.0 / RUNG_RATIO < found.rate <= 100.0
    assert len(draws.played) < 25


def test_draw_far_below_the_first_takes_few_runs() -> None:
    draws = Draws({1: 100.0, 2: 100.0, 3: 20.0})
    found = present(draws.highest(95.0))
    assert 20.0 / RUNG_RATIO < found.rate <= 20.0  # 54 rungs below
    assert len(draws.played) < 25


@pytest.mark.parametrize(("count", "limit"), [(1, 10.0), (2, 10.0), (None, 7.0)])
def test_few_draws_are_those_that_failed_last(count: int | None, limit: float) -> None:
    draws = Draws({1: 90.0, 2: 10.0, 3: 90.0, 4: 90.0})
    # All draws together have too few requests in time above 7.
    judge = CapacitySearch([1, 2, 3, 4], draws.play, lambda _whole: draws.played[-1][0] <= 7.0)
    assert judge.highest(FleetShape(general=2), 20.0) is not None  # the second fails last
    del draws.played[:]
    found = present(judge.highest(SHAPE, 9.0, draws=count))
    assert limit / RUNG_RATIO < found.rate <= limit
    assert len(found.runs) == len({draw for _, draw in draws.played}) == (count or 4)
    assert draws.played[0][1] == 2
    assert judge.highest(SHAPE, 9.0, min_rate=11.0, draws=1) is None

"""The exact recursion, against the simulation and against itself."""

from __future__ import annotations

import math
import random

import pytest

from vllm_sched.cost.backlog_model import BacklogModel, expected_batch
from vllm_sched.cost.recursion import Recursion, binomial


def model(*, decodes_pause: bool, slots: int = 32, mean_output: float = 40.0) -> BacklogModel:
    return BacklogModel(slots, mean_output, 0.010, 1e-4, 0.008, 0.005, decodes_pause=decodes_pause)


@pytest.mark.parametrize(
    ("trials", "chance"), [(0, 0.5), (1, 0.1), (40, 0.025), (1000, 0.5), (3, 1.0)]
)
def test_binomial_distribution_is_exact(trials: int, chance: float) -> None:
    least, row = binomial(trials, chance)
    assert math.fsum(row) == pytest.approx(1.0)
    mean = math.fsum(count * share for count, share in enumerate(row, least))
    assert mean == pytest.approx(trials * chance)
    for count, share in enumerate(row, least):
        if trials < 100:
            exact = math.comb(trials, count) * chance**count * (1 - chance) ** (trials - count)
            assert share == pytest.approx(exact, abs=1e-12)


def test_two_slots_match_a_calculation_by_hand() -> None:
    # From two active: two depart (1/4), one (1/2) or none (1/4), in a step of 10 ms + 1 ms each.
    system = BacklogModel(2, 2.0, 0.010, 0.001, 0.008, 0.005, decodes_pause=True)
    at_one = Recursion(system).solve_for(1)
    assert at_one.steps == pytest.approx(4 / 3)
    assert at_one.batch == pytest.approx(4 / 3)
    seconds = 4 / 3 * 0.012 + 0.008 + 4 / 3 * 0.005
    assert at_one.throughput == pytest.approx(4 / 3 / seconds)
    at_two = Recursion(system).solve_for(2)
    assert at_two.batch == pytest.approx(2.0)
    # With one left, two more steps on average; that happens in 2 of 3 cases.
    assert at_two.steps == pytest.approx(4 / 3 + 2 / 3 * 2)


@pytest.mark.parametrize("decodes_pause", [True, False])
@pytest.mark.parametrize("threshold", [1, 4, 16, 32])
def test_departures_follow_littles_law(decodes_pause: bool, threshold: int) -> None:
    system = model(decodes_pause=decodes_pause)
    found = Recursion(system).solve_for(threshold)
    # Little's law: departures per step are active slots over the mean output.
    steps = found.steps + (0 if decodes_pause else 1)
    assert found.batch == pytest.approx(steps * found.active / system.mean_output, rel=1e-6)


@pytest.mark.parametrize("decodes_pause", [True, False])
def test_best_threshold_is_the_maximum_over_all(decodes_pause: bool) -> None:
    exact = Recursion(model(decodes_pause=decodes_pause))
    rates = [exact.solve_for(k).throughput for k in range(1, 33)]
    assert exact.best() == 1 + rates.index(max(rates))


def test_outputs_of_one_token_depart_together() -> None:
    found = Recursion(model(decodes_pause=True, mean_output=1.0)).solve_for(5)
    assert found.batch == 32
    assert found.steps == 1


@pytest.mark.parametrize("prompts", [1, 3, 20])
def test_expected_batch_time_above_a_floor_matches_sampling(prompts: int) -> None:
    system = BacklogModel(32, 40.0, 0.010, 1e-4, 0.008, 0.005, floor_s=0.025)
    rng = random.Random(1)
    drawn = [
        max(0.025, 0.008 + 0.005 * sum(rng.expovariate(1.0) for _ in range(prompts)))
        for _ in range(20_000)
    ]
    assert expected_batch(system, prompts) == pytest.approx(math.fsum(drawn) / 20_000, rel=0.01)
    assert expected_batch(system, prompts) >= system.batch_seconds(prompts)


def test_expected_batch_time_without_a_floor_uses_the_mean_length() -> None:
    system = model(decodes_pause=True)
    assert expected_batch(system, 7) == system.batch_seconds(7)

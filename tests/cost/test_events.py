"""The simulation of the closed system."""

from __future__ import annotations

import pytest

from vllm_sched.cost.events import play
from vllm_sched.cost.recursion import Recursion
from vllm_sched.cost.regime import Regime


def paper(*, decodes_pause: bool = True) -> Regime:
    """Return the theory's example."""
    return Regime(256, 200.0, 0.010, 6e-5, 0.012, 0.0209, decodes_pause=decodes_pause)


@pytest.mark.parametrize("decodes_pause", [True, False])
@pytest.mark.parametrize("threshold", [1, 13, 26, 128, 256])
@pytest.mark.parametrize("seed", [0, 1])
def test_throughput_is_within_one_percent_of_the_recursion(
    decodes_pause: bool, threshold: int, seed: int
) -> None:
    regime = paper(decodes_pause=decodes_pause)
    played = play(regime, threshold, requests=20_000, seed=seed)
    exact = Recursion(regime).at(threshold)
    assert played.throughput == pytest.approx(exact.throughput, rel=0.01)


@pytest.mark.parametrize("decodes_pause", [True, False])
def test_small_systems_are_within_one_percent_of_the_recursion(decodes_pause: bool) -> None:
    regime = Regime(16, 20.0, 0.005, 1e-4, 0.004, 0.001, decodes_pause=decodes_pause)
    for threshold in (1, 3, 8):
        played = play(regime, threshold, requests=60_000)
        assert played.throughput == pytest.approx(
            Recursion(regime).at(threshold).throughput, rel=0.01
        )


@pytest.mark.parametrize("decodes_pause", [True, False])
@pytest.mark.parametrize("mean_output", [1.0, 2.0, 10.0])
def test_runs_of_few_long_rounds_count_whole_rounds(
    decodes_pause: bool, mean_output: float
) -> None:
    """With forty rounds, the prompts of one are more than two percent of the total."""
    regime = Regime(256, mean_output, 0.006, 2e-4, 0.006, 0.0316, decodes_pause=decodes_pause)
    exact = Recursion(regime)
    for threshold in (1, 75, 256):
        played = play(regime, threshold, requests=10_000)
        assert played.throughput == pytest.approx(exact.at(threshold).throughput, rel=0.01)


def test_itl_p99_grows_with_the_threshold_as_published() -> None:
    alike = [play(paper(), k, alike=True).itl_p99_s for k in (1, 13, 26)]
    assert alike == pytest.approx([0.121, 0.351, 0.602], rel=0.02)
    spread = [play(paper(), k).itl_p99_s for k in (1, 13, 26)]
    assert all(wide > narrow for wide, narrow in zip(spread, alike, strict=True))


def test_completion_time_matches_the_paper() -> None:
    at_once, best = play(paper(), 1), play(paper(), 26)
    assert best.served_s / at_once.served_s == pytest.approx(0.86, abs=0.01)
    assert best.completion_s / at_once.completion_s == pytest.approx(1 / 1.143, abs=0.01)


def test_same_seed_gives_the_same_run() -> None:
    assert play(paper(), 5, requests=2000, seed=3) == play(paper(), 5, requests=2000, seed=3)
    assert play(paper(), 5, requests=2000, seed=3) != play(paper(), 5, requests=2000, seed=4)


def test_single_slot_matches_a_calculation_by_hand() -> None:
    # One slot: a step of 10 ms per token, and 30 ms of prefill that delays no other request.
    regime = Regime(1, 5.0, 0.010, 0.0, 0.010, 0.020, decodes_pause=True)
    played = play(regime, 1, requests=1000, alike=True)
    assert played.itl_max_s == pytest.approx(0.010)
    assert played.throughput == pytest.approx(1 / (5 * 0.010 + 0.030), rel=0.01)


@pytest.mark.parametrize("decodes_pause", [True, False])
def test_free_prefill_still_admits_prompts(decodes_pause: bool) -> None:
    regime = Regime(16, 20.0, 0.005, 1e-4, 0.0, 0.0, decodes_pause=decodes_pause)
    for threshold in (1, 4):
        played = play(regime, threshold)
        assert played.throughput == pytest.approx(
            Recursion(regime).at(threshold).throughput, rel=0.01
        )

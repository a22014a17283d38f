"""The simulation of the closed system."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_sched.cost.backlog_model import BacklogModel
from vllm_sched.cost.backlog_simulation import simulate_backlog
from vllm_sched.cost.recursion import Recursion


def paper(*, decodes_pause: bool = True) -> BacklogModel:
    """Return the theory's example."""
    return BacklogModel(256, 200.0, 0.010, 6e-5, 0.012, 0.0209, decodes_pause=decodes_pause)


SYSTEMS = {
    "paper": (paper(), (1, 13, 26, 128, 256), 20_000),
    "small": (BacklogModel(16, 20.0, 0.005, 1e-4, 0.004, 0.001), (1, 3, 8), 60_000),
    "free prefill": (BacklogModel(16, 20.0, 0.005, 1e-4, 0.0, 0.0), (1, 4), 40_000),
    # With forty rounds, the prompts of one are more than two percent of the total.
    **{
        f"few long rounds, {mean:g} tokens": (
            BacklogModel(256, mean, 0.006, 2e-4, 0.006, 0.0316), (1, 75, 256), 10_000
        )
        for mean in (1.0, 2.0, 10.0)
    },
}  # fmt: skip


@pytest.mark.parametrize("decodes_pause", [True, False])
@pytest.mark.parametrize("name", SYSTEMS)
def test_throughput_is_within_one_percent_of_the_recursion(name: str, decodes_pause: bool) -> None:
    system, thresholds, requests = SYSTEMS[name]
    model = replace(system, decodes_pause=decodes_pause)
    exact = Recursion(model)
    for threshold in thresholds:
        played = simulate_backlog(model, threshold, requests=requests)
        assert played.throughput == pytest.approx(exact.solve_for(threshold).throughput, rel=0.01)
    again, other = (simulate_backlog(model, 3, requests=500, seed=seed) for seed in (0, 1))
    assert again == simulate_backlog(model, 3, requests=500, seed=0) != other


def test_itl_p99_grows_with_the_threshold_as_published() -> None:
    alike = [simulate_backlog(paper(), k, equal_prompts=True).itl_p99_s for k in (1, 13, 26)]
    assert alike == pytest.approx([0.121, 0.351, 0.602], rel=0.02)
    spread = [simulate_backlog(paper(), k).itl_p99_s for k in (1, 13, 26)]
    assert all(wide > narrow for wide, narrow in zip(spread, alike, strict=True))


def test_completion_time_matches_the_paper() -> None:
    at_once, best = simulate_backlog(paper(), 1), simulate_backlog(paper(), 26)
    assert best.served_s / at_once.served_s == pytest.approx(0.86, abs=0.01)
    assert best.completion_s / at_once.completion_s == pytest.approx(1 / 1.143, abs=0.01)


def test_single_slot_matches_a_calculation_by_hand() -> None:
    # One slot: a step of 10 ms per token, and 30 ms of prefill that delays no other request.
    model = BacklogModel(1, 5.0, 0.010, 0.0, 0.010, 0.020, decodes_pause=True)
    played = simulate_backlog(model, 1, requests=1000, equal_prompts=True)
    assert played.itl_max_s == pytest.approx(0.010)
    assert played.throughput == pytest.approx(1 / (5 * 0.010 + 0.030), rel=0.01)

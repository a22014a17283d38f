"""The threshold in closed form, against the exact recursion and against theory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.cost.linear_times import LINEAR_70B
from vllm_sched.cost.backlog_model import BacklogModel
from vllm_sched.cost.recursion import Recursion
from vllm_sched.cost.step_time import StepTime
from vllm_sched.cost.threshold import (
    asymptotic,
    closed_form,
    lower_lambert,
    recommended,
)

# The theory's example: an 8B model on an A100, with ShareGPT's lengths.
A100_8B = StepTime(
    decode_fixed_s=0.010,
    decode_s=6e-5,
    prefill_fixed_s=0.012,
    prefill_s=9.5e-5,
    mixed_s=0.0,
)


def paper(**changes: float) -> BacklogModel:
    """Return the paper's model, with separate prefill and decode steps."""
    time = StepTime(**{**A100_8B.to_json(), **changes})
    return BacklogModel.from_step_time(
        time, slots=256, mean_output=200, mean_prompt=220, decodes_pause=True
    )


def mixed(delta: float, *, slots: int = 256, mean_output: float = 200) -> BacklogModel:
    """Return vLLM V1's model, with mixed steps."""
    time = StepTime(**{**A100_8B.to_json(), "mixed_s": delta})
    return BacklogModel.from_step_time(time, slots=slots, mean_output=mean_output, mean_prompt=220)


@pytest.mark.parametrize("exponent", [1e-12, 1e-6, 0.006, 0.5, 1.0, 30.0, 1e6])
def test_lower_lambert_solves_its_equation(exponent: float) -> None:
    w = lower_lambert(exponent)
    assert w <= -1
    # w e^w = -exp(-1 - exponent), in logarithms.
    assert math.log(-w) + w == pytest.approx(-1 - exponent, rel=1e-9)
    assert lower_lambert(0.0) == -1.0  # the branch point


def test_paper_regime_gains_thirteen_percent() -> None:
    model = paper(prefill_fixed_s=0.011)
    exact = Recursion(model)
    best = closed_form(model)
    gain = exact.solve_for(best).throughput / exact.solve_for(1).throughput
    assert gain == pytest.approx(1.130, abs=0.002)
    assert model.gain(best) == pytest.approx(gain, abs=0.005)


def test_example_of_the_theory() -> None:
    model = paper()
    assert closed_form(model) == 26
    assert asymptotic(model) == pytest.approx(26, abs=0.5)
    exact = Recursion(model)
    assert exact.solve_for(1).throughput == pytest.approx(21.1, abs=0.05)
    assert exact.solve_for(26).throughput == pytest.approx(24.1, abs=0.05)
    assert model.mean_departures == pytest.approx(1.77, abs=0.01)
    # Half of the best keeps 99.5 %.
    assert exact.solve_for(13).throughput > 0.994 * exact.solve_for(26).throughput
    assert recommended(model) == 13
    # Variable costs do not change the threshold.
    assert closed_form(paper(prefill_s=1e-3)) == closed_form(paper(decode_s=1e-3)) == 26


FIXED = {
    f"fixed {cost}": replace(A100_8B, prefill_fixed_s=cost, mixed_s=cost)
    for cost in (0.0, 0.0005, 0.003, 0.012, 0.060)
}
FLOORS = {
    f"floor {floor}": StepTime(
        decode_fixed_s=0.010, decode_s=1e-4, prefill_fixed_s=0.011, mixed_s=0.002, prefill_s=1e-4,
        floor_s=floor,
    )
    for floor in (0.02, 0.05, 0.1)
}  # fmt: skip


@pytest.mark.parametrize("decodes_pause", [True, False])
@pytest.mark.parametrize(
    ("slots", "mean_output"),
    # 256 slots with 3 tokens take 10 s.
    [(slots, mean) for slots in (4, 32) for mean in (3.0, 16.0, 100.0, 1000.0)]
    + [(64, 3.0), (256, 16.0), (256, 100.0), (256, 1000.0)],
)
@pytest.mark.parametrize("name", FIXED | FLOORS)
def test_closed_form_loses_at_most_one_percent(
    decodes_pause: bool, slots: int, mean_output: float, name: str
) -> None:
    model = BacklogModel.from_step_time(
        (FIXED | FLOORS)[name],
        slots=slots, mean_output=mean_output, mean_prompt=220, decodes_pause=decodes_pause,
    )  # fmt: skip
    exact = Recursion(model)
    best, found = exact.best(), closed_form(model)
    assert abs(found - best) <= 1 or (
        exact.solve_for(found).throughput >= 0.99 * exact.solve_for(best).throughput
    )
    if name in FIXED:
        assert abs(asymptotic(model) - found) <= 1.0


def test_free_mixed_steps_defer_nothing() -> None:
    model = mixed(0.0)
    assert closed_form(model) == 1
    assert asymptotic(model) == 1.0
    assert recommended(model) == 1
    exact = Recursion(model)
    assert exact.best() == 1
    assert exact.solve_for(64).throughput < 0.98 * exact.solve_for(1).throughput
    assert exact.solve_for(128).throughput < 0.94 * exact.solve_for(1).throughput
    assert model.gain(64) == pytest.approx(
        exact.solve_for(64).throughput / exact.solve_for(1).throughput, abs=0.005
    )


def test_small_gain_and_single_slot_give_threshold_one() -> None:
    found = [closed_form(mixed(delta)) for delta in (0.0, 0.001, 0.004, 0.016, 0.064)]
    assert found == sorted(set(found))
    single = BacklogModel(1, 10.0, 0.01, 0.0, 0.01, 0.02)
    assert closed_form(single) == recommended(single) == 1
    model = mixed(0.0015)
    assert closed_form(model) > 4
    assert recommended(model) == 1


def test_threshold_is_capped_by_the_prompts_of_one_step() -> None:
    time = StepTime(**{**A100_8B.to_json(), "mixed_s": 0.012})
    model = BacklogModel.from_step_time(
        time, slots=256, mean_output=200, mean_prompt=220, budget=2048
    )
    assert model.largest_threshold == 9
    assert closed_form(model) == 9
    longer = BacklogModel.from_step_time(
        time, slots=256, mean_output=200, mean_prompt=4000, budget=2048
    )
    assert closed_form(longer) == recommended(longer) == 1


def test_itl_target_and_max_delay_cap_the_threshold() -> None:
    model = paper()
    capped = recommended(model, itl_s=0.2)
    assert 1 < capped < 13
    pause_s, longer_s = (
        model.batch_seconds(k) + model.decode_seconds(model.slots) for k in (capped, capped + 1)
    )
    assert pause_s <= 0.2 < longer_s
    assert recommended(model, itl_s=0.05) == 1
    assert recommended(model, itl_s=1e306) == recommended(model)
    capped = recommended(model, max_delay_s=0.1)
    assert 1 < capped < 13
    assert model.hold_seconds(capped) <= 0.1 < model.hold_seconds(capped + 1)


def test_floor_with_short_answers_gives_the_best_threshold() -> None:
    # In mixed steps whose decodes take longer the floor costs nothing.
    time = StepTime(decode_fixed_s=0.03, decode_s=1e-4, floor_s=0.05, prefill_s=1e-4)
    riding = BacklogModel.from_step_time(time, slots=256, mean_output=200, mean_prompt=220)
    assert riding.floor_s == 0.0
    model = BacklogModel.from_step_time(LINEAR_70B, slots=16, mean_output=13, mean_prompt=100)
    exact = Recursion(model)
    assert exact.solve_for(3).throughput > 1.05 * exact.solve_for(1).throughput
    assert closed_form(model) == exact.best() == 3

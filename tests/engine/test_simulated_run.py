"""The simulator against a real run of the same requests in a CPU engine.

The run's clock moves with the work of each step, with random variation, so that results do not
depend on the machine. Only the processor time of steps is compared with their work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from statistics import correlation, fmean, median
from typing import Any

import pytest

from proxy.config import FleetConfig
from tests.engine.arrivals import ARRIVALS, SETS
from tests.sim.making import Listed
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.cost.calibration import calibrate
from vllm_sched.cost.step_time import StepTime, TimedStep
from vllm_sched.engine.simulated import SimulatedStep
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.fleet.fleet import SimulatedFleet
from vllm_sched.sim.types import MakeEngine, WorkerModel

pytestmark = pytest.mark.engine

Run = Mapping[str, Any]
Runs = Mapping[str, Run]
Pair = tuple[Sequence[Outcome], Sequence[Outcome]]  # real and simulated
# Simulated requests name no lane.
SIMULATED_SETS = [name for name, policies in SETS.items() if "lanes" not in (policies or {})]
# A cost model is fitted to the steps of these sets only.
FITTED = ("default", "prefill_first", "rotation", "chunk_budget")
LONG = 500  # tokens: half of the requests are no shorter
# Allowed ratios of moments and waits: median over all sets, and of each set. A wait is the
# difference of two moments, and often small. `long_prompt` compares step times to size its chunks,
# so small differences change later steps.
MOMENTS, WAITS = (1.02, 1.08), (1.05, 1.3)
# Allowed median ratio between a set's step times and the fitted model.
MEASURED = 2.0


class ReplayEngine(ExactEngine):
    """An engine whose steps take the real steps' times."""

    def __init__(
        self, model: WorkerModel, *, seconds: Iterator[float], seen: list[TimedStep]
    ) -> None:
        super().__init__(model)
        self._seconds, self._seen = seconds, seen

    def step_s(self, step: SimulatedStep) -> float:
        self._seen.append(TimedStep(step.shape, next(self._seconds)))
        return self._seen[-1].seconds


def play(name: str, run: Run, make: MakeEngine, time: StepTime) -> Sequence[Outcome]:
    """Simulate a fleet of one such worker, with the real run's arrivals."""
    config = FleetConfig.model_validate(
        {"model": "m", "workers": [{"name": "w0", "profile": "h100-8b", "max_requests": 99}]}
    )
    model = WorkerModel(
        name="w0", time=time, max_model_len=2048, kv_tokens=100 * 32, block_tokens=32,
        max_num_seqs=6, max_num_batched_tokens=256, prefix_caching=False, async_scheduling=False,
        policies=SETS[name] or {},
    )  # fmt: skip
    requests = [
        Request(at, "", prompt, output)
        for at, (_, prompt, output, _) in zip(run["arrived"], ARRIVALS, strict=True)
    ]
    played = SimulatedFleet(config, {"w0": model}, make).play(Schedule(source=Listed(*requests)))
    assert played.facts["workers"]["w0"]["steps"] > 0
    return played.outcomes


def replay(name: str, run: Run, seen: list[TimedStep]) -> Sequence[Outcome]:
    """Simulate with the real steps' times, and record each step's shape."""
    seconds = iter(run["seconds"])
    outcomes = play(name, run, partial(ReplayEngine, seconds=seconds, seen=seen), StepTime())
    assert next(seconds, None) is None, "the real engine made more steps"
    return outcomes


@pytest.mark.parametrize("name", SIMULATED_SETS)
def test_replay_with_real_step_times_matches_the_real_run(runs: Runs, name: str) -> None:
    outcomes = replay(name, runs[name], [])
    # Each token of each request.
    assert [each.ticks for each in outcomes] == [
        pytest.approx(times) for times in runs[name]["token_times"]
    ]
    assert [each.completed for each in outcomes] == [output for _, _, output, _ in ARRIVALS]


@pytest.fixture(scope="module")
def costs(runs: Runs) -> StepTime:
    seen: list[TimedStep] = []
    for name in FITTED:
        replay(name, runs[name], seen)
    return calibrate(seen).time


@pytest.fixture(scope="module")
def measured(runs: Runs) -> dict[str, list[TimedStep]]:
    found: dict[str, list[TimedStep]] = {}
    for name in SIMULATED_SETS:
        replay(name, runs[name], seen := [])
        found[name] = [
            TimedStep(step.shape, took) for step, took in zip(seen, runs[name]["took"], strict=True)
        ]
    return found


def test_processor_times_are_close_to_the_fitted_model(
    measured: dict[str, list[TimedStep]],
) -> None:
    time = calibrate([each for name in FITTED for each in measured[name]]).time
    for name, steps in measured.items():
        ratio = median(each.seconds / time.seconds(each.shape) for each in steps)
        assert 1 / MEASURED < ratio < MEASURED, name


def real(run: Run) -> list[Outcome]:
    return [
        Outcome(at, "", prompt, output, ticks=times, completed=len(times))
        for at, times, (_, prompt, output, _) in zip(
            run["arrived"], run["token_times"], ARRIVALS, strict=True
        )
    ]


def moments(outcomes: Sequence[Outcome]) -> dict[str, float]:
    longs, shorts = by_length(outcomes)
    return {
        "first tokens of longs": fmean(each.at + each.ttft for each in longs),
        "first tokens of shorts": fmean(each.at + each.ttft for each in shorts),
        "ends": fmean(each.end for each in outcomes),
        "all of it": max(each.end for each in outcomes),
    }


def waits(outcomes: Sequence[Outcome]) -> dict[str, float]:
    longs, shorts = ([each.ttft for each in part] for part in by_length(outcomes))
    return {
        "TTFT of longs": fmean(longs),
        "TTFT of shorts": fmean(shorts),
        "longs' by shorts'": fmean(longs) / fmean(shorts),
        "gap": fmean(gap for each in outcomes for gap in each.itls),
        "latency": fmean(each.latency for each in outcomes),
    }


def by_length(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    longs = [each for each in outcomes if each.prompt_tokens >= LONG]
    return longs, [each for each in outcomes if each.prompt_tokens < LONG]


def by_rank(sides: Iterable[Sequence[float]]) -> float:
    ranks = [[sorted(values).index(each) for each in values] for values in sides]
    return correlation(*ranks)


@pytest.fixture(scope="module")
def pairs(runs: Runs, costs: StepTime) -> dict[str, Pair]:
    """Return each real run with its simulation by the cost model."""
    return {
        name: (real(runs[name]), play(name, runs[name], ExactEngine, costs))
        for name in SIMULATED_SETS
    }


@pytest.mark.parametrize(("figures", "bounds"), [(moments, MOMENTS), (waits, WAITS)])
def test_simulation_with_a_fitted_model_is_close(
    pairs: dict[str, Pair],
    figures: Callable[[Sequence[Outcome]], dict[str, float]],
    bounds: tuple[float, float],
) -> None:
    median_bound, set_bound = bounds
    for key in figures(pairs["default"][0]):
        ratios = {
            name: figures(simulated)[key] / figures(truly)[key]
            for name, (truly, simulated) in pairs.items()
        }
        assert 1 / median_bound < median(ratios.values()) < median_bound, (key, ratios)
        assert 1 / set_bound < min(ratios.values()), (key, ratios)
        assert max(ratios.values()) < set_bound, (key, ratios)


def test_simulation_finishes_requests_in_the_same_order(pairs: dict[str, Pair]) -> None:
    ends = [by_rank([each.end for each in side] for side in pair) for pair in pairs.values()]
    assert min(ends) > 0.8
    first = [by_rank([each.ttft for each in side] for side in pair) for pair in pairs.values()]
    assert median(first) > 0.8


def test_simulation_ranks_policies_in_the_same_order(pairs: dict[str, Pair]) -> None:
    compared = 0
    for key in ("TTFT of longs", "TTFT of shorts", "latency"):
        found = [[waits(side)[key] for side in pair] for pair in pairs.values()]
        for one, other in permutations(found, 2):
            if 2 * one[0] < other[0]:  # a clear difference
                assert one[1] < other[1], key
                compared += 1
    assert compared > len(SIMULATED_SETS)

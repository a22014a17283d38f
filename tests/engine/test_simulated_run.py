"""The simulator against a real run: the same requests through a real engine on this machine's CPU.

The run's clock moves with the work of each step, and a little at random: nothing here depends on
how fast the machine is, or how busy. What the steps took of it is held against that work alone.
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
from vllm_sched.cost.calibration import Measured, calibrate
from vllm_sched.cost.step_time import StepTime
from vllm_sched.engine.simulated import SimulatedStep
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.fleet.fleet import SimulatedFleet
from vllm_sched.sim.types import MakeEngine, WorkerModel

pytestmark = pytest.mark.engine

Run = Mapping[str, Any]
Runs = Mapping[str, Run]
Pair = tuple[Sequence[Outcome], Sequence[Outcome]]  # truly, and simulated
# In a simulation no request names its lane.
PLAYED = [name for name, policies in SETS.items() if "lanes" not in (policies or {})]
# A cost model is fitted to the steps of these; that of the others it has never seen.
FITTED = ("default", "prefill_first", "rotation", "chunk_budget")
LONG = 500  # tokens: half of the requests are no shorter
# How near they are in the middle of all sets, and in each: the moments of a run, and waits.
# A wait is what lies between two moments, and often a small part of either.
MOMENTS, WAITS = (1.02, 1.05), (1.05, 1.2)
# How near the steps of a set are to what the machine took for the fitted sets, in their middle.
MEASURED = 2.0


class Retold(ExactEngine):
    """One whose steps take what the real ones did."""

    def __init__(
        self, model: WorkerModel, *, seed: int = 0, seconds: Iterator[float], seen: list[Measured]
    ) -> None:
        super().__init__(model, seed=seed)
        self._seconds, self._seen = seconds, seen

    def step_s(self, step: SimulatedStep) -> float:
        """Take the next."""
        self._seen.append(Measured(step.shape, next(self._seconds)))
        return self._seen[-1].seconds


def play(name: str, run: Run, make: MakeEngine, time: StepTime) -> Sequence[Outcome]:
    """Simulate a fleet of one such worker; everybody comes when he came to the real one."""
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


def retold(name: str, run: Run, seen: list[Measured]) -> Sequence[Outcome]:
    """Simulate with the real steps' times, and note what each of them computed."""
    seconds = iter(run["seconds"])
    outcomes = play(name, run, partial(Retold, seconds=seconds, seen=seen), StepTime())
    assert next(seconds, None) is None, "the real engine made more steps"
    return outcomes


@pytest.mark.parametrize("name", PLAYED)
def test_with_its_steps_times_a_simulation_is_the_real_run(runs: Runs, name: str) -> None:
    outcomes = retold(name, runs[name], [])
    # Each token of each request, whatever was decided by the clock.
    assert [each.ticks for each in outcomes] == [pytest.approx(told) for told in runs[name]["told"]]
    assert [each.completed for each in outcomes] == [output for _, _, output, _ in ARRIVALS]


@pytest.fixture(scope="module")
def costs(runs: Runs) -> StepTime:
    """Calibrate."""
    seen: list[Measured] = []
    for name in FITTED:
        retold(name, runs[name], seen)
    return calibrate(seen).time


@pytest.fixture(scope="module")
def measured(runs: Runs) -> dict[str, list[Measured]]:
    """Give what each step took of this machine's processor, which others use too."""
    found: dict[str, list[Measured]] = {}
    for name in PLAYED:
        retold(name, runs[name], seen := [])
        found[name] = [
            Measured(each.shape, took) for each, took in zip(seen, runs[name]["took"], strict=True)
        ]
    return found


def test_what_steps_take_of_a_processor_is_near_a_model_fitted_to_other_sets(
    measured: dict[str, list[Measured]],
) -> None:
    time = calibrate([each for name in FITTED for each in measured[name]]).time
    for name, steps in measured.items():
        ratio = median(each.seconds / time.seconds(each.shape) for each in steps)
        assert 1 / MEASURED < ratio < MEASURED, name


def real(run: Run) -> list[Outcome]:
    """Describe the real run as a simulation is."""
    return [
        Outcome(at, "", prompt, output, ticks=told, completed=len(told))
        for at, told, (_, prompt, output, _) in zip(
            run["arrived"], run["told"], ARRIVALS, strict=True
        )
    ]


def moments(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Sum up when what happened."""
    longs, shorts = by_length(outcomes)
    return {
        "first tokens of longs": fmean(each.at + each.ttft for each in longs),
        "first tokens of shorts": fmean(each.at + each.ttft for each in shorts),
        "ends": fmean(each.end for each in outcomes),
        "all of it": max(each.end for each in outcomes),
    }


def waits(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Sum up who waited for how long."""
    longs, shorts = ([each.ttft for each in part] for part in by_length(outcomes))
    return {
        "TTFT of longs": fmean(longs),
        "TTFT of shorts": fmean(shorts),
        "longs' by shorts'": fmean(longs) / fmean(shorts),
        "gap": fmean(gap for each in outcomes for gap in each.itls),
        "latency": fmean(each.latency for each in outcomes),
    }


def by_length(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """Part them."""
    longs = [each for each in outcomes if each.prompt_tokens >= LONG]
    return longs, [each for each in outcomes if each.prompt_tokens < LONG]


def by_rank(sides: Iterable[Sequence[float]]) -> float:
    """Return the correlation of ranks."""
    ranks = [[sorted(values).index(each) for each in values] for values in sides]
    return correlation(*ranks)


@pytest.fixture(scope="module")
def pairs(runs: Runs, costs: StepTime) -> dict[str, Pair]:
    """Put each real run beside its simulation by the cost model."""
    return {name: (real(runs[name]), play(name, runs[name], ExactEngine, costs)) for name in PLAYED}


@pytest.mark.parametrize(("figures", "bounds"), [(moments, MOMENTS), (waits, WAITS)])
def test_with_a_fitted_cost_model_it_is_near(
    pairs: dict[str, Pair],
    figures: Callable[[Sequence[Outcome]], dict[str, float]],
    bounds: tuple[float, float],
) -> None:
    near, wide = bounds
    for key in figures(pairs["default"][0]):
        ratios = {
            name: figures(simulated)[key] / figures(truly)[key]
            for name, (truly, simulated) in pairs.items()
        }
        assert 1 / near < median(ratios.values()) < near, (key, ratios)
        assert 1 / wide < min(ratios.values()), (key, ratios)
        assert max(ratios.values()) < wide, (key, ratios)


def test_it_serves_in_the_same_order(pairs: dict[str, Pair]) -> None:
    ends = [by_rank([each.end for each in side] for side in pair) for pair in pairs.values()]
    assert min(ends) > 0.8
    first = [by_rank([each.ttft for each in side] for side in pair) for pair in pairs.values()]
    assert median(first) > 0.8


def test_policies_come_in_the_same_order(pairs: dict[str, Pair]) -> None:
    compared = 0
    for key in ("TTFT of longs", "TTFT of shorts", "latency"):
        found = [[waits(side)[key] for side in pair] for pair in pairs.values()]
        for one, other in permutations(found, 2):
            if 2 * one[0] < other[0]:  # and not by chance
                assert one[1] < other[1], key
                compared += 1
    assert compared > len(PLAYED)

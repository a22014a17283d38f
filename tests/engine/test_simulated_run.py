"""The simulator against a real run: the same requests through a real engine on this machine's CPU.

Times are those that the engine's steps took of the processor, in that very run: nothing here
depends on how fast the machine is, and little on who else has it to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, permutations
from statistics import correlation, fmean, median
from typing import Any

import pytest

from proxy.config import FleetConfig
from tests.engine.arrivals import ARRIVALS, SETS
from tests.sim.making import Listed
from vllm_sched.bench.outcome import Outcome
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.cost.calibration import Measured, calibrate
from vllm_sched.cost.step_time import StepTime
from vllm_sched.engine.simulated import SimulatedStep
from vllm_sched.sim.exact import ExactEngine
from vllm_sched.sim.fleet import SimulatedFleet
from vllm_sched.sim.types import MakeEngine, WorkerModel

Run = Mapping[str, Any]
Takes = Mapping[str, Sequence[Run]]
Pair = tuple[Sequence[Outcome], Sequence[Outcome]]  # truly, and simulated
# In a simulation no request names its lane.
PLAYED = [name for name, policies in SETS.items() if "lanes" not in (policies or {})]
# A cost model is fitted to the steps of these; that of the others it has never seen.
FITTED = ("default", "prefill_first", "rotation", "chunk_budget")
LONG = 500  # tokens: half of the requests are no shorter
# How near they are in the middle of all sets, and in each, over its takes together: the moments of
# a run, and waits. A wait is what lies between two moments, and often a small part of either: where
# each step is a tenth too slow, who comes late waits for a third longer, or half.
MOMENTS, WAITS = (1.2, 1.5), (1.3, 2.0)


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
def test_with_its_steps_times_a_simulation_is_the_real_run(takes: Takes, name: str) -> None:
    for run in takes[name]:
        outcomes = retold(name, run, [])
        # Each token of each request, whatever was decided by the clock.
        assert [each.ticks for each in outcomes] == [pytest.approx(told) for told in run["told"]]
        assert [each.completed for each in outcomes] == [output for _, _, output, _ in ARRIVALS]


@pytest.fixture(scope="module")
def usual(takes: Takes) -> Takes:
    """Where all takes made the same steps, give one whose steps took the middle of what they took.

    A neighbour who comes in one take slows some of its steps down and not their like in the others.
    """
    found = {name: in_the_middle(taken) for name, taken in takes.items()}
    assert all(len(found[name]) == 1 for name in FITTED)  # no clock decides there
    return found


def in_the_middle(taken: Sequence[Run]) -> Sequence[Run]:
    """Take them together, or leave them as they are if a clock made them differ."""
    first, *others = [by_step(run) for run in taken]
    if any(other != first for other in others):
        return taken
    arrived, told, _ = first
    seconds = [median(each) for each in zip(*[run["seconds"] for run in taken], strict=True)]
    clock = list(accumulate(seconds, initial=0.0))
    return [
        {
            "seconds": seconds,
            "arrived": [clock[at] for at in arrived],
            "told": [[clock[at] for at in each] for each in told],
        }
    ]


def by_step(run: Run) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Say after how many steps each came and got each token, and what every step computed."""
    after = {at: done for done, at in enumerate(accumulate(run["seconds"], initial=0.0))}
    told = [[after[at] for at in each] for each in run["told"]]
    return [after[at] for at in run["arrived"]], told, run["steps"]


@pytest.fixture(scope="module")
def costs(usual: Takes) -> StepTime:
    """Calibrate."""
    seen: list[Measured] = []
    for name in FITTED:
        for run in usual[name]:
            retold(name, run, seen)
    return calibrate(seen).time


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
def pairs(usual: Takes, costs: StepTime) -> dict[str, list[Pair]]:
    """Put each real run beside its simulation by the cost model."""
    return {
        name: [(real(run), play(name, run, ExactEngine, costs)) for run in usual[name]]
        for name in PLAYED
    }


@pytest.mark.parametrize(("figures", "bounds"), [(moments, MOMENTS), (waits, WAITS)])
def test_with_a_fitted_cost_model_it_is_near(
    pairs: dict[str, list[Pair]],
    figures: Callable[[Sequence[Outcome]], dict[str, float]],
    bounds: tuple[float, float],
) -> None:
    near, wide = bounds
    for key in figures(pairs["default"][0][0]):
        ratios = {
            name: fmean(figures(simulated)[key] for _, simulated in taken)
            / fmean(figures(truly)[key] for truly, _ in taken)
            for name, taken in pairs.items()
        }
        assert 1 / near < median(ratios.values()) < near, (key, ratios)
        assert 1 / wide < min(ratios.values()), (key, ratios)
        assert max(ratios.values()) < wide, (key, ratios)


def test_it_serves_in_the_same_order(pairs: dict[str, list[Pair]]) -> None:
    done = [alike(taken, lambda each: each.end) for taken in pairs.values()]
    assert min(done) > 0.8
    first = [alike(taken, lambda each: each.ttft) for taken in pairs.values()]
    assert median(first) > 0.8


def alike(taken: list[Pair], when: Callable[[Outcome], float]) -> float:
    """Return how alike the orders of a run and its simulation are, in the middle of the takes."""
    return median(by_rank([[when(each) for each in side] for side in pair]) for pair in taken)


def test_policies_come_in_the_same_order(pairs: dict[str, list[Pair]]) -> None:
    compared = 0
    for key in ("TTFT of longs", "TTFT of shorts", "latency"):
        found = [
            [median(waits(pair[side])[key] for pair in taken) for side in (0, 1)]
            for taken in pairs.values()
        ]
        for one, other in permutations(found, 2):
            if 2 * one[0] < other[0]:  # and not by chance
                assert one[1] < other[1], key
                compared += 1
    assert compared > len(PLAYED)

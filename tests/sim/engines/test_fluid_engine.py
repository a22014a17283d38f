"""The fluid engine: events of many steps have the times of single steps."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.sim.making import MANY_POLICIES, run, worker
from vllm_sched.cost.backlog_model import BacklogModel
from vllm_sched.cost.recursion import Recursion
from vllm_sched.cost.step_time import StepTime
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.types import Event, Job, WorkerModel

PLAIN = StepTime(
    decode_fixed_s=0.010, decode_s=1e-4, prefill_fixed_s=0.011, prefill_s=1e-4, mixed_s=0.002
)
BENT = StepTime(
    decode_fixed_s=0.010, decode_s=1e-4, context_s=1e-7, prefill_fixed_s=0.011, prefill_s=1e-4,
    pair_s=1e-8, mixed_s=0.002, floor_s=0.015,
)  # fmt: skip


def model(time: StepTime = PLAIN, **changes: Any) -> WorkerModel:
    sizes = {"kv_tokens": 100_000, "max_num_seqs": 32, "max_num_batched_tokens": 1000}
    return worker(time, **sizes | changes)


def play(engine: FluidEngine, jobs: list[tuple[float, Job]]) -> dict[str, list[Event]]:
    """Return the events of each job."""
    events_of: dict[str, list[Event]] = defaultdict(list)
    for event in run(engine, jobs):
        events_of[event.job_id].append(event)
    return events_of


def ends(events_of: dict[str, list[Event]]) -> dict[str, tuple[float, float, int]]:
    """Return the first token's time, the last token's time and the tokens of each job."""
    return {
        name: (events[0].at, events[-1].at, sum(event.tokens for event in events))
        for name, events in events_of.items()
        if events[-1].finished
    }


def crowd(count: int, seed: int = 0, max_prompt: int = 3000) -> list[tuple[float, Job]]:
    """Return random jobs that at times arrive faster than they are served."""
    rng = random.Random(seed)
    now, jobs = 0.0, []
    for i in range(count):
        now += rng.expovariate(20)
        job = Job(f"j{i}", rng.randint(1, max_prompt), rng.choice((1, 2, 17, 80)))
        jobs.append((now, job))
    return jobs


def test_single_request_takes_its_prefill_and_its_steps() -> None:
    events_of = play(FluidEngine(model()), [(1.0, Job("a", 500, 11))])
    first, last, tokens = ends(events_of)["a"]
    assert first == pytest.approx(1.0 + 0.011 + 500 * 1e-4)
    assert last == pytest.approx(first + 10 * (0.010 + 1e-4))
    assert tokens == 11
    assert len(events_of["a"]) == 2, "ten equal steps are one event"


def test_arrival_during_a_step_waits_for_its_end() -> None:
    events_of = play(FluidEngine(model()), [(0.0, Job("a", 100, 100)), (0.5003, Job("b", 100, 1))])
    first = 0.011 + 100 * 1e-4
    step = 0.010 + 1e-4
    steps = -(-(0.5003 - first) // step)
    begun = first + steps * step
    assert ends(events_of)["b"][0] == pytest.approx(begun + 0.002 + step + 100 * 1e-4)


@pytest.mark.parametrize(("time", "ahead"), [(PLAIN, False), (PLAIN, True), (BENT, True)])
@pytest.mark.parametrize("policies", MANY_POLICIES, ids=str)
def test_merged_steps_have_the_times_of_single_steps(
    policies: dict[str, Any], time: StepTime, ahead: bool
) -> None:
    made = model(time, policies=policies, max_num_seqs=8, async_scheduling=ahead)
    jobs = crowd(150)
    longest: dict[str, float] = {}
    by_step = FluidEngine(made, each_token=True)
    by_run = FluidEngine(made, ended=lambda job, gap: longest.update({job.id: gap}))
    step_events = play(by_step, jobs)
    slow, fast = ends(step_events), ends(play(by_run, jobs))
    assert slow.keys() == fast.keys() == {job.id for _, job in jobs}
    assert all(slow[name][2] == fast[name][2] for name in slow)
    # Chunks sized by time, and holds that end by the clock, are checked less often.
    near = 0.03 if {"long_prompt", "chunk_budget", "deferred_prefill"} & policies.keys() else 1e-9
    mean = [sum(one[name][0] for name in one) / len(one) for one in (slow, fast)]
    assert mean[1] == pytest.approx(mean[0], rel=near)
    if near < 0.01:
        for name, (first, last, _) in slow.items():
            assert fast[name][:2] == pytest.approx((first, last), rel=1e-9)
    if near < 0.01 and policies.keys() != {"prefill_first"} and time is PLAIN:
        for name, events in step_events.items():
            gaps = [b.at - a.at for a, b in pairwise(events)]
            assert longest[name] == pytest.approx(max(gaps, default=0.0))
    assert by_run.facts()["output_tokens"] == by_step.facts()["output_tokens"]
    assert by_run.facts()["prefill_tokens"] == sum(job.prompt_tokens for _, job in jobs)


def test_pause_for_prefill_is_a_gap_in_every_stream() -> None:
    longest: dict[str, float] = {}
    engine = FluidEngine(
        model(policies={"prefill_first": {}}, max_num_batched_tokens=4000),
        ended=lambda job, gap: longest.update({job.id: gap}),
    )
    play(engine, [(0.0, Job("a", 10, 100)), (0.3, Job("b", 4000, 1))])
    assert longest["a"] == pytest.approx(0.011 + 4000 * 1e-4 + 0.010 + 1e-4)
    assert engine.facts()["max_itl_ms"] == pytest.approx(longest["a"] * 1000)


def test_pause_is_bounded_though_steps_get_longer() -> None:
    bound_s = 2.0
    policies = {"prefill_first": {"max_pause_s": bound_s}}
    engine = FluidEngine(model(time=replace(PLAIN, pair_s=1e-8), policies=policies))
    play(engine, [(0.0, Job("a", 10, 400)), (0.3, Job("b", 32_000, 1))])
    a_step_s = 0.011 + 1000 * 1e-4 + 1000 * 32_000 * 1e-8
    assert bound_s < engine.gaps.most < bound_s + a_step_s


def test_chunk_budget_limits_the_gaps() -> None:
    engine = FluidEngine(model(policies={"chunk_budget": {"chunk": 200}}))
    play(engine, [(0.0, Job("a", 10, 100)), (0.3, Job("b", 4000, 1))])
    assert engine.gaps.most == pytest.approx(0.002 + 0.010 + 1e-4 + 200 * 1e-4)


def test_static_batch_waits_for_its_last_member() -> None:
    jobs = [(0.0, Job("a", 10, 5)), (0.0, Job("b", 10, 300)), (0.1, Job("c", 10, 5))]
    static = ends(play(FluidEngine(model(policies={"static_batching": {}})), jobs))
    flowing = ends(play(FluidEngine(model()), jobs))
    assert static["c"][0] > static["b"][1]
    assert flowing["c"][1] < flowing["b"][1]


def test_a_batch_is_joined_after_the_longest_wait() -> None:
    jobs = [(0.0, Job("a", 10, 300)), (0.1, Job("b", 10, 5))]
    policies = {"static_batching": {"max_wait_s": 1.0}}
    found = ends(play(FluidEngine(model(policies=policies), each_token=True), jobs))
    assert 1.1 < found["b"][0] < 1.2 < found["a"][1]


def test_job_enters_only_with_a_slot_and_room_for_all_its_tokens() -> None:
    jobs = [(0.0, Job("a", 900, 100)), (0.0, Job("b", 900, 100)), (0.0, Job("c", 900, 100))]
    found = ends(play(FluidEngine(model(kv_tokens=2000)), jobs))
    assert found["b"][0] < found["a"][1]
    assert found["c"][0] > found["a"][1]
    slots = ends(play(FluidEngine(model(max_num_seqs=2)), [(0.0, Job(n, 10, 50)) for n in "abc"]))
    assert slots["c"][0] > slots["a"][1]


def test_job_larger_than_the_cache_runs_alone() -> None:
    jobs = [(0.0, Job("a", 900, 100)), (0.0, Job("b", 5000, 100)), (0.0, Job("c", 900, 100))]
    found = ends(play(FluidEngine(model(kv_tokens=2000)), jobs))
    assert found["a"][1] < found["b"][0] < found["b"][1] < found["c"][0]


def test_long_prompt_lets_shorts_pass() -> None:
    jobs = [(0.0, Job("a", 20_000, 2)), (0.0, Job("b", 20_000, 2)), (0.2, Job("s", 100, 2))]
    policies = {"long_prompt": {"long_prefill_token_threshold": 1500}}
    with_policy = ends(play(FluidEngine(model(policies=policies)), jobs))
    without = ends(play(FluidEngine(model()), jobs))
    assert with_policy["s"][0] < 0.6 < 4 < without["s"][0]
    assert with_policy["a"][0] < with_policy["b"][0]


def test_deferred_prefill_is_faster_if_mixed_steps_cost_extra() -> None:
    time = StepTime(decode_fixed_s=0.01, prefill_fixed_s=0.01, prefill_s=1e-5, mixed_s=0.02)
    jobs = [(0.0, Job(f"j{i}", 50, 1 + i * 37 % 100)) for i in range(600)]

    def whole_s(**policies: Any) -> float:
        engine = FluidEngine(model(time=time, policies=policies))
        return max(last for _, last, _ in ends(play(engine, jobs)).values())

    at_once = whole_s()
    assert whole_s(deferred_prefill={"departures": 4}) < 0.85 * at_once
    assert whole_s(deferred_prefill={}) < 0.9 * at_once


@pytest.mark.parametrize("threshold", [1, 8, 16])
@pytest.mark.parametrize("decodes_pause", [True, False], ids=["apart", "along"])
def test_backlog_throughput_matches_the_recursion(threshold: int, decodes_pause: bool) -> None:
    time = StepTime(
        decode_fixed_s=0.010, decode_s=6e-5, prefill_fixed_s=0.011, prefill_s=9.5e-5, mixed_s=0.011
    )
    slots, mean, prompt = 64, 50, 100
    rng = random.Random(3)
    # The first token comes with the prefill.
    outputs = [
        1 + math.ceil(math.log(1 - rng.random()) / math.log1p(-1 / mean)) for _ in range(6000)
    ]
    policies: dict[str, dict[str, object]] = {"prefill_first": {}} if decodes_pause else {}
    policies["deferred_prefill"] = {"departures": threshold, "max_delay_ms": 1e6}
    engine = FluidEngine(
        model(time=time, policies=policies, max_num_seqs=slots, kv_tokens=10**7,
              max_num_batched_tokens=10**6)
    )  # fmt: skip
    jobs = [(0.0, Job(f"j{i}", prompt, output)) for i, output in enumerate(outputs)]
    found = sorted(last for _, last, _ in ends(play(engine, jobs)).values())
    middle = found[1000:5000]
    throughput = len(middle) / (middle[-1] - middle[0])
    backlog = BacklogModel.from_step_time(
        time, slots=slots, mean_output=mean, mean_prompt=prompt, decodes_pause=decodes_pause
    )
    assert throughput == pytest.approx(Recursion(backlog).solve_for(threshold).throughput, rel=0.03)

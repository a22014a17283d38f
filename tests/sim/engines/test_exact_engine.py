"""Real schedulers in virtual time, against closed forms and vLLM's rules."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest

from tests.sim.making import drain, ends, firsts, job, run, worker
from vllm_sched.bench.traffic.schedule import gamma_times
from vllm_sched.cost.backlog_model import BacklogModel
from vllm_sched.cost.recursion import Recursion
from vllm_sched.cost.step_time import StepTime
from vllm_sched.cost.transfer import TransferTime
from vllm_sched.errors import UsageError
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.types import Job, Leg


def test_facts_tell_steps_and_policies() -> None:
    engine = ExactEngine(worker(policies={"long_prompt": {}}))
    run(engine, [(1.0, job("a", 100, 3))])
    facts = engine.facts()
    assert (facts["steps"], facts["busy_s"]) == (3, pytest.approx(0.04))
    assert facts["scheduler_s"] > 0
    assert "long_prompt" in facts["policies"]


def test_one_slot_queue_waits_as_m_d_1() -> None:
    service, load, count = 1.0, 0.7, 3000
    engine = ExactEngine(worker(StepTime(prefill_fixed_s=service), max_num_seqs=1))
    times = gamma_times(load / service, 1.0, count, random.Random(1))
    found = ends(run(engine, [(at, job(f"{n}", 8, 1)) for n, at in enumerate(times)]))
    # Lindley's recursion, to the last digit.
    expected = list(accumulate(times, lambda end, at: max(end, at) + service, initial=0.0))[1:]
    assert [found[f"{n}"] for n in range(count)] == pytest.approx(expected)
    # The mean of the Pollaczek-Khinchine formula.
    waits = [found[f"{n}"] - at - service for n, at in enumerate(times)]
    assert sum(waits) / count == pytest.approx(load * service / (2 * (1 - load)), rel=0.15)


@pytest.mark.parametrize("departures", [1, 6])
def test_deferred_prefill_throughput_matches_the_recursion(departures: int) -> None:
    slots, mean, prompt = 16, 20, 32
    time = StepTime(decode_fixed_s=0.01, decode_s=1e-4, prefill_s=1e-5, mixed_s=0.02)
    policy = {"departures": departures, "max_delay_ms": 1e7}
    engine = ExactEngine(
        worker(time, max_num_seqs=slots, policies={"deferred_prefill": policy}, kv_tokens=10**6)
    )
    rng, count = random.Random(3), 1500
    jobs = []
    for number in range(count):
        steps = 1
        while rng.random() > 1 / mean:
            steps += 1
        jobs.append((0.0, job(f"{number}", prompt, 1 + steps)))
    done = sorted(ends(run(engine, jobs)).values())
    # Without the start, when all slots fill at once, and the end, when no request is left.
    first, last = count // 10, count - 2 * slots
    throughput = (last - first) / (done[last] - done[first])
    backlog = BacklogModel.from_step_time(time, slots=slots, mean_output=mean, mean_prompt=prompt)
    assert throughput == pytest.approx(
        Recursion(backlog).solve_for(departures).throughput, rel=0.05
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_job_ends_once_with_all_its_tokens(asynchronous: bool) -> None:
    engine = ExactEngine(worker(async_scheduling=asynchronous, kv_tokens=4096))
    rng = random.Random(0)
    jobs = [job(f"{n}", rng.randint(1, 1500), rng.randint(1, 60)) for n in range(150)]
    events = run(engine, [(n * 0.01, each) for n, each in enumerate(jobs)])
    written: dict[str, int] = {}
    for event in events:
        written[event.job_id] = written.get(event.job_id, 0) + event.tokens
    assert written == {each.id: each.output_tokens for each in jobs}
    assert ends(events).keys() == written.keys()
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert engine.gauges(0.0).kv_usage == 0
    # The cache was too small for all jobs.
    assert engine.facts()["preemptions"] > 0


def test_long_prefill_token_threshold_applies_only_beside_other_requests() -> None:
    def gaps(**limit: Any) -> list[float]:
        engine = ExactEngine(worker(**limit))
        arrivals = [(0.0, job("decodes", 10, 20)), (0.1, job("long", 1500, 1))]
        ticks = [each.at for each in run(engine, arrivals) if each.job_id == "decodes"]
        return [round(later - sooner, 4) for sooner, later in pairwise(ticks)]

    # A step that decodes takes 10 ms, and as much again for each hundred tokens of the prompt.
    assert max(gaps()) == pytest.approx(0.0611)
    limited = gaps(longest_chunk=200)
    assert max(limited) == pytest.approx(0.03)
    assert limited.count(max(limited)) == 7
    # An even share of the step for each of the two is more than that.
    shared = gaps(longest_chunk=200, longest_chunk_adapts=True)
    assert max(shared) == pytest.approx(0.0356)
    alone = ExactEngine(worker(longest_chunk=200))
    run(alone, [(0.0, job("long", 1500, 1))])
    assert alone.facts()["steps"] == 3


# Hand-overs

LIMITED: dict[str, dict[str, object]] = {"long_prompt": {"long_prefill_token_threshold": 100}}


def decode_leg(name: str, prompt: int) -> Job:
    return job(name, prompt, 3, leg=Leg.DECODE)


@pytest.mark.parametrize(
    "policies", [LIMITED, {"rotation": {}}, {"chunk_budget": {}}, {"deferred_prefill": {}}], ids=str
)
def test_decode_leg_with_fetched_kv_waits_for_one_step(policies: dict[str, Any]) -> None:
    wire = TransferTime(setup_s=0.2)
    engine = ExactEngine(worker(transfers=True, transfer=wire, policies=policies))
    # The long prompt has whole steps of 61 ms, except for the leg's one token.
    events = run(engine, [(0.0, decode_leg("a", 400)), (0.1, job("long", 4000, 1))])
    (fetched,) = (event.at for event in events if event.fetched)
    found = firsts(events)
    assert fetched < found["a"] < fetched + 2 * 0.062 < found["long"]


def test_transfers_in_progress_leave_a_prompt_half_of_the_step() -> None:
    slow = TransferTime(setup_s=10.0)
    few = worker(transfers=True, transfer=slow, policies=LIMITED, max_num_batched_tokens=16)
    engine = ExactEngine(few)
    decode_legs = [(0.0, decode_leg(f"{number}", 32)) for number in range(20)]
    found = firsts(run(engine, [*decode_legs, (0.1, job("long", 160, 1))]))
    # One step of sixteen tokens, then eighteen of eight.
    assert found["long"] == pytest.approx(0.1 + 0.0116 + 18 * 0.0108)


def test_decode_legs_without_a_slot_do_not_slow_a_running_prompt() -> None:
    one = worker(transfers=True, max_num_seqs=1, max_num_batched_tokens=16)
    limited = replace(one, policies=LIMITED)
    decode_legs = [(0.05, decode_leg(f"{number}", 32)) for number in range(20)]
    alone, beside = (
        firsts(run(ExactEngine(limited), [(0.0, job("long", 1600, 1)), *others]))["long"]
        for others in ([], decode_legs)
    )
    assert beside == pytest.approx(alone)


def test_request_larger_than_the_cache_raises() -> None:
    engine = ExactEngine(worker(kv_tokens=1024, max_model_len=1024))
    engine.submit(job("a", 2000, 4), 0.0)
    with pytest.raises(UsageError, match=r"w0: 1 requests are waiting.*kv_tokens"):
        drain(engine)

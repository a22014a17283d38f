"""Real schedulers in virtual time, against closed forms and vLLM's rules."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import pytest

from tests.sim.making import drain, ends, firsts, job, run, worker
from vllm_sched.bench.traffic.schedule import gamma_times
from vllm_sched.cost.recursion import Recursion
from vllm_sched.cost.regime import Regime
from vllm_sched.cost.step_time import StepTime
from vllm_sched.cost.transfer import TransferTime
from vllm_sched.errors import UsageError
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.types import Job, Leg, WorkerModel


def test_step_times_follow_the_cost_model() -> None:
    engine = ExactEngine(worker(policies={"long_prompt": {}}))
    events = run(engine, [(1.0, job("a", 100, 3))])
    # The prompt: 10 ms and 100 tokens; then two steps of decoding alone.
    assert [(event.at, event.tokens, event.finished) for event in events] == [
        (pytest.approx(1.02), 1, False),
        (pytest.approx(1.03), 1, False),
        (pytest.approx(1.04), 1, True),
    ]
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
    regime = Regime.from_step_time(time, slots=slots, mean_output=mean, mean_prompt=prompt)
    assert throughput == pytest.approx(Recursion(regime).solve_for(departures).throughput, rel=0.05)


def test_async_scheduling_makes_arrivals_wait_for_two_steps() -> None:
    engine = ExactEngine(worker(async_scheduling=True))
    events = run(engine, [(0.0, job("a", 100, 50)), (0.105, job("b", 100, 1))])
    # At 0.105 two steps of 10 ms are settled: they end at 0.11 and 0.12; b's own takes 20 ms.
    assert firsts(events)["b"] == pytest.approx(0.14)
    waiting = ExactEngine(worker())
    events = run(waiting, [(0.0, job("a", 100, 50)), (0.105, job("b", 100, 1))])
    assert firsts(events)["b"] == pytest.approx(0.13)


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


def test_cached_prefix_is_not_computed_again() -> None:
    engine = ExactEngine(worker())
    shared = (("system", 400),)
    events = run(
        engine,
        [
            (0.0, job("a", 450, 1, shared=shared)),
            (1.0, job("b", 450, 1, shared=shared)),
            (2.0, job("c", 450, 1, shared=(("other", 400),))),
        ],
    )
    assert [event.cached_tokens for event in events] == [0, 400, 0]
    assert firsts(events)["b"] == pytest.approx(1.015)
    without = ExactEngine(worker(prefix_caching=False))
    run(without, [(0.0, job("a", 450, 1, shared=shared))])
    (event,) = run(without, [(1.0, job("b", 450, 1, shared=shared))])
    assert event.cached_tokens == 0


def test_aborted_job_yields_no_events_and_frees_its_blocks() -> None:
    engine = ExactEngine(worker())
    engine.submit(job("a", 100, 1000), 0.0)
    engine.submit(job("b", 100, 5), 0.0)
    events = drain(engine, 0.045)
    engine.abort("a", 0.045)
    engine.abort("unknown", 0.045)
    engine.submit(job("c"), 0.045)
    engine.abort("c", 0.045)  # before its first step
    later = drain(engine)
    assert "a" in firsts(events)
    assert {event.job_id for event in later} == {"b"}
    assert engine.gauges(9.0).kv_usage == 0
    assert engine.next_at() == float("inf")


# Hand-overs

WIRE = TransferTime(setup_s=0.05)
End = Callable[..., WorkerModel]
POLICIES: dict[str, dict[str, dict[str, object]]] = {
    "none": {},
    "long_prompt": {"long_prompt": {"long_prefill_token_threshold": 100}},
}


@pytest.fixture(params=POLICIES)
def end(request: pytest.FixtureRequest) -> End:
    """Return a factory for a worker of a hand-over; with `long_prompt` its prompts are long."""
    return partial(worker, transfers=True, policies=POLICIES[request.param])


def legs(name: str = "a", prompt: int = 400, output: int = 3) -> tuple[Job, Job]:
    whole = job(name, prompt, output)
    return replace(whole, leg=Leg.PREFILL), replace(whole, leg=Leg.DECODE)


def test_prefill_leg_keeps_its_blocks_until_release(end: End) -> None:
    engine = ExactEngine(end())
    first, _ = legs()
    (event,) = run(engine, [(0.0, first)])
    assert (event.tokens, event.finished, event.at) == (1, True, pytest.approx(0.05))
    assert engine.gauges(1.0).kv_usage > 0
    engine.release("a", 2.0)
    engine.release("unknown", 2.0)
    drain(engine)
    assert engine.gauges(3.0).kv_usage == 0


@pytest.mark.parametrize(("leg", "at"), [(0, 0.045), (1, 0.01)], ids=["last prefill", "transfer"])
def test_aborted_leg_frees_its_blocks(end: End, leg: int, at: float) -> None:
    engine = ExactEngine(end(transfer=WIRE))
    engine.submit(legs()[leg], 0.0)
    drain(engine, at)
    engine.abort("a", at)
    assert [event for event in drain(engine) if event.tokens] == []
    assert engine.gauges(1.0).kv_usage == 0


def test_decode_leg_fetches_its_kv_and_computes_one_token(end: End) -> None:
    engine = ExactEngine(end(transfer=WIRE))
    _, second = legs()
    events = run(engine, [(1.0, second)])
    assert (events[0].fetched, events[0].at) == (True, pytest.approx(1.05))
    # One token of prefill, then two steps of decoding.
    assert [event.at for event in events[1:]] == pytest.approx([1.0601, 1.0701, 1.0801])
    assert events[-1].finished
    assert engine.gauges(3.0).kv_usage == 0


def test_cached_kv_is_not_fetched(end: End) -> None:
    wire = TransferTime(byte_s=1e-3)
    model = end(transfer=wire, kv_token_bytes=1)
    engine = ExactEngine(model)
    shared = (("system", 320),)
    again = job("b", 400, 1, leg=Leg.DECODE, shared=shared)
    events = run(engine, [(0.0, job("a", 400, 1, shared=shared)), (1.0, again)])
    fetched = next(event for event in events if event.fetched)
    assert fetched.at == pytest.approx(1.0 + 0.080)


def test_worker_fetches_sequentially_while_others_decode(end: End) -> None:
    engine = ExactEngine(end(transfer=WIRE))
    (_, a), (_, b) = legs("a"), legs("b")
    events = run(engine, [(0.0, job("c", 10, 100)), (0.5, a), (0.5, b)])
    fetched = [event.at for event in events if event.fetched]
    assert fetched[1] - fetched[0] == pytest.approx(0.05, abs=0.011)
    ticks = [event.at for event in events if event.job_id == "c"]
    assert max(y - x for x, y in pairwise(ticks)) < 0.0121


@pytest.mark.parametrize("name", ["long_prompt", "rotation", "chunk_budget", "deferred_prefill"])
def test_decode_leg_with_fetched_kv_waits_for_one_step(name: str) -> None:
    wire, policies = TransferTime(setup_s=0.2), POLICIES.get(name, {name: {}})
    engine = ExactEngine(worker(transfers=True, transfer=wire, policies=policies))
    # The long prompt has whole steps of 61 ms, except for the leg's one token.
    events = run(engine, [(0.0, legs()[1]), (0.1, job("long", 4000, 1))])
    (fetched,) = (event.at for event in events if event.fetched)
    found = firsts(events)
    assert fetched < found["a"] < fetched + 2 * 0.062 < found["long"]


def test_transfers_in_progress_leave_a_prompt_half_of_the_step() -> None:
    slow = TransferTime(setup_s=10.0)
    few = worker(
        transfers=True, transfer=slow, policies=POLICIES["long_prompt"],
        max_num_batched_tokens=16,
    )  # fmt: skip
    engine = ExactEngine(few)
    decode_legs = [(0.0, legs(f"{number}", 32)[1]) for number in range(20)]
    found = firsts(run(engine, [*decode_legs, (0.1, job("long", 160, 1))]))
    # One step of sixteen tokens, then eighteen of eight.
    assert found["long"] == pytest.approx(0.1 + 0.0116 + 18 * 0.0108)


def test_decode_legs_without_a_slot_do_not_slow_a_running_prompt() -> None:
    one = worker(transfers=True, max_num_seqs=1, max_num_batched_tokens=16)
    limited = replace(one, policies=POLICIES["long_prompt"])
    decode_legs = [(0.05, legs(f"{number}", 32)[1]) for number in range(20)]
    alone, beside = (
        firsts(run(ExactEngine(limited), [(0.0, job("long", 1600, 1)), *others]))["long"]
        for others in ([], decode_legs)
    )
    assert beside == pytest.approx(alone)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_legs_all_end_and_free_their_blocks(end: End, asynchronous: bool) -> None:
    engine = ExactEngine(end(transfer=WIRE, kv_tokens=6144, async_scheduling=asynchronous))
    rng = random.Random(2)
    jobs = []
    for number in range(150):
        prompt, output = rng.choice([20, 90, 400, 1500]), rng.randint(1, 30)
        jobs.append(job(f"{number}", prompt, output, leg=rng.choice([*Leg])))
    leg_of = {each.id: each.leg for each in jobs}
    left: set[str] = set()
    ended: set[str] = set()

    def play(until: float) -> None:
        while (at := engine.next_at()) <= until and at < inf:
            for event in engine.advance(at):
                if event.finished:
                    ended.add(event.job_id)
                    if leg_of[event.job_id] is Leg.PREFILL:
                        engine.release(event.job_id, event.at)

    for number, each in enumerate(jobs):
        now = number * 0.02
        play(now)
        engine.submit(each, now)
        leaves = f"{number - rng.randrange(5)}"
        if number % 5 == 4 and leaves not in ended:
            engine.abort(leaves, now)
            left.add(leaves)
    play(inf)
    assert ended == leg_of.keys() - left
    assert left
    assert engine.gauges(0.0).kv_usage == 0


def test_request_larger_than_the_cache_raises() -> None:
    engine = ExactEngine(worker(kv_tokens=1024, max_model_len=1024))
    engine.submit(job("a", 2000, 4), 0.0)
    with pytest.raises(UsageError, match=r"w0: 1 requests are waiting.*kv_tokens"):
        drain(engine)

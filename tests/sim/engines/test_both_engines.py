"""What real schedulers and the fluid model do alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from tests.sim.making import MANY_POLICIES, drain, firsts, job, run, worker
from vllm_sched.cost.transfer import TransferTime
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.types import Engine, Event, Job, Leg, MakeEngine

Make = Callable[..., Engine]
WIRE = TransferTime(setup_s=0.05)
ENGINES: dict[str, MakeEngine] = {
    "exact": ExactEngine,
    "fluid": partial(FluidEngine, each_token=True),
}
# With `long_prompt` the prompts of these tests are long.
POLICIES: dict[str, dict[str, dict[str, object]]] = {
    "none": {},
    "long_prompt": {"long_prompt": {"long_prefill_token_threshold": 100}},
}


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest) -> Make:
    """Return a factory for an engine with the given changes of its worker."""
    return lambda **changes: ENGINES[request.param](worker(**changes))


@pytest.fixture(params=POLICIES)
def end(make: Make, request: pytest.FixtureRequest) -> Make:
    """Return a factory for an engine at an end of a hand-over."""
    return partial(make, transfers=True, policies=POLICIES[request.param])


def leg(kind: Leg, name: str = "a") -> Job:
    return job(name, 400, 3, leg=kind)


def test_step_times_follow_the_cost_model(make: Make) -> None:
    events = run(make(), [(1.0, job("a", 100, 3))])
    # The prompt: 10 ms and 100 tokens; then two steps of decoding alone.
    assert [(event.at, event.tokens, event.finished) for event in events] == [
        (pytest.approx(1.02), 1, False),
        (pytest.approx(1.03), 1, False),
        (pytest.approx(1.04), 1, True),
    ]


def test_async_scheduling_makes_arrivals_wait_for_two_steps(make: Make) -> None:
    arrivals = [(0.0, job("a", 100, 50)), (0.105, job("b", 100, 1))]
    # At 0.105 two steps of 10 ms are settled: they end at 0.11 and 0.12; b's own takes 20 ms.
    assert firsts(run(make(async_scheduling=True), arrivals))["b"] == pytest.approx(0.14)
    assert firsts(run(make(), arrivals))["b"] == pytest.approx(0.13)


def test_cached_prefix_is_not_computed_again(make: Make) -> None:
    shared = (("system", 400),)
    arrivals = [
        (0.0, job("a", 450, 1, shared=shared)),
        (1.0, job("b", 450, 1, shared=shared)),
        (2.0, job("c", 450, 1, shared=(("other", 400),))),
    ]
    events = run(make(), arrivals)
    assert [event.cached_tokens for event in events] == [0, 400, 0]
    assert firsts(events)["b"] == pytest.approx(1.015)
    assert [event.cached_tokens for event in run(make(prefix_caching=False), arrivals)] == [0] * 3


def test_aborted_job_yields_no_events_and_frees_its_blocks(make: Make) -> None:
    engine = make()
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
    assert engine.next_at() == inf


# Hand-overs


def test_prefill_leg_keeps_its_blocks_until_release(end: Make) -> None:
    engine = end(kv_tokens=4096)  # too few for both
    (event,) = run(engine, [(0.0, leg(Leg.PREFILL))])
    assert (event.tokens, event.finished, event.at) == (1, True, pytest.approx(0.05))
    assert engine.gauges(1.0).kv_usage == pytest.approx(400 / 4096, rel=0.01)
    engine.submit(job("b", 4000, 1), 1.0)
    assert drain(engine, 2.0) == []
    engine.release("a", 2.0)
    engine.release("unknown", 2.0)
    # Eight steps.
    assert firsts(drain(engine))["b"] == pytest.approx(2.0 + 8 * 0.01 + 4000 * 1e-4)
    assert engine.gauges(3.0).kv_usage == 0


@pytest.mark.parametrize(("kind", "at"), [(Leg.PREFILL, 0.045), (Leg.DECODE, 0.01)])
def test_aborted_leg_frees_its_blocks(end: Make, kind: Leg, at: float) -> None:
    engine = end(transfer=WIRE)
    engine.submit(leg(kind), 0.0)
    drain(engine, at)
    engine.abort("a", at)
    assert [event for event in drain(engine) if event.tokens] == []
    assert engine.gauges(1.0).kv_usage == 0


def test_decode_leg_fetches_its_kv_and_computes_one_token(end: Make) -> None:
    wire = TransferTime(setup_s=0.01, byte_s=1e-4)
    engine = end(transfer=wire, kv_token_bytes=1)
    events = run(engine, [(1.0, leg(Leg.DECODE))])
    assert (events[0].fetched, events[0].at) == (True, pytest.approx(1.05))
    # One token of prefill, then two steps of decoding.
    assert [event.at for event in events[1:]] == pytest.approx([1.0601, 1.0701, 1.0801])
    assert events[-1].finished
    assert engine.gauges(3.0).kv_usage == 0


def test_cached_kv_is_not_fetched(end: Make) -> None:
    engine = end(transfer=TransferTime(byte_s=1e-3), kv_token_bytes=1)
    shared = (("system", 320),)
    again = job("b", 400, 1, leg=Leg.DECODE, shared=shared)
    events = run(engine, [(0.0, job("a", 400, 1, shared=shared)), (1.0, again)])
    fetched = next(event for event in events if event.fetched)
    assert fetched.at == pytest.approx(1.0 + 0.080)


def test_worker_fetches_sequentially_while_others_decode(end: Make) -> None:
    a, b = leg(Leg.DECODE, "a"), leg(Leg.DECODE, "b")
    events = run(end(transfer=WIRE), [(0.0, job("c", 10, 100)), (0.5, a), (0.5, b)])
    fetched = [event.at for event in events if event.fetched]
    assert fetched[1] - fetched[0] == pytest.approx(0.05, abs=0.011)
    ticks = [event.at for event in events if event.job_id == "c"]
    assert max(y - x for x, y in pairwise(ticks)) < 0.0121


# Random arrivals


def fluid(rng: random.Random, seed: int, **changes: Any) -> Engine:
    """Return an engine, at times with a cache that is smaller than one prompt."""
    changes |= {"kv_tokens": rng.choice((3000, 20_000)), "max_num_batched_tokens": 1000}
    return FluidEngine(worker(**changes), each_token=seed % 3 == 0)


def exact(_rng: random.Random, _seed: int, **changes: Any) -> Engine:
    return ExactEngine(worker(kv_tokens=6144, transfers=True, **changes))


@pytest.mark.parametrize(
    ("build", "seed"),  # every policy with and without asynchronous steps
    [*((exact, seed) for seed in range(20)), *((fluid, seed) for seed in range(30))],
)
def test_random_arrivals_and_aborts_leave_no_state(build: Make, seed: int) -> None:
    rng = random.Random(seed)
    engine = build(
        rng,
        seed,
        policies=MANY_POLICIES[seed % len(MANY_POLICIES)],
        max_num_seqs=rng.choice((2, 8, 32)),
        async_scheduling=seed // len(MANY_POLICIES) % 2 == 0,
        transfer=TransferTime(0.01, 0.0, 1e-10),
    )
    now, events_of, gone, kept = 0.0, dict[str, list[Event]](), set[str](), list[str]()
    jobs = {
        f"j{i}": job(
            f"j{i}", rng.randint(1, 4000), rng.choice((1, 2, 30)), leg=rng.choice(list(Leg))
        )
        for i in range(60)
    }
    waiting = list(jobs.values())

    def advance(at: float) -> None:
        for event in engine.advance(at):
            # vLLM ends a transfer whose request is gone.
            assert event.job_id not in gone or (build is exact and event.fetched)
            events_of.setdefault(event.job_id, []).append(event)
            if event.finished and jobs[event.job_id].leg is Leg.PREFILL:
                kept.append(event.job_id)

    present = set[str]()
    for _ in range(20_000):
        due = engine.next_at()
        if waiting and (due == inf or rng.random() < 0.3):
            now = min(now + rng.random() * 0.1, due)
            advance(now)
            present.add(waiting[-1].id)
            engine.submit(waiting.pop(), now)
        elif kept and (due == inf or rng.random() < 0.3):
            engine.release(kept.pop(rng.randrange(len(kept))), now)
        elif due == inf:
            break
        else:
            now = due
            advance(now)
        # A job may be aborted at any time, before its first event too.
        if present and rng.random() < 0.02:
            name = rng.choice(sorted(present - gone))
            if name not in events_of or not events_of[name][-1].finished:
                gone.add(name)
                engine.abort(name, now)
    assert engine.next_at() == inf
    for name, events in events_of.items():
        if name not in gone:
            output = 1 if jobs[name].leg is Leg.PREFILL else jobs[name].output_tokens
            assert sum(event.finished for event in events) == 1
            assert events[-1].finished
            if jobs[name].leg is not Leg.PREFILL:
                assert sum(event.tokens for event in events) == output
    assert events_of.keys() | gone == jobs.keys()
    assert engine.gauges(now).waiting == 0
    gauges = engine.gauges(now)
    assert gauges == gauges._replace(
        running=0, waiting=0, kv_usage=0.0, backlog_tokens=0, backlog_long_tokens=0
    )


@pytest.mark.parametrize(("slots", "at", "first"), [(2, 0.2, "medium"), (16, 0.12, "short")])
def test_medium_keeps_its_turn_if_slots_are_scarce(
    make: Make, slots: int, at: float, first: str
) -> None:
    policies = {"long_prompt": {}}
    engine = make(max_num_seqs=slots, max_model_len=16_384, policies=policies)
    busy = [(0.0, job("a", 20, 40)), (0.0, job("b", 20, 90))]
    # The first medium fills two steps.
    arrivals = [(0.1, job("earlier", 650, 2))] * (slots > 2)
    arrivals += [(0.1, job("medium", 600, 9)), (at, job("short", 50, 9))]
    begun = firsts(run(engine, busy + arrivals))
    assert min(("medium", "short"), key=begun.__getitem__) == first

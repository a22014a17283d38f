"""The plain worker beside real schedulers: how near it comes, policy by policy.

Crowds that neither cache holds at once, longs among shorts. What must hold is what a plan rests on:
times to first token and their tail, gaps, and how long all of it takes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.sim.making import ends, firsts, run, worker
from vllm_sched.bench.stats import percentile
from vllm_sched.cost.step_time import StepTime
from vllm_sched.sim.exact import ExactEngine
from vllm_sched.sim.fluid import Fluid
from vllm_sched.sim.types import Engine, Event, Job

TIME = StepTime(
    decode_fixed_s=0.010, decode_s=1e-4, prefill_fixed_s=0.011, prefill_s=5e-5, mixed_s=0.002
)
# Each with its slots, and how near it has to come.
WAYS: list[tuple[dict[str, Any], int, float]] = [
    ({}, 24, 0.01),
    ({"static_batching": {"size": 8}}, 24, 0.01),
    ({"prefill_first": {}}, 24, 0.02),
    ({"chunk_budget": {"chunk": 256}}, 24, 0.01),
    # What it learns while it runs the plain worker knows from the start.
    ({"chunk_budget": {"itl_ms": 40}}, 24, 0.15),
    ({"long_prompt": {"long_prefill_token_threshold": 2000}}, 24, 0.05),
    ({"deferred_prefill": {"departures": 4}}, 8, 0.2),
]


def crowd(count: int) -> list[tuple[float, Job]]:
    """Draw jobs, one in twelve of them long."""
    rng, now, jobs = random.Random(5), 0.0, []
    for number in range(count):
        now += rng.expovariate(10)
        long = number % 12 == 5
        prompt = rng.randint(4000, 8000) if long else rng.randint(50, 900)
        jobs.append((now, Job(f"j{number}", prompt, rng.randint(2, 60), number)))
    return jobs


def figures(engine: Engine, jobs: list[tuple[float, Job]]) -> dict[str, float]:
    """Play, and sum up."""
    told: dict[str, list[Event]] = {}
    for event in run(engine, jobs):
        told.setdefault(event.job_id, []).append(event)
    arrived = {job.id: at for at, job in jobs}
    ttfts = [events[0].at - arrived[name] for name, events in told.items()]
    gaps = [b.at - a.at for events in told.values() for a, b in pairwise(events)]
    return {
        "ttft mean": sum(ttfts) / len(ttfts),
        "ttft p95": percentile(ttfts, 95) or 0.0,
        "gap mean": sum(gaps) / len(gaps),
        "gap p99": percentile(gaps, 99) or 0.0,
        "gap longest": max(gaps),
        "end": max(events[-1].at for events in told.values()),
    }


@pytest.mark.parametrize(("policies", "slots", "near"), WAYS, ids=str)
def test_a_plain_worker_is_near_a_real_scheduler(
    policies: dict[str, Any], slots: int, near: float
) -> None:
    model = worker(
        TIME, max_num_seqs=slots, max_num_batched_tokens=1024, max_model_len=16_384,
        kv_tokens=60_000, policies=policies, async_scheduling=True,
    )  # fmt: skip
    jobs = crowd(150)
    exact = figures(ExactEngine(model), jobs)
    plain = figures(Fluid(model, each_token=True), jobs)
    assert plain == pytest.approx(exact, rel=near)


# What is read again and what is attended to makes each step of a long prompt longer than the last.
GROWING = replace(TIME, prefill_s=2e-5, pair_s=2e-8, context_s=2e-7, read_s=1e-6)


@pytest.mark.parametrize("budget", [512, 2048])
@pytest.mark.parametrize("itl_ms", [40, 60])
def test_gaps_stay_within_their_target_where_steps_are_not_told_one_by_one(
    budget: int, itl_ms: int
) -> None:
    policies = {"chunk_budget": {"itl_ms": itl_ms}}
    model = worker(
        GROWING, max_num_seqs=24, max_num_batched_tokens=budget, max_model_len=16_384,
        kv_tokens=400_000, policies=policies,
    )  # fmt: skip
    jobs = [
        (2 * at, replace(each, prompt_tokens=2 * each.prompt_tokens))
        if each.prompt_tokens >= 4000
        else (2 * at, each)
        for at, each in crowd(100)
    ]
    exact = figures(ExactEngine(model), jobs)
    longest: list[float] = []
    plain = Fluid(model, ended=lambda _job, gap: longest.append(gap))
    told = run(plain, jobs)
    arrived = {each.id: at for at, each in jobs}
    first = firsts(told)
    # What a plan counts as late: a gap above what was asked for.
    assert max(longest) <= itl_ms / 1000
    assert max(longest) == pytest.approx(exact["gap longest"], rel=0.1)
    assert plain.gaps.quantile(0.99) == pytest.approx(exact["gap p99"], rel=0.1)
    ttft = sum(first[name] - arrived[name] for name in first) / len(first)
    assert ttft == pytest.approx(exact["ttft mean"], rel=0.1)
    assert max(ends(told).values()) == pytest.approx(exact["end"], rel=0.05)


def test_a_prompt_with_much_in_cache_is_given_no_more_than_fits() -> None:
    policies = {"chunk_budget": {"itl_ms": 40}}
    model = worker(
        GROWING, max_num_seqs=24, max_num_batched_tokens=2048, max_model_len=16_384,
        kv_tokens=400_000, policies=policies,
    )  # fmt: skip
    jobs = [
        (0.0, Job("first", 10_000, 2, 1, shared=(("a", 10_000),))),
        (10.0, Job("decodes", 50, 400, 2)),
        (10.5, Job("again", 14_000, 2, 3, shared=(("a", 10_000),))),
    ]
    gaps: dict[str, float] = {}
    plain = Fluid(model, ended=lambda job, gap: gaps.update({job.id: gap}))
    told = run(plain, jobs)
    assert any(event.cached_tokens >= 10_000 for event in told if event.job_id == "again")
    assert 0.03 < gaps["decodes"] <= 0.04

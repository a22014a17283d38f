"""The plain worker beside real schedulers: how near it comes, policy by policy.

Crowds that neither cache holds at once, longs among shorts. What must hold is what a plan rests on:
times to first token and their tail, gaps, and how long all of it takes.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from tests.sim.making import run, worker
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

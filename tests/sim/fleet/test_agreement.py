"""The fluid engine against real schedulers, by policy.

A plan relies on the figures compared here: times to first token, their tail, gaps and makespan.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.agreement import CASES, FAR_ON, GROWING, TIME, by_job, draw_jobs, figures, play_both
from tests.sim.making import ends, firsts, run, worker
from vllm_sched.cost.step_time import StepTime
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.types import Job, WorkerModel


@pytest.mark.parametrize("name", [*CASES, *FAR_ON])
def test_fluid_engine_is_close_to_a_real_scheduler(name: str) -> None:
    case = (CASES | FAR_ON)[name]
    exact, fluid = play_both(case)
    assert fluid == pytest.approx(exact, rel=case.tolerance)


CHUNKS = ("chunk_budget",)
BOTH = ("long_prompt", "chunk_budget")


def gap_policies(itl_ms: int, *names: str) -> dict[str, dict[str, int]]:
    """Return settings of policies that keep gaps within this time."""
    known = {
        "chunk_budget": {"itl_ms": itl_ms},
        "long_prompt": {"long_prefill_token_threshold": 2000},
    }
    return {name: known[name] for name in names}


def large_worker(time: StepTime, budget: int, kv_tokens: int, **more: Any) -> WorkerModel:
    return worker(
        time, max_num_seqs=24, max_num_batched_tokens=budget, max_model_len=16_384,
        kv_tokens=kv_tokens, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("policies", "budget", "itl_ms", "cached"),
    [
        *((CHUNKS, budget, itl_ms, 0) for budget in (512, 2048) for itl_ms in (40, 60)),
        (BOTH, 512, 60, 0), (BOTH, 2048, 60, 0), (BOTH, 512, 60, 5000), (BOTH, 2048, 40, 5000),
    ],
)  # fmt: skip
def test_merged_steps_keep_gaps_within_the_target(
    policies: tuple[str, ...], budget: int, itl_ms: int, cached: int
) -> None:
    model = large_worker(GROWING, budget, 400_000, policies=gap_policies(itl_ms, *policies))
    # Far enough apart that each long prompt enters alone.
    shared, apart = ((("a", cached),), 4) if cached else ((), 2)
    jobs = [
        (apart * at, replace(each, prompt_tokens=2 * each.prompt_tokens, shared=shared))
        if each.prompt_tokens >= 4000
        else (apart * at, each)
        for at, each in draw_jobs(100)
    ]
    truly = run(ExactEngine(model), jobs)
    exact, ticks = figures(truly, jobs), by_job(truly).values()
    gaps = [at - before for each in ticks for before, at in pairwise(each)]
    assert sum(gap > itl_ms / 1000 for gap in gaps) < 0.01 * len(gaps)
    longest: list[float] = []
    plain = FluidEngine(model, ended=lambda _job, gap: longest.append(gap))
    events = run(plain, jobs)
    arrived = {each.id: at for at, each in jobs}
    first = firsts(events)
    # A plan counts a gap above the target as late.
    assert max(longest) <= itl_ms / 1000
    assert max(longest) == pytest.approx(max(gaps), rel=0.1)
    assert plain.gaps.quantile(0.99) == pytest.approx(exact["ITL p99"], rel=0.1)
    ttft = sum(first[name] - arrived[name] for name in first) / len(first)
    # The policy for long prompts finds its chunk by trying.
    assert ttft == pytest.approx(exact["TTFT mean"], rel=0.1 if policies == CHUNKS else 0.2)
    assert max(ends(events).values()) == pytest.approx(exact["last token"], rel=0.07)


@pytest.mark.parametrize("policies", [CHUNKS, BOTH])
def test_chunk_of_a_prompt_with_a_cached_prefix_fits_the_gap(policies: tuple[str, ...]) -> None:
    model = large_worker(GROWING, 2048, 400_000, policies=gap_policies(40, *policies))
    jobs = [
        (0.0, Job("first", 10_000, 2, 1, shared=(("a", 10_000),))),
        (10.0, Job("decodes", 50, 400, 2)),
        (10.5, Job("again", 14_000, 2, 3, shared=(("a", 10_000),))),
    ]
    gaps: dict[str, float] = {}
    plain = FluidEngine(model, ended=lambda job, gap: gaps.update({job.id: gap}))
    events = run(plain, jobs)
    assert any(event.cached_tokens >= 10_000 for event in events if event.job_id == "again")
    assert 0.03 < gaps["decodes"] <= 0.04


@pytest.mark.parametrize("tokens", [22_000, 40_000])
def test_shared_prefix_of_running_requests_is_cached_once(tokens: int) -> None:
    """With separate copies, two or four requests would fill the cache."""
    model = large_worker(TIME, 1024, tokens)
    jobs = [
        (
            3 * (at > 0) + 0.1 * at,
            Job(f"j{at}", 8000 + 20 * (at % 11), 40 + at % 30, at, (("a", 8000),)),
        )
        for at in range(80)
    ]
    exact, plain = (
        figures(run(engine, jobs), jobs)
        for engine in (ExactEngine(model), FluidEngine(model, each_token=True))
    )
    assert plain == pytest.approx(exact, rel=0.1)


def test_prefix_of_the_last_finished_request_is_evicted_last() -> None:
    model = large_worker(TIME, 1024, 20_000)
    jobs = [
        (0.0, Job("stays", 8016, 400, 1, (("a", 8000),))),
        (2.0, Job("leaves", 8016, 20, 2, (("b", 8000),))),
        (60.0, Job("large", 6000, 2, 3)),
        (70.0, Job("again", 8016, 2, 4, (("a", 8000),))),
    ]
    for engine in (ExactEngine(model), FluidEngine(model, each_token=True)):
        events = run(engine, jobs)
        done = ends(events)
        assert done["leaves"] < done["stays"] < 60
        assert max(event.cached_tokens for event in events if event.job_id == "again") == 8000

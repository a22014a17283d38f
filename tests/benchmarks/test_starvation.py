"""`python -m benchmarks.starvation` without workers."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.starvation import (
    NEVER_S,
    SCENES,
    SLOTS,
    MetricsPoller,
    SceneResult,
    Waits,
    WorkerMetrics,
    failures,
    sum_of,
    waits_of,
)
from vllm_sched.bench.client.wire import Address, Wire
from vllm_sched.bench.results.engine_trace import PREFILL, WAITING, Phase
from vllm_sched.errors import VllmSchedError
from vllm_sched.policies.registry import build
from vllm_sched.policies.types import EngineFacts

PAGE = """\
# TYPE vllm_sched_starvation_releases counter
vllm_sched_starvation_releases_total{engine="0",policy="lanes"} 2.0
vllm_sched_starvation_releases_total{engine="0",policy="long_prompt"} 1.0
# TYPE vllm_sched_requests_waiting gauge
vllm_sched_requests_waiting{engine="0",lane="urgent",policy="lanes"} 30.0
vllm_sched_requests_waiting{engine="0",lane="batch",policy="lanes"} 4.0
"""
TOTALS = WorkerMetrics(released=2, held_s=8.2, held=2, fewest_waiting=12, most_running=20)
KEPT = SceneResult({"long": Waits("long", waited_s=[4.02, 4.3])}, TOTALS)
NEVER = SceneResult({"long": Waits("long", still_s=[10.0])}, WorkerMetrics(most_running=20))


def test_metrics_are_summed_by_labels() -> None:
    assert sum_of(PAGE, "vllm_sched_starvation_releases_total") == 3
    assert sum_of(PAGE, "vllm_sched_starvation_releases_total", policy="lanes") == 2
    assert sum_of(PAGE, "vllm_sched_requests_waiting", policy="lanes", lane="urgent") == 30
    assert sum_of(PAGE, "vllm_sched_hold_seconds_sum") == 0


def test_wait_ends_with_the_first_computing_step() -> None:
    stories = {
        "round1-0": [Phase(WAITING, 10.0, 14.1), Phase(PREFILL, 14.1, 14.2, 5)],
        "round1-1": [Phase(WAITING, 10.0, 20.0)],
    }
    names = {"round1-0": "normal", "round1-1": "batch"}
    assert waits_of(stories, names) == {
        "normal": Waits("normal", waited_s=[pytest.approx(4.1)]),
        "batch": Waits("batch", still_s=[10.0]),
    }


def bounded(*waited: float, still: tuple[float, ...] = (), **told: int) -> SceneResult:
    """Return a result with these waits and changed totals."""
    return SceneResult({"long": Waits("long", [*waited], [*still])}, replace(TOTALS, **told))


@pytest.mark.parametrize(
    ("bounded", "problem"),
    [
        (KEPT, ""),
        (bounded(4.0, 5.2), "waited 5.20 s, the bound is 4 s"),
        (bounded(0.4, 4.1), "waited only 0.40 s, so it was not held"),
        (bounded(4.0, 4.1, still=(11.0,)), "1 never started"),
        (bounded(4.1), "/metrics count 2 of 1 as released"),
        (bounded(4.02, 4.3, most_running=SLOTS), "may have waited for a slot"),
        (bounded(4.02, 4.3, fewest_waiting=0), "at times no short request waited"),
    ],
)
def test_broken_bound_is_reported(bounded: SceneResult, problem: str) -> None:
    found = "; ".join(failures("scene", bounded, NEVER, 4.0))
    assert problem in found
    assert bool(problem) == bool(found)


def test_shorts_that_hold_no_request_are_reported() -> None:
    started = SceneResult({"long": Waits("long", waited_s=[6.0])}, WorkerMetrics(released=1))
    problem = "; ".join(failures("scene", KEPT, started, 4.0))
    assert "1 started without a bound" in problem
    assert "released 1 without a bound" in problem


async def test_falling_counter_is_an_error() -> None:
    pages = [PAGE, PAGE.replace(" 2.0", " 1.0")]

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=pages.pop(0))

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server:
        with closing(Wire(Address.parse(str(server.make_url("/"))), {})) as wire:
            poller = MetricsPoller(wire, SCENES["lanes"])
            assert (await poller.poll()).released == 2
            with pytest.raises(VllmSchedError, match="fell to 1"):
                await poller.poll()


@pytest.mark.parametrize("name", SCENES)
def test_policies_get_their_bounds(name: str) -> None:
    facts = EngineFacts(max_model_len=16384, max_num_batched_tokens=512, max_num_seqs=SLOTS)
    for bound_s in (4.0, NEVER_S):
        scene = SCENES[name]
        made = {built.name: built for built in build(scene.side(bound_s).settings, facts)}
        for policy, key in scene.bounds:
            assert getattr(made[policy].settings, key) == bound_s

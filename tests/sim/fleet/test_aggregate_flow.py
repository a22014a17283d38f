"""The aggregate flow: closed forms, and no request is lost."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from proxy.config import FleetConfig
from proxy.core.model.role import Role
from proxy.core.router import RouterSettings
from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.cost.step_time import StepTime
from vllm_sched.cost.transfer import TransferTime
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.fleet.aggregate_flow import AggregateFlow, PlacedWorker
from vllm_sched.sim.fleet.figures import FlowResult
from vllm_sched.sim.fleet.fleet import SimulatedFleet
from vllm_sched.sim.fleet.models import of_profile
from vllm_sched.sim.planning.fleet_shapes import BOTH, LONG_PROMPT, FleetShape
from vllm_sched.sim.types import WorkerModel

TIME = StepTime(decode_fixed_s=0.01, decode_s=1e-4, prefill_fixed_s=0.011, prefill_s=1e-4)
NONE = Targets()


def placed(name: str, role: Role = Role.GENERAL, **given: Any) -> PlacedWorker:
    settings: dict[str, Any] = {
        "time": TIME, "max_model_len": 131_072, "kv_tokens": 400_000, "async_scheduling": False,
        "kv_token_bytes": 1000, "transfer": TransferTime(0.01, 0.0, 1e-9),
    }  # fmt: skip
    return PlacedWorker(WorkerModel(name=name, **settings | given), role)


def play(
    workers: list[PlacedWorker],
    requests: Iterable[Request],
    targets: Targets = NONE,
    **settings: Any,
) -> FlowResult:
    return AggregateFlow(workers, RouterSettings(**settings), targets).play(requests)


def traffic(count: int, rate: float, workload: str = "azure-conv", seed: int = 0) -> Schedule:
    return Schedule(
        source=find(workload), seed=seed, rate=rate, count=count, duration_s=count / rate * 2
    )


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_single_server_waits_as_m_d_1(load: float) -> None:
    service = 0.011 + 1000 * 1e-4
    rng, now, free, waits, requests = random.Random(1), 0.0, 0.0, 0.0, []
    for _ in range(3000):
        now += rng.expovariate(load / service)
        free = max(free, now) + service  # Lindley's recursion
        waits += free - service - now
        requests.append(Request(now, "x", 1000, 1))
    worker = placed("w", max_num_batched_tokens=1000, max_num_seqs=1)
    run = play([worker], requests, queue_requests=10**6, queue_wait_s=1e6)
    assert run.all.ttft.mean - service == pytest.approx(waits / len(requests), rel=1e-6)


def test_every_request_is_counted_once() -> None:
    run = play([placed(f"w{i}") for i in range(3)], traffic(400, 12))
    figures = run.all
    assert (figures.arrived, figures.done, run.refused) == (400, 400, 0)
    assert figures.ttft.count == 400
    assert run.classes["azure-conv"].done == 400
    assert figures.output_tokens == sum(each.output_tokens for each in traffic(400, 12))
    assert run.gaps.count == figures.output_tokens - 400


def test_request_beyond_every_context_is_refused() -> None:
    requests = [Request(0.0, "x", 500, 10), Request(0.1, "x", 5000, 10)]
    run = play([placed("a", max_model_len=4096)], requests)
    assert (run.all.done, run.refused) == (1, 1)
    assert run.all.share == 0.5


def test_full_fleet_queues_requests_and_refuses_the_rest() -> None:
    requests = [Request(0.0, "x", 1000, 200) for _ in range(10)]
    worker = replace(placed("a"), max_requests=2)
    run = play([worker], requests, queue_requests=3, queue_wait_s=100)
    assert (run.all.done, run.refused) == (5, 5)
    run = play([worker], requests, queue_requests=30, queue_wait_s=3)
    assert 2 <= run.all.done < 10
    assert run.all.done + run.refused == 10


def test_targets_apply_to_each_request() -> None:
    requests = [Request(0.0, "x", 1000, 11), Request(10.0, "x", 6000, 11)]
    workers = [placed("a")]
    assert play(workers, requests, Targets(ttft=0.3)).all.met == 1
    assert play(workers, requests, Targets(tpot=0.0102)).all.met == 2
    assert play(workers, requests, Targets(tpot=0.009)).all.met == 0
    assert play(workers, requests, Targets(e2el=0.5)).all.met == 1
    overlapping = [Request(0.0, "x", 10, 300), Request(1.0, "x", 6000, 11)]
    assert play(workers, overlapping, Targets(itl=0.2)).all.met == 1


def test_prompts_are_handed_over_if_that_is_faster() -> None:
    workers = [placed("p", Role.PREFILL), placed("d", Role.DECODE)]
    whole = play(workers, traffic(300, 4, "azure-code"), transfer=False)
    handed = play(workers, traffic(300, 4, "azure-code"), transfer=True)
    assert whole.all.handed_over == 0
    assert handed.all.handed_over > 50
    assert handed.all.done == whole.all.done == 300
    assert handed.gaps.quantile(0.99) < whole.gaps.quantile(0.99)


def test_prefix_affinity_keeps_conversations_on_their_worker() -> None:
    schedule = traffic(400, 4, "mooncake-conv")
    workers = [placed(f"w{i}") for i in range(4)]
    kept = play(workers, schedule)
    spread = play(workers, schedule, prefix_affinity=False)
    assert kept.all.ttft.mean < 0.9 * spread.all.ttft.mean


@pytest.mark.parametrize(
    "shape",
    [
        FleetShape(general=3),
        FleetShape(short=1, long=2, short_limit=3000, policy=BOTH),
        FleetShape(prefill=1, decode=2, policy=LONG_PROMPT),
    ],
    ids=str,
)
def test_aggregate_flow_agrees_with_simulated_fleet(shape: FleetShape) -> None:
    machine = of_profile("h100-8b")
    schedule = traffic(500, 9, "azure-conv:0.9,mooncake-conv:0.1")
    counted = AggregateFlow(shape.place_workers(machine), shape.settings(), NONE).play(schedule)
    config = FleetConfig(**shape.to_fleet("m", machine))
    models = {each.model.name: each.model for each in shape.place_workers(machine)}
    # Both take the machine's transfer times.
    kept = SimulatedFleet(config, models, partial(FluidEngine, each_token=True)).play(schedule)
    outcomes = [each for each in kept.outcomes if each.good]
    assert len(outcomes) == counted.all.done == 500
    ttft = sum(each.ttft for each in outcomes) / len(outcomes)
    end = max(each.end for each in outcomes)
    # The router learns of tokens sooner here, so its choices may differ.
    assert counted.all.ttft.mean == pytest.approx(ttft, rel=0.15)
    assert counted.duration_s == pytest.approx(end, rel=0.05)
    gaps = sorted(gap for each in outcomes for gap in each.itls)
    assert counted.gaps.count == pytest.approx(len(gaps))
    assert counted.gaps.quantile(0.99) == pytest.approx(gaps[int(0.99 * len(gaps))], rel=0.1)


@pytest.mark.parametrize("limit", [{"max_late": 3}, {"max_lost": {"": 3}}])
def test_run_fails_at_the_first_token_that_comes_too_late(limit: dict[str, Any]) -> None:
    # Each output takes ten seconds, so no request has ended after the fourth first token.
    requests = [Request(0.001 * n, "", 100, 1000) for n in range(10)]
    flow = AggregateFlow([placed("w")], RouterSettings(), Targets(ttft=1e-6))
    run = flow.play(requests, **limit)
    assert run.failed
    assert (run.all.arrived, run.all.ended) == (10, 0)


def test_late_request_counts_once() -> None:
    requests = [Request(float(n), "", 100, 20) for n in range(10)]

    def play(max_late: float, targets: Targets, tolerated_ttft_s: float) -> FlowResult:
        flow = AggregateFlow([placed("w")], RouterSettings(), targets, lambda _: tolerated_ttft_s)
        return flow.play(requests, max_late=max_late, max_lost={"": max_late})

    # Late by the first token, by the pace, or by both.
    for targets in (Targets(ttft=1e-6), Targets(tpot=1e-6), Targets(ttft=1e-6, tpot=1e-6)):
        for tolerated_ttft_s in (0.0, 10.0):
            assert not play(10, targets, tolerated_ttft_s).failed
        assert play(9, targets, 0.0).failed
    assert play(10, Targets(ttft=1e-6), 10.0).all.kept == 10

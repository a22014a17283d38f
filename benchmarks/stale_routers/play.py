"""Play one run in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Final, NamedTuple

from benchmarks.stale_routers.hosts import StaleFleet
from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.results.stats import percentile
from vllm_sched.bench.traffic.catalogue import find
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.cli.fleet import fleet as fleet_file
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.fleet.models import worker_models

FLEET: Final = Path(__file__).parents[2] / "deploy/fleets/reference-24.yaml"
WORKLOAD: Final = "azure-conv:0.95,mooncake-conv:0.05"
TENANTS: Final = 50
TARGETS: Final = Targets(ttft=3.0, tpot=0.1)


@dataclass(frozen=True, slots=True)
class Side:
    """Some routers; `age_s` is None if they share nothing."""

    routers: int
    age_s: float | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and the most requests of a worker (None: as in the fleet file)."""

    rate: float
    seconds: float
    max_requests: int | None = None


class Figures(NamedTuple):
    """The figures of a run; times in seconds."""

    in_time: float  # share of all requests
    goodput: float  # requests in time per second of arrivals
    short_p50: float  # first tokens
    short_p99: float
    long_p50: float
    long_p99: float
    tpot_p50: float
    tpot_p99: float
    refused: float  # share
    most: float  # requests that a worker had at once


def make_fleet(side: Side, load: Load, seed: int) -> StaleFleet:
    config = fleet_file.read(FLEET)
    if load.max_requests is not None:
        limit = {"max_requests": load.max_requests}
        workers = [worker.model_copy(update=limit) for worker in config.workers]
        config = config.model_copy(update={"workers": workers})
    return StaleFleet(
        config,
        worker_models(config, FLEET),
        partial(FluidEngine, each_token=True),
        count=side.routers,
        age_s=side.age_s,
        seed=seed,
    )


def make_schedule(load: Load, seed: int) -> Schedule:
    return Schedule(
        source=find(WORKLOAD),
        seed=seed,
        rate=load.rate,
        duration_s=load.seconds,
        tenants=TENANTS,
    )


def play(job: tuple[Side, Load, int]) -> Figures:
    """Return what a side does with a load and a seed."""
    side, load, seed = job
    fleet = make_fleet(side, load, seed)
    outcomes = fleet.play(make_schedule(load, seed)).outcomes
    fleet.close()
    good = [outcome for outcome in outcomes if outcome.good]
    limit = fleet.router.settings.short_limit
    ttfts: dict[bool, list[float]] = {False: [], True: []}
    for outcome in good:
        ttfts[outcome.prompt_tokens + outcome.completed > limit].append(outcome.ttft)
    tpots = [outcome.tpot for outcome in good if outcome.tpot is not None]
    in_time = sum(map(TARGETS.is_met_by, good))
    return Figures(
        in_time / len(outcomes),
        in_time / load.seconds,
        *(
            percentile(values, percent) or 0.0
            for values in (ttfts[False], ttfts[True], tpots)
            for percent in (50, 99)
        ),
        1 - len(good) / len(outcomes),
        fleet.most_requests,
    )


def mean_of(runs: list[Figures]) -> Figures:
    return Figures(*map(mean, zip(*runs, strict=True)))

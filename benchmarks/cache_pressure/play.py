"""Play one side of a cell in virtual time, and measure it after the caches have filled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.cache_pressure.loads import (
    MAX_PROMPT_TOKENS,
    OUTPUT_TOKENS,
    GrowingSessions,
    SharedPrefixes,
)
from benchmarks.cache_pressure.sides import (
    EXACT,
    KNOWN,
    LOAD,
    ORACLE,
    SeesCaches,
    follow_journals,
)
from proxy.config import FleetConfig
from proxy.core.learned.prefix_index import COVERED
from vllm_sched.bench.results.stats import percentile
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request, TrafficSource
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.engines.prompt_hashes import BYTES_PER_TOKEN
from vllm_sched.sim.fleet.base_fleet import RequestFlight
from vllm_sched.sim.fleet.fleet import SimulatedFleet
from vllm_sched.sim.fleet.models import worker_models

PROFILE: Final = "h100-llama-3.1-8b-bf16-tp1"
PREFIXES, SESSIONS = LOADS = ("prefixes", "sessions")
CONCURRENCY: Final = 8  # per worker
WARM_UP_SHARE: Final = 0.4  # of the time, before the measurement
BLOCK_TOKENS: Final = [(end - start) // BYTES_PER_TOKEN for start, end in pairwise(COVERED)]


@dataclass(frozen=True, slots=True)
class Cell:
    """A fleet and a load; `rate` is that of an open loop, in requests/s per worker."""

    workers: int
    pressure: float  # size of all prefixes over that of all caches
    load: str = PREFIXES
    rate: float | None = None

    def __str__(self) -> str:
        loop = "closed loop" if self.rate is None else f"{self.rate * self.workers:g} requests/s"
        return f"{self.workers} workers, {self.load} of {self.pressure:g}x all caches, {loop}"


class Served(NamedTuple):
    at: float  # the end
    ttft: float
    prompt: int
    output: int
    cached: int
    expected: int  # cached tokens, when it was placed


@dataclass(frozen=True, slots=True)
class Figures:
    """What one side does in one cell."""

    hit: float  # cached share of all prompt tokens
    requests_per_s: float
    tokens_per_s: float  # of prompts and responses
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    within_block: float  # share of predictions that are right within a block of bytes
    error_tokens: float  # mean absolute error of predictions
    failed: int = 0


class RecordingFleet(SimulatedFleet):
    """Notes each request that was served."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.names_sessions = False
        self.served: list[Served] = []
        self.failed = 0

    def _arrive(self, request: Request, now: float, ended: Callable[[float], None] | None) -> None:
        if not self.names_sessions:
            request = replace(request, session="")
        super()._arrive(request, now, ended)

    def _end_request(self, flight: RequestFlight, now: float, *, pause_s: float = 0.0) -> None:
        outcome, lease = flight.outcome, flight.lease
        if lease is None or outcome.error:
            self.failed += 1
        else:
            prompt, expected = flight.request.prompt_tokens, lease.decision.cached_tokens
            self.served.append(
                Served(now, outcome.ttft, prompt, outcome.completed, flight.cached_tokens, expected)
            )
        super()._end_request(flight, now, pause_s=pause_s)


def fleet_of(cell: Cell, side: str) -> RecordingFleet:
    longest = MAX_PROMPT_TOKENS + OUTPUT_TOKENS[1]
    workers = [
        {"name": f"w{n}", "profile": PROFILE, "max_model_len": longest} for n in range(cell.workers)
    ]
    blocks = {
        "workers": workers,
        "router": {"queue": {"max_wait_s": 600}},
        "routing": {"prefix_affinity": side != LOAD},
    }
    config = FleetConfig.model_validate({"model": "m", **blocks})
    fleet = RecordingFleet(config, worker_models(config, Path("fleet.yaml")), ExactEngine)
    fleet.names_sessions = side == KNOWN
    if side == EXACT:
        follow_journals(fleet)
    elif side == ORACLE:
        fleet.router.placer.rule = SeesCaches(fleet)
    return fleet


def schedule_of(cell: Cell, kv_tokens: int, seed: int, seconds: float) -> Schedule:
    prefix_tokens, concurrency = cell.pressure * kv_tokens, CONCURRENCY * cell.workers
    source: TrafficSource
    if cell.load == SESSIONS:
        source = GrowingSessions(prefix_tokens, concurrency)
    else:
        source = SharedPrefixes(prefix_tokens)
    schedule = Schedule(source=source, seed=seed, duration_s=seconds)
    if cell.rate is None:
        return replace(schedule, concurrency=concurrency)
    return replace(schedule, rate=cell.rate * cell.workers)


def play(job: tuple[Cell, str, int, float]) -> Figures:
    """Return what a side does in a cell, with the prompts of a seed."""
    cell, side, seed, seconds = job
    fleet = fleet_of(cell, side)
    kv_tokens = sum(model.kv_tokens for model in fleet.models.values())
    fleet.play(schedule_of(cell, kv_tokens, seed, seconds))
    return figures(fleet, WARM_UP_SHARE * seconds, seconds)


def figures(fleet: RecordingFleet, start: float, end: float) -> Figures:
    """Return the figures of the requests that ended in this time."""
    served = [request for request in fleet.served if start <= request.at < end]
    prompts = sum(request.prompt for request in served)
    ttfts = [request.ttft for request in served]
    errors = [abs(request.cached - request.expected) for request in served]
    near = [
        error <= block_tokens(request.cached) for request, error in zip(served, errors, strict=True)
    ]
    return Figures(
        sum(request.cached for request in served) / prompts,
        len(served) / (end - start),
        sum(request.prompt + request.output for request in served) / (end - start),
        *(percentile(ttfts, percent) or 0.0 for percent in (50, 90, 99)),
        sum(near) / len(served),
        sum(errors) / len(served),
        fleet.failed,
    )


def block_tokens(tokens: int) -> int:
    """Return the size of the block of bytes with this token of a prompt."""
    at = bisect_right(COVERED, tokens * BYTES_PER_TOKEN) - 1
    return BLOCK_TOKENS[min(at, len(BLOCK_TOKENS) - 1)]

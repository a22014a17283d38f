"""Workers, jobs and fleets for simulator tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

from proxy.config import FleetConfig
from vllm_sched.bench.traffic.sessions.conversation import first_request
from vllm_sched.bench.traffic.types import Request, Session, TrafficSource
from vllm_sched.cost.step_time import StepTime
from vllm_sched.sim.fleet.models import of_profile, worker_models
from vllm_sched.sim.types import Engine, Event, Job, WorkerModel

# A step takes 10 ms, and 100 tokens of prefill another 10 ms.
EVEN = StepTime(decode_fixed_s=0.010, prefill_fixed_s=0.010, prefill_s=1e-4)

MANY_POLICIES: list[dict[str, Any]] = [
    {},
    {"prefill_first": {}},
    {"static_batching": {}},
    {"static_batching": {"size": 4}},
    {"chunk_budget": {"itl_ms": 40}},
    {"chunk_budget": {"chunk": 128}},
    {"long_prompt": {"long_prefill_token_threshold": 1500}},
    {"deferred_prefill": {"departures": 2}},
    {"prefill_first": {}, "deferred_prefill": {"departures": 2}},
    {"deferred_prefill": {}},
]


class Listed(TrafficSource):
    name, timed, rate = "listed", True, 1.0

    def __init__(self, *requests: Request) -> None:
        self._requests = requests
        self.count = len(requests)

    def requests(self, rng: Any) -> Iterator[Request]:  # noqa: ARG002
        yield from self._requests


class ListedSessions(Listed):
    has_sessions = True

    def __init__(self, *sessions: Session) -> None:
        super().__init__(*(first_request(each, 0.0, "agent") for each in sessions))


def worker(time: StepTime = EVEN, **changes: Any) -> WorkerModel:
    """Return a worker model without asynchronous scheduling."""
    settings: dict[str, Any] = {
        "name": "w0", "time": time, "max_model_len": 4096, "kv_tokens": 65_536,
        "async_scheduling": False, "max_num_seqs": 16, "max_num_batched_tokens": 512,
    }  # fmt: skip
    return WorkerModel(**settings | changes)


def job(name: str, prompt: int = 100, output: int = 4, **changes: Any) -> Job:
    """Return a job with a unique text."""
    return replace(Job(name, prompt, output, text=crc32(name.encode())), **changes)


def drain(engine: Engine, until: float = float("inf")) -> list[Event]:
    """Run an engine until it is idle, or until this time; return its events."""
    events: list[Event] = []
    for _ in range(1_000_000):
        if not (at := engine.next_at()) <= until or at == float("inf"):
            assert all(b.at >= a.at - 1e-12 for a, b in pairwise(events))
            return events
        events += engine.advance(at)
        assert engine.next_at() > at
    raise AssertionError("the engine never becomes idle")


def run(engine: Engine, arrivals: Iterable[tuple[float, Job]]) -> list[Event]:
    """Submit jobs at their times and run the engine to its end; return its events."""
    events: list[Event] = []
    for at, new_job in arrivals:
        events += drain(engine, at)
        engine.submit(new_job, at)
    return events + drain(engine)


def ends(events: Iterable[Event]) -> dict[str, float]:
    """Return the finish time of each job; check that none finishes twice."""
    found: dict[str, float] = {}
    for event in events:
        if event.finished:
            assert event.job_id not in found
            found[event.job_id] = event.at
    return found


def firsts(events: Iterable[Event]) -> dict[str, float]:
    """Return the time of each job's first token."""
    found: dict[str, float] = {}
    for event in events:
        if event.tokens:
            found.setdefault(event.job_id, event.at)
    return found


def fleet_of(
    *workers: dict[str, Any], profile: str = "h100-8b", **blocks: Any
) -> tuple[FleetConfig, dict[str, WorkerModel]]:
    """Return a fleet of workers with contexts of 32,000 tokens by default."""
    entries = [
        {"name": f"w{number}", "profile": profile, "max_model_len": 32_000, **given}
        for number, given in enumerate(workers)
    ]
    config = FleetConfig.model_validate({"model": "m", "workers": entries, **blocks})
    return config, worker_models(config, Path("fleet.yaml"))


__all__ = ["EVEN", "drain", "ends", "firsts", "fleet_of", "job", "of_profile", "run", "worker"]

"""How near do plain workers come to vLLM's own schedulers, policy by policy?

    python -m benchmarks.agreement

The same 150 requests, one in twelve of them long, on one worker whose cache and slots do not hold
them all: played by the exact engine and by the fluid one. Prints a row for each policy, the same on
any machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.sim.making import run
from vllm_sched.bench.stats import percentile
from vllm_sched.cost.step_time import StepTime
from vllm_sched.sim.exact import ExactEngine
from vllm_sched.sim.fluid import Fluid
from vllm_sched.sim.types import Event, Job, WorkerModel

REQUESTS = 150
TIME = StepTime(
    decode_fixed_s=0.010, decode_s=1e-4, prefill_fixed_s=0.011, prefill_s=5e-5, mixed_s=0.002
)


@dataclass(frozen=True)
class Way:
    """A policy, and how near the plain worker has to come."""

    near: float
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    slots: int = 24

    @property
    def model(self) -> WorkerModel:
        """The worker."""
        return WorkerModel(
            name="w0", time=TIME, max_num_seqs=self.slots, max_num_batched_tokens=1024,
            max_model_len=16_384, kv_tokens=60_000, policies=self.policies,
        )  # fmt: skip


WAYS = {
    "vLLM's default": Way(0.01),
    "static_batching of 8": Way(0.01, {"static_batching": {"size": 8}}),
    "prefill_first": Way(0.02, {"prefill_first": {}}),
    "chunk_budget, chunks of 256": Way(0.01, {"chunk_budget": {"chunk": 256}}),
    # What it learns while it runs the plain worker knows from the start.
    "chunk_budget, 40 ms": Way(0.15, {"chunk_budget": {"itl_ms": 40}}),
    "long_prompt": Way(0.05, {"long_prompt": {"long_prefill_token_threshold": 2000}}),
    "deferred_prefill, 8 slots": Way(0.2, {"deferred_prefill": {"departures": 4}}, 8),
}


def crowd(count: int) -> list[tuple[float, Job]]:
    """Draw jobs, one in twelve of them long."""
    rng, now, jobs = random.Random(5), 0.0, []
    for number in range(count):
        now += rng.expovariate(10)
        long = number % 12 == 5
        prompt = rng.randint(4000, 8000) if long else rng.randint(50, 900)
        jobs.append((now, Job(f"j{number}", prompt, rng.randint(2, 60), number)))
    return jobs


def by_job(events: Iterable[Event]) -> dict[str, list[float]]:
    """Say when each token came."""
    told: dict[str, list[float]] = {}
    for event in events:
        told.setdefault(event.job_id, []).append(event.at)
    return told


def figures(events: Iterable[Event], jobs: list[tuple[float, Job]]) -> dict[str, float]:
    """Sum up what an engine told of all tokens."""
    told = by_job(events)
    arrived = {job.id: at for at, job in jobs}
    ttfts = [ticks[0] - arrived[name] for name, ticks in told.items()]
    gaps = [later - sooner for ticks in told.values() for sooner, later in pairwise(ticks)]
    return {
        "TTFT mean": sum(ttfts) / len(ttfts),
        "TTFT p95": percentile(ttfts, 95) or 0.0,
        "ITL mean": sum(gaps) / len(gaps),
        "ITL p99": percentile(gaps, 99) or 0.0,
        "ITL max": max(gaps),
        "last token": max(ticks[-1] for ticks in told.values()),
    }


def both(way: Way) -> tuple[dict[str, float], dict[str, float]]:
    """Play it to a real scheduler and to a plain worker."""
    jobs = crowd(REQUESTS)
    exact = figures(run(ExactEngine(way.model), jobs), jobs)
    return exact, figures(run(Fluid(way.model, each_token=True), jobs), jobs)


def main() -> None:
    """Print the table."""
    shown = {"TTFT mean": "s", "TTFT p95": "s", "ITL p99": "ms", "last token": "s"}
    print("|".join(("", "policy", *(f"{name}, exact / plain" for name in shown), "")))
    for name, way in WAYS.items():
        exact, plain = both(way)
        pairs = [
            f"{exact[key] * 1e3:.1f} / {plain[key] * 1e3:.1f} ms"
            if unit == "ms"
            else f"{exact[key]:.4f} / {plain[key]:.4f} s"
            for key, unit in shown.items()
        ]
        print("|".join(("", name, *pairs, "")))


if __name__ == "__main__":
    main()

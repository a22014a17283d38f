"""How near do plain workers come to vLLM's own schedulers, policy by policy?

    python -m benchmarks.agreement

The same 150 requests, one in twelve of them long, on one worker whose cache and slots do not hold
them all: played by the exact engine and by the fluid one. Then prompts that are mostly far on: each
of their steps takes longer than the last. Prints a row for each policy, the same on any machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

from tests.cost.linear_times import LINEAR_8B
from tests.sim.making import run
from vllm_sched.bench.results.stats import percentile
from vllm_sched.cost.step_time import StepTime
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.fleet.models import of_profile
from vllm_sched.sim.types import Event, Job, WorkerModel

REQUESTS = 150
LONG = 4000
TIME = StepTime(
    decode_fixed_s=0.010, decode_s=1e-4, prefill_fixed_s=0.011, prefill_s=5e-5, mixed_s=0.002
)
# What is read again and what is attended to makes each step of a long prompt longer than the last.
GROWING = replace(TIME, prefill_s=2e-5, pair_s=2e-8, context_s=2e-7, read_s=1e-6)
SMALL = WorkerModel(
    name="w0", time=TIME, max_num_seqs=24, max_num_batched_tokens=1024, max_model_len=16_384,
    kv_tokens=60_000,
)  # fmt: skip
LATER = replace(SMALL, time=GROWING, max_num_batched_tokens=2048, kv_tokens=400_000)


@dataclass(frozen=True)
class Way:
    """A policy, and how near the plain worker has to come."""

    near: float
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    slots: int = 24
    machine: WorkerModel = SMALL
    longer: int = 1  # long prompts, so many times
    apart: int = 1  # arrivals, so many times

    @property
    def model(self) -> WorkerModel:
        """The worker."""
        return replace(self.machine, max_num_seqs=self.slots, policies=self.policies)

    @property
    def jobs(self) -> list[tuple[float, Job]]:
        """What is asked of it."""
        return [
            (
                self.apart * at,
                replace(job, prompt_tokens=self.longer * job.prompt_tokens)
                if job.prompt_tokens >= LONG
                else job,
            )
            for at, job in crowd(REQUESTS)
        ]


LONGS: Final = {"long_prompt": {"long_prefill_token_threshold": 2000}}
WAYS = {
    "vLLM's default": Way(0.01),
    "static_batching of 8": Way(0.01, {"static_batching": {"size": 8}}),
    "prefill_first": Way(0.02, {"prefill_first": {}}),
    "chunk_budget, chunks of 256": Way(0.01, {"chunk_budget": {"chunk": 256}}),
    # What it learns while it runs the plain worker knows from the start.
    "chunk_budget, 40 ms": Way(0.15, {"chunk_budget": {"itl_ms": 40}}),
    "long_prompt": Way(0.05, LONGS),
    "deferred_prefill, 8 slots": Way(0.2, {"deferred_prefill": {"departures": 4}}, 8),
}
CHUNKS_TOO: Final = {**LONGS, "chunk_budget": {"itl_ms": 80}}
# With a linear step time, which is what policies learn, and with the curve of the profile.
H100_CURVE: Final = of_profile("h100-8b")
H100: Final = replace(H100_CURVE, time=LINEAR_8B)
FAR_ON = {
    "8B on an H100, long_prompt": Way(0.35, LONGS, machine=H100, longer=10, apart=6),
    "8B on an H100, and chunk_budget": Way(0.1, CHUNKS_TOO, machine=H100, longer=10, apart=6),
    "8B on an H100 as fitted, long_prompt": Way(0.5, LONGS, machine=H100_CURVE, longer=10, apart=6),
    "8B on an H100 as fitted, and chunk_budget": Way(
        0.1, CHUNKS_TOO, machine=H100_CURVE, longer=10, apart=6
    ),
    "more to read again, long_prompt": Way(0.35, LONGS, machine=LATER, longer=2, apart=2),
    "more to read again, and chunk_budget": Way(0.2, CHUNKS_TOO, machine=LATER, longer=2, apart=2),
}


def crowd(count: int) -> list[tuple[float, Job]]:
    """Draw jobs, one in twelve of them long."""
    rng, now, jobs = random.Random(5), 0.0, []
    for number in range(count):
        now += rng.expovariate(10)
        long = number % 12 == 5
        prompt = rng.randint(LONG, 2 * LONG) if long else rng.randint(50, 900)
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
    jobs = way.jobs
    exact = figures(run(ExactEngine(way.model), jobs), jobs)
    return exact, figures(run(FluidEngine(way.model, each_token=True), jobs), jobs)


SHOWN = {"TTFT mean": "s", "TTFT p95": "s", "ITL p99": "ms", "last token": "s"}


def table(ways: Mapping[str, Way], shown: Mapping[str, str]) -> Iterator[str]:
    """Give its lines, with what is shown in which unit."""
    yield "|".join(("", "policy", *(f"{name}, exact / plain" for name in shown), ""))
    for name, way in ways.items():
        exact, plain = both(way)
        pairs = [
            f"{exact[key] * 1e3:.1f} / {plain[key] * 1e3:.1f} ms"
            if unit == "ms"
            else f"{exact[key]:.4f} / {plain[key]:.4f} s"
            for key, unit in shown.items()
        ]
        yield "|".join(("", name, *pairs, ""))


def main() -> None:
    """Print the tables."""
    print(*table(WAYS, SHOWN), "", sep="\n")
    print(*table(FAR_ON, {**SHOWN, "ITL max": "ms"}), sep="\n")


if __name__ == "__main__":
    main()

"""Compare the fluid engine with the exact engine, by policy.

    python -m benchmarks.agreement

Both engines simulate the same 150 requests, one in twelve of them long, on a worker without slots
and cache for all. The second table has longer prompts, each of whose steps takes longer than the
last. The output is the same on any machine.
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
# The cost of context makes each step of a long prompt longer than the last.
GROWING = replace(TIME, prefill_s=2e-5, pair_s=2e-8, context_s=2e-7, read_s=1e-6)
SMALL = WorkerModel(
    name="w0", time=TIME, max_num_seqs=24, max_num_batched_tokens=1024, max_model_len=16_384,
    kv_tokens=60_000,
)  # fmt: skip
LATER = replace(SMALL, time=GROWING, max_num_batched_tokens=2048, kv_tokens=400_000)


@dataclass(frozen=True)
class PolicyCase:
    """A policy and the tolerance of the fluid engine."""

    tolerance: float
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    slots: int = 24
    machine: WorkerModel = SMALL
    longer: int = 1  # factor of long prompts' lengths
    apart: int = 1  # factor of arrival times

    @property
    def model(self) -> WorkerModel:
        return replace(self.machine, max_num_seqs=self.slots, policies=self.policies)

    @property
    def jobs(self) -> list[tuple[float, Job]]:
        return [
            (
                self.apart * at,
                replace(job, prompt_tokens=self.longer * job.prompt_tokens)
                if job.prompt_tokens >= LONG
                else job,
            )
            for at, job in draw_jobs(REQUESTS)
        ]


LONGS: Final = {"long_prompt": {"long_prefill_token_threshold": 2000}}
CASES = {
    "vLLM's default": PolicyCase(0.01),
    "static_batching of 8": PolicyCase(0.01, {"static_batching": {"size": 8}}),
    "prefill_first": PolicyCase(0.02, {"prefill_first": {}}),
    "chunk_budget, chunks of 256": PolicyCase(0.01, {"chunk_budget": {"chunk": 256}}),
    # The fluid engine knows from the start the model that the policy fits.
    "chunk_budget, 40 ms": PolicyCase(0.15, {"chunk_budget": {"itl_ms": 40}}),
    "long_prompt": PolicyCase(0.05, LONGS),
    "deferred_prefill, 8 slots": PolicyCase(0.2, {"deferred_prefill": {"departures": 4}}, 8),
}
CHUNKS_TOO: Final = {**LONGS, "chunk_budget": {"itl_ms": 80}}
# With a linear step time, which is what policies learn, and with the curve of the profile.
H100_CURVE: Final = of_profile("h100-8b")
H100: Final = replace(H100_CURVE, time=LINEAR_8B)
FAR_ON = {
    "8B on an H100, long_prompt": PolicyCase(0.35, LONGS, machine=H100, longer=10, apart=6),
    "8B on an H100, and chunk_budget": PolicyCase(
        0.1, CHUNKS_TOO, machine=H100, longer=10, apart=6
    ),
    "8B on an H100 as fitted, long_prompt": PolicyCase(
        0.5, LONGS, machine=H100_CURVE, longer=10, apart=6
    ),
    "8B on an H100 as fitted, and chunk_budget": PolicyCase(
        0.1, CHUNKS_TOO, machine=H100_CURVE, longer=10, apart=6
    ),
    "more to read again, long_prompt": PolicyCase(0.45, LONGS, machine=LATER, longer=2, apart=2),
    "more to read again, and chunk_budget": PolicyCase(
        0.3, CHUNKS_TOO, machine=LATER, longer=2, apart=2
    ),
}


def draw_jobs(count: int) -> list[tuple[float, Job]]:
    """Return random jobs, one in twelve of them long."""
    rng, now, jobs = random.Random(5), 0.0, []
    for number in range(count):
        now += rng.expovariate(10)
        long = number % 12 == 5
        prompt = rng.randint(LONG, 2 * LONG) if long else rng.randint(50, 900)
        jobs.append((now, Job(f"j{number}", prompt, rng.randint(2, 60), number)))
    return jobs


def by_job(events: Iterable[Event]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.job_id, []).append(event.at)
    return times


def figures(events: Iterable[Event], jobs: list[tuple[float, Job]]) -> dict[str, float]:
    """Return the latency figures of an engine's events."""
    times = by_job(events)
    arrived = {job.id: at for at, job in jobs}
    ttfts = [ticks[0] - arrived[name] for name, ticks in times.items()]
    gaps = [later - sooner for ticks in times.values() for sooner, later in pairwise(ticks)]
    return {
        "TTFT mean": sum(ttfts) / len(ttfts),
        "TTFT p95": percentile(ttfts, 95) or 0.0,
        "ITL mean": sum(gaps) / len(gaps),
        "ITL p99": percentile(gaps, 99) or 0.0,
        "ITL max": max(gaps),
        "last token": max(ticks[-1] for ticks in times.values()),
    }


def play_both(case: PolicyCase) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of the exact and of the fluid engine."""
    jobs = case.jobs
    exact = figures(run(ExactEngine(case.model), jobs), jobs)
    return exact, figures(run(FluidEngine(case.model, each_token=True), jobs), jobs)


SHOWN = {"TTFT mean": "s", "TTFT p95": "s", "ITL p99": "ms", "last token": "s"}


def table(policy_cases: Mapping[str, PolicyCase], shown: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a table; `shown` maps figures to units."""
    yield "|".join(("", "policy", *(f"{name}, exact / fluid" for name in shown), ""))
    for name, case in policy_cases.items():
        exact, fluid = play_both(case)
        pairs = [
            f"{exact[key] * 1e3:.1f} / {fluid[key] * 1e3:.1f} ms"
            if unit == "ms"
            else f"{exact[key]:.4f} / {fluid[key]:.4f} s"
            for key, unit in shown.items()
        ]
        yield "|".join(("", name, *pairs, ""))


def main() -> None:
    print(*table(CASES, SHOWN), "", sep="\n")
    print(*table(FAR_ON, {**SHOWN, "ITL max": "ms"}), sep="\n")


if __name__ == "__main__":
    main()

"""Play a load on a real scheduler in virtual time, and measure what users notice."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.agreement import by_job
from benchmarks.frontier.loads import CHAT, LONG, Load
from tests.sim.making import run
from vllm_sched.bench.results.stats import percentile
from vllm_sched.sim.engines.exact_engine import ExactEngine
from vllm_sched.sim.types import Job, WorkerModel


@dataclass(frozen=True, slots=True)
class Figures:
    """What one variant does in one cell; times in seconds, None without such requests."""

    short_ttft_p99: float | None
    long_ttft_mean: float | None
    itl_p99: float | None
    tokens_per_s: float

    def dominates(self, other: Figures, margin: float = 0.0) -> bool:
        """Return whether each figure is at least as good, and one is better by the margin."""
        pairs = [
            (self.short_ttft_p99, other.short_ttft_p99),
            (self.long_ttft_mean, other.long_ttft_mean),
            (self.itl_p99, other.itl_p99),
            (1 / self.tokens_per_s, 1 / other.tokens_per_s),
        ]
        complete = [(a, b) for a, b in pairs if a is not None and b is not None]
        is_as_good = all(ours <= theirs for ours, theirs in complete)
        return is_as_good and any(ours < theirs * (1 - margin) for ours, theirs in complete)


@dataclass(frozen=True, slots=True)
class Variant:
    """A scheduler's settings."""

    policies: Mapping[str, Mapping[str, Any]]
    longest_chunk: int = 0

    def applied_to(self, model: WorkerModel) -> WorkerModel:
        """Return the worker's model with these settings."""
        return replace(model, policies=self.policies, longest_chunk=self.longest_chunk)


def play(model: WorkerModel, load: Load, seed: int) -> Figures:
    arrivals = sorted(load(model, random.Random(seed)), key=lambda arrival: arrival[0])
    times = by_job(run(ExactEngine(model), arrivals))
    return _figures({job.id: (at, job) for at, job in arrivals}, times)


def _figures(jobs: Mapping[str, tuple[float, Job]], times: Mapping[str, list[float]]) -> Figures:
    def ttfts(klass: str) -> list[float]:
        return [times[name][0] - at for name, (at, job) in jobs.items() if job.klass == klass]

    gaps = [
        later - sooner
        for name, (_, job) in jobs.items()
        if job.klass == CHAT
        for sooner, later in pairwise(times[name])
    ]
    shorts, longs = ttfts(CHAT), ttfts(LONG)
    begin = min(at for at, _ in jobs.values())
    end = max(written[-1] for written in times.values())
    tokens = sum(job.prompt_tokens + job.output_tokens for _, job in jobs.values())
    return Figures(
        percentile(shorts, 99),
        fmean(longs) if longs else None,
        percentile(gaps, 99),
        tokens / (end - begin),
    )

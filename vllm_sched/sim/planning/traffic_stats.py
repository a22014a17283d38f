"""Length statistics of a plan's requests, and an upper bound of one worker's request rate."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_sched.sim.engines.kv_blocks import CachedPrefixes
from vllm_sched.sim.planning.capacity_bound import least_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_sched.bench.traffic.types import Request
    from vllm_sched.sim.types import WorkerModel

UNLIMITED_TOKENS = 1 << 60  # tokens


@dataclass(frozen=True, slots=True)
class TrafficStats:
    prompt: float  # mean
    output: float  # mean
    largest: int  # prompt + output
    prompts: tuple[int, ...]  # sorted
    totals: tuple[int, ...]  # prompt + output, sorted
    most_each: float  # requests/s that one worker can compute with a perfect cache

    @classmethod
    def of(cls, sample: Sequence[Request], *machines: WorkerModel) -> TrafficStats:
        totals = sorted(each.prompt_tokens + each.output_tokens for each in sample)
        cached = any(machine.prefix_caching for machine in machines)
        cache = CachedPrefixes(UNLIMITED_TOKENS if cached else 0)
        sizes = [_sizes(each, cache) for each in sample]
        seconds = min(least_seconds(machine, sizes) for machine in machines)
        return cls(
            sum(each.prompt_tokens for each in sample) / len(sample),
            sum(each.output_tokens for each in sample) / len(sample),
            totals[-1],
            tuple(sorted(each.prompt_tokens for each in sample)),
            tuple(totals),
            len(sample) / seconds if seconds > 0 else math.inf,
        )

    def above(self, limit: int) -> float:
        """Return the share of all tokens that belongs to requests above `limit`."""
        at = bisect_left(self.totals, limit + 1)
        return sum(self.totals[at:]) / (sum(self.totals) or 1)


def _sizes(request: Request, cache: CachedPrefixes) -> tuple[int, int, int]:
    held = min(cache.held(request.shared), request.prompt_tokens - 1)
    cache.keep(request.shared, UNLIMITED_TOKENS)
    return request.prompt_tokens, request.output_tokens, held

"""Mixtures of sources, and the assignment of requests to tenants."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from vllm_sched.bench.traffic.types import Request, TrafficSource
from vllm_sched.errors import UsageError


class Mixture(TrafficSource):
    """A source whose requests come from several sources, by their shares."""

    def __init__(self, name: str, parts: Sequence[tuple[TrafficSource, float]]) -> None:
        """Take sources with their shares, which need not add up to one."""
        for source, share in parts:
            if source.timed or source.has_sessions:
                own = "times" if source.timed else "sessions"
                raise UsageError(
                    f"{name}: {source.name} has {own} of its own and can't be part of a mixture; "
                    "play it alone"
                )
            if not 0 < share < float("inf"):
                raise UsageError(f"{name}: the share of {source.name} is {share:g}; give it > 0")
        names = [source.name for source, _ in parts]
        if repeated := [part for part in names if names.count(part) > 1]:
            raise UsageError(f"{name}: {repeated[0]} is named twice; add the shares up")
        whole = sum(share for _, share in parts)
        self.name = name
        self._sources = [source for source, _ in parts]
        self._steps = list(accumulate(share / whole for _, share in parts))
        self.rate = sum(source.rate * share / whole for source, share in parts)

    def requests(self, rng: random.Random) -> Iterator[Request]:
        """Mix the sources; each depends only on its name and the seed."""
        seed = rng.random()
        streams = [
            source.requests(random.Random(f"{seed}/{source.name}")) for source in self._sources
        ]
        last = len(streams) - 1
        while True:
            yield next(streams[min(last, bisect_right(self._steps, rng.random()))])


def among_tenants(
    requests: Iterator[Request], tenants: int, rng: random.Random
) -> Iterator[Request]:
    """Assign each request to a tenant; the n-th tenant sends 1/n of what the first sends."""
    weights = [1 / (i + 1) for i in range(tenants)]
    whole = sum(weights)
    steps = list(accumulate(weight / whole for weight in weights))
    names = [f"tenant-{i + 1}" for i in range(tenants)]
    for request in requests:
        yield replace(request, tenant=names[min(tenants - 1, bisect_right(steps, rng.random()))])

"""A trace played at a given rate: stretches from all parts of the file, repeated without end.

A trace's first lines may cover one hour of a day. So stretches of consecutive lines, which share
prefixes, are taken from the whole file. Cost: at most 20,000 lines are kept in memory.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Final

from vllm_sched.bench.traffic.types import Request, TrafficSource

STRETCH_LINES: Final = 50  # consecutive lines
MAX_STRETCHES: Final = 400  # most stretches of a file
GOLDEN: Final = (math.sqrt(5) - 1) / 2
COMPARED_PARTS: Final = 5  # of a file, compared with each other


class Sampled(TrafficSource):
    def __init__(self, source: TrafficSource, rng: random.Random) -> None:
        self.name, self.rate, self.burstiness = source.name, source.rate, source.burstiness
        self.lines = source.count or 0
        all_of_them = max(math.ceil(self.lines / STRETCH_LINES), 1)
        kept = min(all_of_them, MAX_STRETCHES)
        stretches: dict[int, list[Request]] = {}
        for line, request in enumerate(source.requests(rng)):
            at = line // STRETCH_LINES
            if (at + 1) * kept // all_of_them > at * kept // all_of_them:
                stretches.setdefault(at, []).append(request)
        self._stretches = list(stretches.values())

    @property
    def held(self) -> int:
        """The number of requests before the first one repeats."""
        return sum(map(len, self._stretches))

    @property
    def heaviest(self) -> float:
        """The mean size in the heaviest fifth of the file relative to the whole."""
        sizes = [request.prompt_tokens + request.output_tokens for request in self._in_order()]
        part = len(sizes) // COMPARED_PARTS
        if not part:
            return 1.0
        parts = (fmean(sizes[at * part : (at + 1) * part]) for at in range(COMPARED_PARTS))
        return max(parts) / fmean(sizes)

    def requests(self, rng: random.Random) -> Iterator[Request]:
        """Yield all requests repeatedly; each round has new texts, which no cache holds."""
        stretches = self._stretches
        if not stretches:
            return
        at, step = rng.randrange(len(stretches)), _stride(len(stretches))
        for number in itertools.count(1):
            for _ in stretches:
                at = (at + step) % len(stretches)
                for request in stretches[at]:
                    yield request if number == 1 else _with_round(request, number)

    def _in_order(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(self._stretches)


def without_end(source: TrafficSource, rng: random.Random) -> TrafficSource:
    """Return an endless source: the source itself, or stretches of a finite one."""
    return source if source.count is None else Sampled(source, rng)


def _stride(count: int) -> int:
    """Return a stride that reaches all stretches, with consecutive ones far apart."""
    wanted = max(round(GOLDEN * count), 1)
    return next(step for step in range(wanted, wanted + count) if math.gcd(step, count) == 1)


def _with_round(request: Request, number: int) -> Request:
    pieces = tuple((f"{number}/{name}", tokens) for name, tokens in request.shared)
    return replace(request, shared=pieces)

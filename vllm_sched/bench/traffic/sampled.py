"""A trace played at a rate: stretches of it from all over the file, without end.

At another rate than its own a trace's times mean nothing, and a run that plays its first lines
alone would see one hour of a day. Lines that follow each other stay together, for what they share;
the stretches come in an order in which any few of them are spread over the whole file, from a place
on that the seed gives. Cost: the lines are kept in memory, of a longer file 20,000 of them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Final

from vllm_sched.bench.traffic.types import Request, TrafficSource

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

STRETCH: Final = 50  # lines that stay together
KEPT: Final = 400  # stretches of a file at most
GOLDEN: Final = (math.sqrt(5) - 1) / 2
PARTS: Final = 5  # of a file, to tell whether it stays as it is


class Sampled(TrafficSource):
    """See the module's text."""

    def __init__(self, source: TrafficSource, rng: random.Random) -> None:
        """Read what has an end once."""
        self.name, self.rate, self.burstiness = source.name, source.rate, source.burstiness
        self.lines = source.count or 0
        all_of_them = max(math.ceil(self.lines / STRETCH), 1)
        kept = min(all_of_them, KEPT)
        stretches: dict[int, list[Request]] = {}
        for line, request in enumerate(source.requests(rng)):
            at = line // STRETCH
            if (at + 1) * kept // all_of_them > at * kept // all_of_them:
                stretches.setdefault(at, []).append(request)
        self._stretches = list(stretches.values())

    @property
    def held(self) -> int:
        """How many requests there are before the first comes again."""
        return sum(map(len, self._stretches))

    @property
    def heaviest(self) -> float:
        """How large requests are in the heaviest fifth of the file, against all."""
        sizes = [each.prompt_tokens + each.output_tokens for each in self._in_order()]
        part = len(sizes) // PARTS
        if not part:
            return 1.0
        parts = (fmean(sizes[at * part : (at + 1) * part]) for at in range(PARTS))
        return max(parts) / fmean(sizes)

    def requests(self, rng: random.Random) -> Iterator[Request]:
        """Go through all of them, and again; each round's texts are new: no cache has them."""
        stretches = self._stretches
        if not stretches:
            return
        at, step = rng.randrange(len(stretches)), _spreading(len(stretches))
        for number in itertools.count(1):
            for _ in stretches:
                at = (at + step) % len(stretches)
                for request in stretches[at]:
                    yield request if number == 1 else _anew(request, number)

    def _in_order(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(self._stretches)


def without_end(source: TrafficSource, rng: random.Random) -> TrafficSource:
    """Return a source that is never through: itself, or if it would be, stretches of it."""
    return source if source.count is None else Sampled(source, rng)


def _spreading(count: int) -> int:
    """Return the stride that goes through all, any few of which are far from each other."""
    wanted = max(round(GOLDEN * count), 1)
    return next(step for step in range(wanted, wanted + count) if math.gcd(step, count) == 1)


def _anew(request: Request, number: int) -> Request:
    """Give a request's texts the names of a later round."""
    pieces = tuple((f"{number}/{name}", tokens) for name, tokens in request.shared)
    return replace(request, shared=pieces)

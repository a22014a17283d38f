"""Who arrives when: a source, played in an open loop, in a closed one, or by its own times."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from vllm_sched.bench.traffic.arrivals import gamma_times
from vllm_sched.bench.traffic.mixture import among_tenants
from vllm_sched.bench.traffic.prefixes import sharing, strangers
from vllm_sched.errors import UsageError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from vllm_sched.bench.traffic.types import Request, TrafficSource

DEFAULT_DURATION_S = 60.0
# After a refusal a closed loop asks again when it was told to, and not before so many seconds.
AGAIN_S: Final = 0.1
# The times of an open loop are drawn before it begins: more would take long, and memory.
MOST_DRAWN: Final = 10_000_000
MOST_TENANTS: Final = 1_000_000
MOST: Final = 1e12  # of whatever is measured: beyond it sums and products end in infinity


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything that decides what is sent; iterating it twice gives the same requests.

    Exactly one of three loops: a rate (open), a concurrency (closed), or neither for the source's
    own times, where it has some, and its published rate otherwise.
    """

    source: TrafficSource
    seed: int = 0
    rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    duration_s: float | None = None
    count: int | None = None
    scale: float = 1.0
    tenants: int = 0
    prefix_hit: float | None = None  # None: as the source has it

    def __post_init__(self) -> None:
        """Refuse what cannot be played."""
        for field, number, most in (
            ("concurrency", self.concurrency, MOST_DRAWN),
            ("num-requests", self.count, MOST_DRAWN),
            ("tenants", self.tenants, MOST_TENANTS),
        ):
            if number is not None and abs(number) > most:
                raise UsageError(f"--{field}: one run has at most {most:,}; give a smaller number")
        for field, value in (
            ("request-rate", self.rate),
            ("burstiness", self.burstiness),
            ("concurrency", self.concurrency),
            ("duration", self.duration_s),
            ("num-requests", self.count),
            ("scale", self.scale),
        ):
            if value is not None and not value > 0:
                raise UsageError(f"--{field} {value:g}: must be more than 0")
            if value == math.inf:
                raise UsageError(f"--{field} inf: give a number; --concurrency keeps all busy")
        if self.scale > MOST:
            raise UsageError(f"--scale {self.scale:g}: must be at most {MOST:g}")
        if self.rate is not None and self.concurrency is not None:
            raise UsageError("--request-rate and --concurrency: an open or a closed loop, not both")
        if self.burstiness is not None and self.timed:
            raise UsageError("--burstiness is of gaps that are drawn; give a --request-rate too")
        if self.burstiness is not None and self.concurrency is not None:
            raise UsageError("--burstiness: a closed loop draws no gaps; leave it out")
        if not 0 <= (self.prefix_hit or 0) <= 0.85:
            raise UsageError(
                f"--prefix-hit {self.prefix_hit:g}: must be from 0 to 0.85, as every request "
                "brings something new"
            )
        if self.tenants < 0:
            raise UsageError(f"--tenants {self.tenants}: must be 0 or more")

    @property
    def timed(self) -> bool:
        """Whether the source's own times are kept."""
        return self.source.timed and self.rate is None and self.concurrency is None

    @property
    def offered_rate(self) -> float | None:
        """Requests per second that arrive; None in a closed loop, where that is the outcome."""
        if self.concurrency is not None:
            return None
        return self.rate if self.rate is not None else self.source.rate

    @property
    def offered_burstiness(self) -> float:
        """Of the gaps, where they are drawn."""
        if self.burstiness is not None:
            return self.burstiness
        return self.source.burstiness if self.rate is None else 1.0

    @property
    def ends_after_s(self) -> float | None:
        """When sending ends, if anything but the number of requests ends it."""
        if self.duration_s is None and self.count is None and self.source.count is None:
            return DEFAULT_DURATION_S
        return self.duration_s

    @property
    def falls_short(self) -> list[str]:
        """Say so where a source is through, at a rate, before what was asked for."""
        rate, held = self.rate, self.source.count
        if rate is None or held is None:
            return []
        wanted = [] if self.count is None else [float(self.count)]
        wanted += [] if self.duration_s is None else [rate * self.duration_s]
        if not wanted or min(wanted) <= held + 0.5:  # which may be more than any int
            return []
        return [
            f"{self.source.name} ended after {held / rate:.3g} s: it has {held:,} requests, and "
            f"{min(wanted):,.0f} were asked for; a queue may grow for longer than that, unseen "
            "(`sweep` plays a trace again and again)"
        ]

    def at_rate(self, rate: float) -> Schedule:
        """Return the same, in an open loop at this rate."""
        return replace(self, rate=rate, concurrency=None)

    def at_concurrency(self, concurrency: int) -> Schedule:
        """Return the same, in a closed loop of so many."""
        return replace(self, rate=None, burstiness=None, concurrency=concurrency)

    def __iter__(self) -> Iterator[Request]:
        """Make the requests, in the order of their times."""
        requests = self.shapes()
        end = self.ends_after_s
        if self.timed:
            for request in requests:
                if end is not None and request.at >= end:
                    return
                yield request
        elif self.concurrency is not None:
            # Who plays it stops at the end: when that is, nobody knows beforehand.
            yield from requests
        else:
            for at, request in zip(self.moments(), requests, strict=False):
                yield replace(request, at=at)

    def arrivals(self) -> int:
        """How many requests an open loop has; the error says why it can have none."""
        rate, end = self.offered_rate or 1.0, self.ends_after_s
        ends = (None if end is None else rate * end, self.count, self.source.count)
        count = min(each for each in ends if each is not None)
        if count > MOST_DRAWN:
            raise UsageError(
                f"{count:,.0f} requests: one run has at most {MOST_DRAWN:,}; give a shorter "
                "--duration, or fewer --num-requests"
            )
        if not round(count):
            raise UsageError(
                f"--duration {end:g}: at {rate:g} requests/s no request arrives; make it longer"
            )
        return round(count)

    def moments(self) -> array[float]:
        """Draw when requests arrive in an open loop."""
        rate = self.offered_rate or 1.0
        return gamma_times(rate, self.offered_burstiness, self.arrivals(), self._rng("times"))

    def shapes(self) -> Iterator[Request]:
        """Draw what is sent, its times aside: the same at any load."""
        requests = self.source.requests(self._rng("lengths"))
        if self.prefix_hit == 0:
            requests = strangers(requests)
        elif self.prefix_hit is not None:
            requests = sharing(requests, self.prefix_hit, self._rng("prefixes"), self.source.name)
        if self.tenants:
            requests = among_tenants(requests, self.tenants, self._rng("tenants"))
        if self.scale != 1:
            requests = (request.scaled(self.scale) for request in requests)
        return islice(requests, self.count)

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.source.name}/{self.seed}/{purpose}")

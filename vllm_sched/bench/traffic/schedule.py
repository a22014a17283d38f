"""A schedule of requests from a source: an open loop, a closed loop or the source's own times."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from vllm_sched.bench.traffic.mixture import among_tenants
from vllm_sched.bench.traffic.prefixes import with_sharing, without_sharing
from vllm_sched.bench.traffic.types import Request, TrafficSource
from vllm_sched.errors import UsageError

DEFAULT_DURATION_S = 60.0
DEFAULT_SESSIONS_DURATION_S = 600.0
# After a refusal a closed loop waits as long as told, and at least this many seconds.
MIN_RETRY_PAUSE_S: Final = 0.1
# An open loop draws its times before it begins, which takes time and memory.
MAX_REQUESTS: Final = 10_000_000
MAX_TENANTS: Final = 1_000_000
MAX_PREFIX_HIT: Final = 0.85
MAX_NUMBER: Final = 1e12  # limit of any number: larger sums and products become infinite


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """All settings that decide what is sent; every iteration yields the same requests.

    The loop is open (a rate), closed (a concurrency), or neither: then the source's own times
    apply, or its published rate.
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
    prefix_hit: float | None = None  # None: the source's own

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_combination()

    def _check_numbers(self) -> None:
        for field, number, limit in (
            ("concurrency", self.concurrency, MAX_REQUESTS),
            ("num-requests", self.count, MAX_REQUESTS),
            ("tenants", self.tenants, MAX_TENANTS),
        ):
            if number is not None and abs(number) > limit:
                raise UsageError(f"--{field}: must be at most {limit:,}; give a smaller number")
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
                raise UsageError(f"--{field} inf: give a number; --concurrency gives full load")
        if self.scale > MAX_NUMBER:
            raise UsageError(f"--scale {self.scale:g}: must be at most {MAX_NUMBER:g}")
        if self.tenants < 0:
            raise UsageError(f"--tenants {self.tenants}: must be 0 or more")
        if not 0 <= (self.prefix_hit or 0) <= MAX_PREFIX_HIT:
            raise UsageError(
                f"--prefix-hit {self.prefix_hit:g}: must be from 0 to {MAX_PREFIX_HIT}, because "
                "every request has new tokens too"
            )

    def _check_combination(self) -> None:
        closed = self.concurrency is not None
        if closed and self.rate is not None:
            raise UsageError("--request-rate and --concurrency: an open or a closed loop, not both")
        if self.burstiness is not None and self.timed:
            raise UsageError("--burstiness applies to drawn gaps only; add a --request-rate")
        if self.burstiness is not None and closed:
            raise UsageError("--burstiness: a closed loop draws no gaps; leave it out")
        if self.prefix_hit is not None and self.source.has_sessions:
            raise UsageError("--prefix-hit: sessions have prefixes of their own; leave it out")

    @property
    def timed(self) -> bool:
        return self.source.timed and self.rate is None and self.concurrency is None

    @property
    def offered_rate(self) -> float | None:
        """Requests per second that arrive; None in a closed loop."""
        if self.concurrency is not None:
            return None
        return self.rate if self.rate is not None else self.source.rate

    @property
    def offered_burstiness(self) -> float:
        if self.burstiness is not None:
            return self.burstiness
        return self.source.burstiness if self.rate is None else 1.0

    @property
    def ends_after_s(self) -> float | None:
        """When sending ends; None if only the number of requests ends it."""
        if self.duration_s is None and self.count is None and self.source.count is None:
            sessions = self.source.has_sessions
            return DEFAULT_SESSIONS_DURATION_S if sessions else DEFAULT_DURATION_S
        return self.duration_s

    @property
    def falls_short(self) -> list[str]:
        """Return a warning if the source ends before the requested time or number."""
        rate, held = self.rate, self.source.count
        if rate is None or held is None:
            return []
        wanted = [] if self.count is None else [float(self.count)]
        wanted += [] if self.duration_s is None else [rate * self.duration_s]
        if not wanted or min(wanted) <= held + 0.5:  # `min` may be too large for an int
            return []
        sessions = self.source.has_sessions
        unit, remedy = ("sessions", "") if sessions else ("requests", " (`sweep` repeats a trace)")
        return [
            f"{self.source.name} ended after {held / rate:.3g} s: it has {held:,} {unit}, and "
            f"{min(wanted):,.0f} were wanted; a queue that grows later is not visible{remedy}"
        ]

    def at_rate(self, rate: float) -> Schedule:
        return replace(self, rate=rate, concurrency=None)

    def at_concurrency(self, concurrency: int) -> Schedule:
        return replace(self, rate=None, burstiness=None, concurrency=concurrency)

    def __iter__(self) -> Iterator[Request]:
        requests = self.shapes()
        end = self.ends_after_s
        if self.timed:
            for request in requests:
                if end is not None and request.at >= end:
                    return
                yield request
        elif self.concurrency is not None:
            # The player stops at the end, because that time is not known beforehand.
            yield from requests
        else:
            for at, request in zip(self.moments(), requests, strict=False):
                yield replace(request, at=at)

    def arrivals(self) -> int:
        """Return the number of requests in an open loop; raise if it is 0 or too large."""
        rate, end = self.offered_rate or 1.0, self.ends_after_s
        ends = (None if end is None else rate * end, self.count, self.source.count)
        count = min(end for end in ends if end is not None)
        if count > MAX_REQUESTS:
            raise UsageError(
                f"{count:,.0f} requests: a run has at most {MAX_REQUESTS:,}; give a shorter "
                "--duration, or fewer --num-requests"
            )
        if not round(count):
            raise UsageError(
                f"--duration {end:g}: at {rate:g} requests/s no request arrives; make it longer"
            )
        return round(count)

    def moments(self) -> array[float]:
        rate = self.offered_rate or 1.0
        return gamma_times(rate, self.offered_burstiness, self.arrivals(), self._rng("times"))

    def shapes(self) -> Iterator[Request]:
        """Yield the requests without times; they are the same at any load."""
        requests = self.source.requests(self._rng("lengths"))
        if self.prefix_hit == 0:
            requests = without_sharing(requests)
        elif self.prefix_hit is not None:
            requests = with_sharing(
                requests, self.prefix_hit, self._rng("prefixes"), self.source.name
            )
        if self.tenants:
            requests = among_tenants(requests, self.tenants, self._rng("tenants"))
        if self.scale != 1:
            requests = (request.scaled(self.scale) for request in requests)
        return islice(requests, self.count)

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.source.name}/{self.seed}/{purpose}")


def gamma_times(rate: float, burstiness: float, count: int, rng: random.Random) -> array[float]:
    """Return `count` ascending times; the last is at `count / rate`.

    The gaps are gamma distributed with shape `burstiness`, as in vLLM's benchmark: 1 is Poisson,
    less is burstier (coefficient of variation `1 / sqrt(burstiness)`), infinity is regular. The
    fixed end gives every seed the same load.
    """
    if math.isinf(burstiness):
        return array("d", ((i + 1) / rate for i in range(count)))
    times = array("d")
    now = 0.0
    for _ in range(count):
        now += rng.gammavariate(burstiness, 1.0)
        times.append(now)
    stretch = count / rate / now if now else 0.0
    return array("d", (time * stretch for time in times))

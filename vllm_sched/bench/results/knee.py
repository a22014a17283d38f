"""Where more load gains no more: found while measuring, and read off what was measured."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from vllm_sched.bench.results.trend import Trend

if TYPE_CHECKING:
    from vllm_sched.bench.results.outcome import Outcome

# A rate is served if so many requests are in time; a concurrency is past the knee if so much of
# the best throughput was had before.
SHARE: Final = 0.9
GAIN: Final = 1.05
HALVINGS: Final = 4
DOUBLINGS: Final = 12
REFINEMENTS: Final = 2

Measure = Callable[[float], Awaitable[float]]


async def explore_rates(
    measure: Measure, start: float, least: float = 0.0, most: float = math.inf
) -> None:
    """Double the rate until it is not served, then close in on where that begins.

    `measure` plays a rate and returns the share of requests in time. Should the first rate be too
    high already, it is halved instead. No rate is below `least` or above `most`.
    """
    least = max(least, start / 2**HALVINGS)
    good, bad = 0.0, math.inf
    rate = start
    for _ in range(HALVINGS + DOUBLINGS):
        if await measure(rate) >= SHARE:
            good = rate
            if bad < math.inf or 2 * rate > most:
                break
            rate *= 2
        else:
            bad = rate
            if good or rate / 2 < least:
                break
            rate /= 2
    if not good or bad == math.inf:
        return
    for _ in range(REFINEMENTS):
        # In between by ratio, to three digits: somebody reads it.
        rate = float(f"{math.sqrt(good * bad):.3g}")
        if not good < rate < bad:
            return
        if await measure(rate) >= SHARE:
            good = rate
        else:
            bad = rate


async def explore_concurrencies(measure: Measure, start: float = 1.0) -> None:
    """Double the concurrency until that gains next to nothing, twice running.

    `measure` plays a concurrency and returns the throughput.
    """
    best = stale = 0.0
    concurrency = start
    for _ in range(DOUBLINGS):
        found = await measure(concurrency)
        stale = stale + 1 if found <= GAIN * best else 0
        if stale == 2:
            return
        best = max(best, found)
        concurrency *= 2


def served_rate(shares: Mapping[float, float]) -> float | None:
    """Return the highest rate up to which all are served; None where none is."""
    served = None
    for rate in sorted(shares):
        if shares[rate] < SHARE:
            break
        served = rate
    return served


def throughput_knee(throughputs: Mapping[float, float]) -> float | None:
    """Return the least concurrency with nearly the best throughput.

    None if only the last has it, for nobody knows then where it levels off, or if there is none.
    """
    best = max(throughputs.values(), default=0.0)
    if best <= 0:
        return None
    knee = min((x for x, found in throughputs.items() if found >= SHARE * best), default=None)
    return None if knee == max(throughputs, default=None) else knee


def kept_up(outcomes: Iterable[Outcome]) -> float:
    """Return the share of an open loop's rate that was kept up with.

    By how much later requests take longer than earlier ones: where a queue grows by so many seconds
    a second, one in `1 + growth` requests is served. When the last answer came says less: that is
    as long after the last request as an answer takes.
    """
    trend = Trend()
    for each in outcomes:
        if each.good:
            trend.add(each.at, each.latency)
    return 1 / (1 + trend.growth)

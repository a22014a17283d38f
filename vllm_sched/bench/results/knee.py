"""Find the load above which more load gains nothing."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.stats import Trend

# A rate is served if this share of its requests is in time. The knee is the lowest concurrency with
# this share of the best throughput.
SERVED_SHARE: Final = 0.9
MIN_GAIN: Final = 1.05
MAX_HALVINGS: Final = 4
MAX_DOUBLINGS: Final = 12
REFINEMENTS: Final = 2

Measure = Callable[[float], Awaitable[float]]


async def explore_rates(
    measure: Measure, start: float, min_rate: float = 0.0, max_rate: float = math.inf
) -> None:
    """Measure doubled rates until one is not served, then rates near the limit.

    `measure` plays a rate and returns the share of requests in time. If the first rate is too high,
    it is halved. All rates are between `min_rate` and `max_rate`.
    """
    min_rate = max(min_rate, start / 2**MAX_HALVINGS)
    good, bad = 0.0, math.inf
    rate = start
    for _ in range(MAX_HALVINGS + MAX_DOUBLINGS):
        if await measure(rate) >= SERVED_SHARE:
            good = rate
            if bad < math.inf or 2 * rate > max_rate:
                break
            rate *= 2
        else:
            bad = rate
            if good or rate / 2 < min_rate:
                break
            rate /= 2
    if not good or bad == math.inf:
        return
    for _ in range(REFINEMENTS):
        # The geometric mean, rounded to three digits for readability.
        rate = float(f"{math.sqrt(good * bad):.3g}")
        if not good < rate < bad:
            return
        if await measure(rate) >= SERVED_SHARE:
            good = rate
        else:
            bad = rate


async def explore_concurrencies(measure: Measure, start: float = 1.0) -> None:
    """Measure doubled concurrencies until throughput stops growing twice in a row.

    `measure` plays a concurrency and returns the throughput.
    """
    best = stale = 0.0
    concurrency = start
    for _ in range(MAX_DOUBLINGS):
        measured = await measure(concurrency)
        stale = stale + 1 if measured <= MIN_GAIN * best else 0
        if stale == 2:
            return
        best = max(best, measured)
        concurrency *= 2


def served_rate(shares: Mapping[float, float]) -> float | None:
    """Return the highest rate below which every rate is served; None if there is none."""
    served = None
    for rate in sorted(shares):
        if shares[rate] < SERVED_SHARE:
            break
        served = rate
    return served


def throughput_knee(throughputs: Mapping[float, float]) -> float | None:
    """Return the lowest concurrency with nearly the best throughput.

    None if only the highest concurrency has it, because throughput may still grow there.
    """
    best = max(throughputs.values(), default=0.0)
    if best <= 0:
        return None
    knee = min((x for x, rate in throughputs.items() if rate >= SERVED_SHARE * best), default=None)
    return None if knee == max(throughputs, default=None) else knee


def kept_up(outcomes: Iterable[Outcome]) -> float:
    """Return the share of an open loop's rate that was served.

    If latency grows by `growth` seconds per second, one in `1 + growth` requests is served.
    """
    trend = Trend()
    for outcome in outcomes:
        if outcome.good:
            trend.add(outcome.at, outcome.latency)
    return 1 / (1 + trend.growth)

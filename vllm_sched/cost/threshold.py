"""How many requests should depart before the next are prefilled: the threshold K, in closed form.

A closed system that is always backlogged: `slots` requests at most, outputs of memoryless length
with mean m. A batch of n prefills costs something fixed and something per prompt; a decode step of
b sequences c_d + t_d b. Waiting for K departures shares the fixed cost of a prefill among K
prompts, and lets slots stand idle meanwhile, over which each step's c_d is not shared:

    T(K) = fixed + K (prompt + m t_d) + m c_d h(K),   h(K) = 1/B + 1/(B-1) + ... + 1/(B-K+1)

and K/T(K) is largest at the smallest K with K/(B-K) - h(K) >= rho, where rho = fixed/(m c_d). What
a prompt or a sequence costs has no say in it. For large B it is B (1 + 1/W), with W the lower
branch of Lambert's function at -exp(-1-rho), and near B sqrt(2 rho).

In the paper (deferred prefill) prefill and decode steps are apart, and the fixed cost is that of a
prefill step. In vLLM V1 prefills ride along with decodes, and what waiting can save is the extra
fixed time of such a mixed step alone. Where that is nothing, so is the gain.

How it fails: with few slots to a mean output, or where load is not always there, waiting costs
more than this knows. At K = 1 the departures of one step are a batch already; `at_once` says how
large it is, and gains are counted from there. Exactly: `recursion`.
"""

from __future__ import annotations

import math

from vllm_sched.cost.recursion import Recursion
from vllm_sched.cost.regime import Regime
from vllm_sched.cost.step_time import UNBOUNDED

# The optimum is flat: half of it has nearly all of the gain, and half of the pause. Where prefills
# cost much it is less flat, so no less is run than what keeps this much of the best throughput.
SHARE_RUN, KEPT = 0.5, 0.99
# A predicted gain below this is not worth anybody's wait.
WORTHWHILE = 1.02


def lower_lambert(exponent: float) -> float:
    """Lambert's W on its lower branch, at -exp(-1 - exponent), where exponent >= 0.

    With u = -W it is u - ln u = 1 + exponent, for u >= 1: Newton's way is short from the series.
    """
    u = 1 + math.sqrt(2 * exponent) + 2 * exponent / 3
    for _ in range(50):
        if u <= 1:
            return -1.0
        step = (u - math.log(u) - 1 - exponent) / (1 - 1 / u)
        u -= step
        if abs(step) <= 1e-13 * u:
            break
    return -u


def asymptotic(regime: Regime) -> float:
    """K* for many slots, by Lambert's function; a real number, in constant time."""
    found = [_large(regime, fixed) for fixed in _fixed_costs(regime)]
    return min(_better(regime, found), float(regime.largest))


def closed_form(regime: Regime) -> int:
    """K* for this many slots: the smallest K with K/(B-K) - h(K) >= rho.

    Beside a floor, of which a batch of random lengths feels a part whatever its size, T(K) has no
    such form: there it is the recursion's.
    """
    if regime.floor_s > regime.batch_fixed_s:
        return Recursion(regime).best()
    return min(_smallest(regime, regime.batch_fixed_s), regime.largest)


def to_run(regime: Regime, *, itl_s: float | None = None, max_delay_s: float | None = None) -> int:
    """Choose the threshold to run: about half of the best, within bounds; 1 if in vain."""
    best = asymptotic(regime)
    wanted, enough = max(int(SHARE_RUN * best + 0.5), 1), math.ceil(best)
    least = KEPT * regime.throughput(best)
    while wanted < enough:
        middle = (wanted + enough) // 2
        if regime.throughput(middle) < least:
            wanted = middle + 1
        else:
            enough = middle
    if itl_s is not None:
        wanted = min(wanted, within_itl(regime, itl_s))
    if max_delay_s is not None and (step := regime.decode(regime.slots)) > 0:
        steps = max_delay_s / step
        wanted = min(wanted, int(-regime.slots * math.expm1(-steps / regime.mean_output)))
    return wanted if wanted > 1 and regime.gain(wanted) >= WORTHWHILE else 1


def within_itl(regime: Regime, itl_s: float) -> int:
    """Count the prompts of mean length that can be prefilled in a gap between tokens."""
    if regime.prompt_s <= 0:
        return regime.slots
    spare = itl_s - regime.decode(regime.slots) - regime.batch_fixed_s
    return int(min(max(spare, 0.0) / regime.prompt_s, UNBOUNDED))


def _fixed_costs(regime: Regime) -> list[float]:
    """Give the fixed cost of a batch, and besides the floor, which is one to small batches."""
    costs = [regime.batch_fixed_s]
    return [*costs, regime.floor_s] if regime.floor_s > regime.batch_fixed_s else costs


def _better(regime: Regime, found: list[float]) -> float:
    """Choose where the floor makes two optima: one of them, or where they meet."""
    if len(found) == 1:
        return found[0]
    if regime.prompt_s > 0:
        found = [*found, (regime.floor_s - regime.batch_fixed_s) / regime.prompt_s]
    return max((min(max(each, 1.0), regime.slots) for each in found), key=regime.throughput)


def _large(regime: Regime, fixed: float) -> float:
    shared = regime.mean_output * regime.decode_fixed_s
    if shared <= 0:
        return float(regime.slots) if fixed > 0 else 1.0
    return max(regime.slots * (1 + 1 / lower_lambert(fixed / shared)), 1.0)


def _smallest(regime: Regime, fixed: float) -> int:
    slots, shared = regime.slots, regime.mean_output * regime.decode_fixed_s
    idle = 0.0
    for threshold in range(1, slots):
        idle += 1 / (slots - threshold + 1)
        if shared * (threshold / (slots - threshold) - idle) >= fixed:
            return threshold
    return slots

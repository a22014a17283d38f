"""The closed-form threshold K: departures before the next prefill.

B slots, memoryless outputs of mean m. n prefills cost fixed + n prompt, a decode step of b
sequences c_d + t_d b. Waiting shares the fixed cost among K prompts but leaves slots idle:

    T(K) = fixed + K (prompt + m t_d) + m c_d h(K),   h(K) = 1/B + 1/(B-1) + ... + 1/(B-K+1)

K/T(K) is largest at the smallest K with K/(B-K) - h(K) >= rho = fixed/(m c_d). For large B this is
B (1 + 1/W), W the lower branch of Lambert's function at -exp(-1-rho), about B sqrt(2 rho).

Source: deferred prefill. In vLLM V1 `fixed` is only a mixed step's extra time; if 0, no gain.

How it fails: with few slots per mean output, or without constant backlog, waiting costs more.
"""

from __future__ import annotations

import math

from vllm_sched.cost.backlog_model import BacklogModel
from vllm_sched.cost.recursion import Recursion
from vllm_sched.cost.step_time import UNBOUNDED

# Half the optimal K has nearly the full gain and half the pause, if it keeps this throughput share.
RUN_SHARE, MIN_THROUGHPUT_SHARE = 0.5, 0.99
# Least predicted gain for K > 1.
MIN_GAIN = 1.02


def lower_lambert(exponent: float) -> float:
    """Return Lambert's W, lower branch, at -exp(-1 - exponent): u - ln u = 1 + exponent, u = -W."""
    u = 1 + math.sqrt(2 * exponent) + 2 * exponent / 3
    for _ in range(50):
        if u <= 1:
            return -1.0
        step = (u - math.log(u) - 1 - exponent) / (1 - 1 / u)
        u -= step
        if abs(step) <= 1e-13 * u:
            break
    return -u


def asymptotic(model: BacklogModel) -> float:
    """Return the optimal K of a large system, not rounded."""
    candidates = [_large_system(model, fixed) for fixed in _fixed_costs(model)]
    return min(_better_candidate(model, candidates), float(model.largest_threshold))


def closed_form(model: BacklogModel) -> int:
    """Return the optimal K; with a floor, by recursion."""
    if model.floor_s > model.batch_fixed_s:
        return Recursion(model).best()
    return min(_smallest_optimal(model, model.batch_fixed_s), model.largest_threshold)


def recommended(
    model: BacklogModel, *, itl_s: float | None = None, max_delay_s: float | None = None
) -> int:
    """Return the K to run: about half the optimum; 1 if not worthwhile."""
    best = asymptotic(model)
    threshold, high = max(int(RUN_SHARE * best + 0.5), 1), math.ceil(best)
    min_throughput = MIN_THROUGHPUT_SHARE * model.throughput(best)
    while threshold < high:
        middle = (threshold + high) // 2
        if model.throughput(middle) < min_throughput:
            threshold = middle + 1
        else:
            high = middle
    if itl_s is not None:
        threshold = min(threshold, within_itl(model, itl_s))
    if max_delay_s is not None and (step := model.decode_seconds(model.slots)) > 0:
        steps = max_delay_s / step
        threshold = min(threshold, int(-model.slots * math.expm1(-steps / model.mean_output)))
    return threshold if threshold > 1 and model.gain(threshold) >= MIN_GAIN else 1


def within_itl(model: BacklogModel, itl_s: float) -> int:
    """Return how many mean prompts fit in a gap of `itl_s`."""
    if model.prompt_s <= 0:
        return model.slots
    spare = itl_s - model.decode_seconds(model.slots) - model.batch_fixed_s
    return int(min(max(spare, 0.0) / model.prompt_s, UNBOUNDED))


def _fixed_costs(model: BacklogModel) -> list[float]:
    # To small batches the floor is a fixed cost.
    costs = [model.batch_fixed_s]
    return [*costs, model.floor_s] if model.floor_s > model.batch_fixed_s else costs


def _better_candidate(model: BacklogModel, candidates: list[float]) -> float:
    if len(candidates) == 1:
        return candidates[0]
    if model.prompt_s > 0:
        candidates = [*candidates, (model.floor_s - model.batch_fixed_s) / model.prompt_s]
    within_slots = [min(max(candidate, 1.0), model.slots) for candidate in candidates]
    return max(within_slots, key=model.throughput)


def _large_system(model: BacklogModel, fixed: float) -> float:
    shared = model.mean_output * model.decode_fixed_s
    if shared <= 0:
        return float(model.slots) if fixed > 0 else 1.0
    return max(model.slots * (1 + 1 / lower_lambert(fixed / shared)), 1.0)


def _smallest_optimal(model: BacklogModel, fixed: float) -> int:
    slots, shared = model.slots, model.mean_output * model.decode_fixed_s
    idle = 0.0
    for threshold in range(1, slots):
        idle += 1 / (slots - threshold + 1)
        if shared * (threshold / (slots - threshold) - idle) >= fixed:
            return threshold
    return slots

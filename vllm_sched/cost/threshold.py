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
from dataclasses import dataclass
from typing import Self

from vllm_sched.cost.step_time import StepTime
from vllm_sched.errors import UsageError

# The optimum is flat: half of it has nearly all of the gain, and half of the pause. Where prefills
# cost much it is less flat, so no less is run than what keeps this much of the best throughput.
SHARE_RUN, KEPT = 0.5, 0.99
# A predicted gain below this is not worth anybody's wait.
WORTHWHILE = 1.02


@dataclass(frozen=True, slots=True)
class Regime:
    """A closed system, its costs per batch, per prompt, per step and per sequence."""

    slots: int  # B
    mean_output: float  # m
    decode_fixed_s: float  # c_d
    decode_s: float  # t_d, per sequence, of a typical context
    batch_fixed_s: float  # of prefilling: c_p apart, delta riding along
    prompt_s: float  # of prefilling one more
    exclusive: bool = False  # whether decodes pause for a prefill
    floor_s: float = 0.0  # no batch of prefills costs less
    most: int = 0  # prompts that one step can prefill; 0 if there is no limit

    def __post_init__(self) -> None:
        """Refuse what no engine is."""
        if self.slots < 1:
            raise UsageError(f"slots={self.slots}: an engine has at least 1; give max_num_seqs")
        if not (math.isfinite(self.mean_output) and self.mean_output >= 1):
            raise UsageError(
                f"mean_output={self.mean_output:g}: an answer has at least 1 token; "
                "give the mean output length in tokens"
            )

    @classmethod
    def of(
        cls,
        time: StepTime,
        *,
        slots: int,
        mean_output: float,
        mean_prompt: float,
        exclusive: bool = False,
        budget: int = 0,
    ) -> Self:
        """Take the costs from a step's time, at the lengths that are typical."""
        if not (math.isfinite(mean_prompt) and mean_prompt >= 1):
            raise UsageError(
                f"mean_prompt={mean_prompt:g}: a prompt has at least 1 token; "
                "give the mean prompt length in tokens"
            )
        # Of a memoryless output as much has been made, on average, as is still to come.
        decode = time.decode_s + time.context_s * (mean_prompt + mean_output)
        floor = time.floor_s
        if not exclusive:
            floor = max(floor - time.decode_fixed_s - decode * slots, 0.0)
        return cls(
            slots=slots,
            mean_output=mean_output,
            decode_fixed_s=time.decode_fixed_s,
            decode_s=decode,
            batch_fixed_s=time.prefill_fixed_s if exclusive else time.mixed_s,
            prompt_s=time.prompt_fixed_s
            + time.prefill_s * mean_prompt
            + time.pair_s * mean_prompt**2 / 2,
            exclusive=exclusive,
            floor_s=floor,
            most=max(int(budget / mean_prompt), 1) if budget else 0,
        )

    @property
    def largest(self) -> int:
        """The largest threshold that means anything."""
        return min(self.most, self.slots) if self.most else self.slots

    @property
    def at_once(self) -> float:
        """How many depart in a step in which any does."""
        expected = self.slots / self.mean_output
        none = (1 - 1 / self.mean_output) ** self.slots
        return expected / (1 - none)

    def decode(self, sequences: float) -> float:
        """How long a step takes that only decodes."""
        return self.decode_fixed_s + self.decode_s * sequences

    def batch(self, prompts: float) -> float:
        """How long prefilling so many takes, beyond the decoding of that step."""
        return max(self.floor_s, self.batch_fixed_s + self.prompt_s * prompts)

    def pause(self, threshold: float) -> float:
        """Between two tokens of a sequence while so many are prefilled."""
        return self.batch(threshold) + self.decode(self.slots)

    def hold(self, threshold: float) -> float:
        """How long so many departures take to come together."""
        share = min(threshold / self.slots, 1 - 0.5 / self.slots)
        steps = -self.mean_output * math.log1p(-share)
        return steps * self.decode(self.slots)

    def throughput(self, threshold: float) -> float:
        """Return requests per second, by the formula; any threshold up to the slots."""
        drained = min(threshold, self.slots - 0.5)
        # Of whole numbers this is h(K), give or take a part in a thousand.
        idle = math.log((self.slots + 0.5) / (self.slots + 0.5 - drained))
        decoding = self.mean_output * (threshold * self.decode_s + self.decode_fixed_s * idle)
        cycle = self.batch(threshold) + decoding
        return threshold / cycle if cycle > 0 else math.inf

    def gain(self, threshold: float) -> float:
        """Say how much more throughput than with a threshold of 1, as a ratio, by the formula."""
        base = max(self.at_once, 1.0)
        return self.throughput(threshold) / self.throughput(base) if threshold > base else 1.0


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
    such form and the largest K/T(K) is looked for.
    """
    if regime.floor_s > regime.batch_fixed_s:
        return _scanned(regime)
    return min(_smallest(regime, regime.batch_fixed_s), regime.largest)


def _scanned(regime: Regime) -> int:
    best, highest, idle = 1, 0.0, 0.0
    for threshold in range(1, regime.largest + 1):
        idle += 1 / (regime.slots - threshold + 1)
        # As many leave in the step that ends the wait as in any in which somebody does.
        prompts = max(threshold, round(regime.at_once))
        each = threshold * regime.decode_s + regime.decode_fixed_s * idle
        cycle = expected_batch(regime, prompts) * threshold / prompts + regime.mean_output * each
        if threshold / cycle > highest:
            best, highest = threshold, threshold / cycle
    return best


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
    if itl_s is not None and regime.prompt_s > 0:
        spare = itl_s - regime.decode(regime.slots) - regime.batch_fixed_s
        wanted = min(wanted, int(max(spare, 0.0) / regime.prompt_s))
    if max_delay_s is not None and (step := regime.decode(regime.slots)) > 0:
        steps = max_delay_s / step
        wanted = min(wanted, int(-regime.slots * math.expm1(-steps / regime.mean_output)))
    return wanted if wanted > 1 and regime.gain(wanted) >= WORTHWHILE else 1


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


def expected_batch(regime: Regime, prompts: int) -> float:
    """Return the mean time of a batch of prompts of exponential length.

    Without a floor that is the time at their mean length. With one, batches shorter than it add
    what they lack: the mean of (a - G)+ for a sum G of so many exponentials.
    """
    linear = regime.batch_fixed_s + regime.prompt_s * prompts
    lacking = regime.floor_s - regime.batch_fixed_s
    if lacking <= 0 or not prompts or regime.prompt_s <= 0:
        return max(linear, regime.floor_s)
    a = lacking / regime.prompt_s
    # Chances of fewer than n events at rate a, for n = prompts and one more.
    term = math.exp(-a)
    fewer = 0.0
    for count in range(prompts):
        fewer += term
        term *= a / (count + 1)
    mean = a * (1 - fewer) - prompts * (1 - fewer - term)
    return linear + regime.prompt_s * max(mean, 0.0)

"""The closed, always backlogged system for which thresholds are chosen, and its costs.

`threshold` solves it in closed form, `recursion` exactly, and `backlog_simulation` by simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from vllm_sched.cost.step_time import StepTime


@dataclass(frozen=True, slots=True)
class BacklogModel:
    """The system's size and costs; a method's `threshold` is K, the departures before a batch."""

    slots: int  # B
    mean_output: float  # m
    decode_fixed_s: float  # c_d
    decode_s: float  # t_d, per sequence, at a typical context
    batch_fixed_s: float  # per batch: c_p if decodes pause, else delta
    prompt_s: float  # per prompt of a batch
    decodes_pause: bool = False  # decodes pause during prefill
    floor_s: float = 0.0  # least cost of a batch
    max_prompts: int = 0  # prompts per step; 0 = unlimited

    @classmethod
    def from_step_time(
        cls,
        time: StepTime,
        *,
        slots: int,
        mean_output: float,
        mean_prompt: float,
        decodes_pause: bool = False,
        budget: int = 0,
    ) -> Self:
        time = time.linear_near(slots, int(budget or mean_prompt))
        # A memoryless output is sampled at its mean length.
        decode = time.decode_s + time.context_s * (mean_prompt + mean_output)
        floor = time.floor_s
        if not decodes_pause:
            floor = max(floor - time.decode_fixed_s - decode * slots, 0.0)
        return cls(
            slots=slots,
            mean_output=mean_output,
            decode_fixed_s=time.decode_fixed_s,
            decode_s=decode,
            batch_fixed_s=time.prefill_fixed_s if decodes_pause else time.mixed_s,
            prompt_s=time.prompt_fixed_s
            + time.prefill_s * mean_prompt
            + time.pair_s * mean_prompt**2 / 2,
            decodes_pause=decodes_pause,
            floor_s=floor,
            max_prompts=max(int(budget / mean_prompt), 1) if budget else 0,
        )

    @property
    def largest_threshold(self) -> int:
        return min(self.max_prompts, self.slots) if self.max_prompts else self.slots

    @property
    def mean_departures(self) -> float:
        """Return the expected departures in a step with at least one."""
        expected = self.slots / self.mean_output
        none = (1 - 1 / self.mean_output) ** self.slots
        return expected / (1 - none)

    def decode_seconds(self, sequences: float) -> float:
        return self.decode_fixed_s + self.decode_s * sequences

    def batch_seconds(self, prompts: float) -> float:
        return max(self.floor_s, self.batch_fixed_s + self.prompt_s * prompts)

    def hold_seconds(self, threshold: float) -> float:
        share = min(threshold / self.slots, 1 - 0.5 / self.slots)
        steps = -self.mean_output * math.log1p(-share)
        return steps * self.decode_seconds(self.slots)

    def throughput(self, threshold: float) -> float:
        drained = min(threshold, self.slots - 0.5)
        # h(K), within 0.1 % at integers.
        idle = math.log((self.slots + 0.5) / (self.slots + 0.5 - drained))
        decoding = self.mean_output * (threshold * self.decode_s + self.decode_fixed_s * idle)
        cycle = self.batch_seconds(threshold) + decoding
        return threshold / cycle if cycle > 0 else math.inf

    def gain(self, threshold: float) -> float:
        base = max(self.mean_departures, 1.0)
        return self.throughput(threshold) / self.throughput(base) if threshold > base else 1.0


def expected_batch(model: BacklogModel, prompts: int) -> float:
    """Return the mean seconds of a batch of prompts of exponential length.

    The floor adds the mean of (a - G)+ for a sum G of `prompts` exponentials.
    """
    linear = model.batch_fixed_s + model.prompt_s * prompts
    lacking = model.floor_s - model.batch_fixed_s
    if lacking <= 0 or not prompts or model.prompt_s <= 0:
        return max(linear, model.floor_s)
    a = lacking / model.prompt_s
    # Poisson: probability of fewer than `prompts` events at rate a.
    term = math.exp(-a)
    fewer = 0.0
    for count in range(prompts):
        fewer += term
        term *= a / (count + 1)
    mean = a * (1 - fewer) - prompts * (1 - fewer - term)
    return linear + model.prompt_s * max(mean, 0.0)

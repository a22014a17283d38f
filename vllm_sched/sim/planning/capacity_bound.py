"""Upper bounds of what a worker can hold, compute and transfer, in closed form.

They show whether memory, compute or the network is the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from vllm_sched.cost.step_time import StepShape, StepTime
from vllm_sched.sim.types import WorkerModel

MAX_PROMPT_TOKENS: Final = 1 << 20  # for the search of the limiting prompt


def prefill_seconds(time: StepTime, prompt: float, budget: int) -> float:
    steps = max(math.ceil(prompt / budget), 1)
    fixed = time.prefill_fixed_s + time.prompt_fixed_s
    rest = prompt - (steps - 1) * budget
    curve = (steps - 1) * time.curve_seconds(budget) + time.curve_seconds(rest)
    return max(steps * fixed + curve + prefill_work(time, prompt, budget), time.floor_s)


def prefill_work(time: StepTime, prompt: float, budget: int) -> float:
    """Return the seconds of a prompt's tokens, without costs per step and without a curve."""
    steps = max(math.ceil(prompt / budget), 1)
    read = budget * steps * (steps - 1) / 2  # read again by later chunks
    return time.prefill_s * prompt + time.pair_s * prompt * prompt / 2 + time.read_s * read


def decode_seconds(time: StepTime, sequences: int, context: float) -> float:
    return time.seconds(StepShape(decodes=sequences, context_tokens=int(sequences * context)))


def most_requests_per_s(
    time: StepTime, prompt: float, output: float, sequences: int, budget: int
) -> float:
    """Return an upper bound of one worker's requests/s: full steps, fixed parts shared."""
    steps = max(output - 1, 0.0)
    context = time.context_s * (prompt + output / 2)
    request_s = prefill_work(time, prompt, budget) + steps * (time.decode_s + context)
    # The output or the prompt's chunks need more steps, and determine the fixed part.
    shared = max(steps / max(sequences, 1), prompt / budget)
    request_s += shared * max(time.decode_fixed_s, time.prefill_fixed_s if not steps else 0.0)
    request_s += time.least_curve_seconds(prompt + steps, shared)
    return 1 / request_s if request_s > 0 else math.inf


def least_seconds(machine: WorkerModel, requests: Iterable[tuple[int, int, int]]) -> float:
    """Return a lower bound of one worker's seconds for (prompt, output, cached) requests."""
    time, budget = machine.time, machine.max_num_batched_tokens
    work = steps = by_cache = chunks = tokens = 0.0
    for prompt, output, cached in requests:
        new, written = prompt - cached, max(output - 1, 0)
        context = prompt + output / 2
        work += prefill_work(time, new, budget) + time.pair_s * new * cached
        work += written * (time.decode_s + time.context_s * context)
        steps += written
        by_cache += written * context
        chunks += new / budget
        tokens += new + written
    decoding = max(steps / machine.max_num_seqs, by_cache / machine.kv_tokens)
    work += time.least_curve_seconds(tokens, max(decoding, chunks))
    fixed = time.decode_fixed_s * decoding
    return work + max(fixed, chunks * min(time.decode_fixed_s, time.prefill_fixed_s))


def link_tokens_per_s(model: WorkerModel) -> float:
    descriptors = model.kv_pieces / model.block_tokens
    seconds = model.kv_token_bytes * model.transfer.byte_s
    seconds += descriptors * model.transfer.descriptor_s
    return 1 / seconds if seconds > 0 else math.inf


def limiting_prompt(model: WorkerModel) -> int | None:
    """Return the shortest prompt with transfer slower than prefill, or None."""

    def slower(tokens: int) -> bool:
        return model.transfer_s(tokens) > prefill_seconds(model.time, tokens, tokens)

    # Prefill grows faster than transfer, so very long prompts may not be `slower`.
    low, high = 0, 1
    while not slower(high):
        low, high = high, 2 * high
        if high > MAX_PROMPT_TOKENS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if slower(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of one worker with requests of mean length."""

    kv_tokens: int
    held: int  # requests
    prefill_s: float  # of a mean prompt on an idle worker
    step_s: float  # with `held` decodes
    requests_per_s: float
    kv_bytes_per_s: float  # made by prefill
    link_bytes_per_s: float
    transfer_s: float  # of a mean prompt
    limiting_prompt: int | None

    @classmethod
    def from_model(cls, model: WorkerModel, prompt: float, output: float) -> Capacity:
        time, size = model.time, model.kv_token_bytes
        held = min(int(model.kv_tokens / (prompt + output / 2)), model.max_num_seqs)
        step = decode_seconds(time, max(held, 1), prompt + output / 2)
        alone = prefill_seconds(time, prompt, model.max_num_batched_tokens)
        return cls(
            kv_tokens=model.kv_tokens,
            held=held,
            prefill_s=alone,
            step_s=step,
            requests_per_s=most_requests_per_s(
                time, prompt, output, held, model.max_num_batched_tokens
            ),
            kv_bytes_per_s=prompt * size / alone if alone else math.inf,
            link_bytes_per_s=link_tokens_per_s(model) * size,
            transfer_s=model.transfer_s(math.ceil(prompt)),
            limiting_prompt=limiting_prompt(model),
        )

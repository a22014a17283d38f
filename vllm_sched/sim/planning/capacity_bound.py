"""What a worker can hold, compute and move, by hand: no simulation, a few divisions.

Each is a bound that nothing exceeds. Together they say which of memory, computing and the network
ends first; how near a fleet comes to that is for the simulator to tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_sched.cost.step_time import StepShape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_sched.cost.step_time import StepTime
    from vllm_sched.cost.transfer import TransferTime
    from vllm_sched.sim.types import WorkerModel


def kv_tokens(
    *, gpus: int, memory: float, used: float, weights: float, beside: float, token_bytes: int
) -> int:
    """Count the tokens whose KV fits beside the weights; sizes in bytes, memory of one GPU.

    `used` is the share of the memory that the engine may have, `beside` what it takes of that on
    each GPU for anything else.
    """
    return max(int((gpus * (used * memory - beside) - weights) / token_bytes), 0)


def sequences_held(tokens: int, prompt: float, output: float) -> int:
    """Count the requests of such lengths whose KV fits at once, when each has written half."""
    return max(int(tokens / (prompt + output / 2)), 0)


def prefill_seconds(time: StepTime, prompt: float, budget: int) -> float:
    """How long a prompt takes alone, in as many steps as the budget makes of it."""
    steps = max(math.ceil(prompt / budget), 1)
    fixed = time.prefill_fixed_s + time.prompt_fixed_s
    return max(steps * fixed + prefill_work(time, prompt, budget), time.floor_s)


def prefill_work(time: StepTime, prompt: float, budget: int) -> float:
    """How long a prompt's tokens take, what is fixed in each of its steps aside."""
    steps = max(math.ceil(prompt / budget), 1)
    read = budget * steps * (steps - 1) / 2  # again, in all steps but the first
    return time.prefill_s * prompt + time.pair_s * prompt * prompt / 2 + time.read_s * read


def decode_seconds(time: StepTime, sequences: int, context: float) -> float:
    """How long a step takes that decodes so many sequences of a mean context."""
    return time.seconds(StepShape(decodes=sequences, context_tokens=int(sequences * context)))


def most_requests_per_s(
    time: StepTime, prompt: float, output: float, sequences: int, budget: int
) -> float:
    """Bound the requests a second by what one worker computes, with so many decoding.

    Prompts ride along in full steps; the fixed part of a step is shared among its decodes.
    """
    steps = max(output - 1, 0.0)
    context = time.context_s * (prompt + output / 2)
    each = prefill_work(time, prompt, budget) + steps * (time.decode_s + context)
    # Whichever asks for more steps brings the fixed part: the answer, or the prompt's chunks.
    shared = max(steps / max(sequences, 1), prompt / budget)
    each += shared * max(time.decode_fixed_s, time.prefill_fixed_s if not steps else 0.0)
    return 1 / each if each > 0 else math.inf


def least_seconds(machine: WorkerModel, requests: Iterable[tuple[int, int, int]]) -> float:
    """Bound what one worker takes for requests: prompt, answer, and what is cached of the prompt.

    No order of them takes less. Steps are as few as the largest budget, all slots or the whole
    cache allow, whichever of them asks for most.
    """
    time, budget = machine.time, machine.max_num_batched_tokens
    work = steps = by_cache = chunks = 0.0
    for prompt, output, cached in requests:
        new, written = prompt - cached, max(output - 1, 0)
        context = prompt + output / 2
        work += prefill_work(time, new, budget) + time.pair_s * new * cached
        work += written * (time.decode_s + time.context_s * context)
        steps += written
        by_cache += written * context
        chunks += new / budget
    fixed = time.decode_fixed_s * max(steps / machine.max_num_seqs, by_cache / machine.kv_tokens)
    return work + max(fixed, chunks * min(time.decode_fixed_s, time.prefill_fixed_s))


def moved_bytes_per_s(requests_per_s: float, prompt: float, token_bytes: int) -> float:
    """Bytes a second that hand-overs move where every prompt is handed over."""
    return requests_per_s * prompt * token_bytes


def transfer_seconds(
    transfer: TransferTime, tokens: float, *, token_bytes: int, block: int, pieces: int
) -> float:
    """How long one prompt's KV takes."""
    blocks = math.ceil(tokens / block)
    return transfer.seconds(blocks * block * token_bytes, blocks * pieces)


def link_tokens_per_s(
    transfer: TransferTime, *, token_bytes: int, block: int, pieces: int
) -> float:
    """Tokens a second that a link moves of very long prompts: bytes, and pieces where they cost."""
    seconds = token_bytes * transfer.byte_s + pieces / block * transfer.descriptor_s
    return 1 / seconds if seconds > 0 else math.inf


def limiting_prompt(
    time: StepTime,
    transfer: TransferTime,
    *,
    token_bytes: int,
    block: int,
    pieces: int,
    most: int = 1 << 20,
) -> int | None:
    """Return the least prompt whose transfer takes longer than its prefill; None if none does.

    Below it prefill workers are what hand-overs wait for, from there on the link is.
    """

    def slower(tokens: int) -> bool:
        moved = transfer_seconds(
            transfer, tokens, token_bytes=token_bytes, block=block, pieces=pieces
        )
        return moved > prefill_seconds(time, tokens, tokens)

    # Very long prompts may be slower to prefill again: pairs grow faster than bytes. So the first.
    low, high = 0, 1
    while not slower(high):
        low, high = high, 2 * high
        if high > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if slower(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class Capacity:
    """One worker, under requests of a mean length."""

    kv_tokens: int
    held: int  # requests of the mean length
    longest: int  # context that it can hold
    prefill_s: float  # of a mean prompt, alone
    prefill_tokens_per_s: float
    step_s: float  # with as many decoding as it holds
    decode_tokens_per_s: float
    requests_per_s: float
    kv_bytes_per_s: float  # that its prefill makes at full speed
    link_bytes_per_s: float  # that its link moves
    transfer_s: float  # of a mean prompt
    limiting_prompt: int | None  # from which on the link is slower than prefill

    @property
    def link_is_the_limit(self) -> bool:
        """Whether its link moves less than its prefill makes."""
        return self.kv_bytes_per_s > self.link_bytes_per_s

    @classmethod
    def of(cls, model: WorkerModel, prompt: float, output: float) -> Capacity:
        """Reckon all of it."""
        time, size = model.time, model.kv_token_bytes
        held = min(sequences_held(model.kv_tokens, prompt, output), model.max_num_seqs)
        step = decode_seconds(time, max(held, 1), prompt + output / 2)
        alone = prefill_seconds(time, prompt, model.max_num_batched_tokens)
        blocks = {"token_bytes": size, "block": model.block_tokens, "pieces": model.kv_pieces}
        link = link_tokens_per_s(model.transfer, **blocks)
        return cls(
            kv_tokens=model.kv_tokens,
            held=held,
            longest=min(model.max_model_len, model.kv_tokens),
            prefill_s=alone,
            prefill_tokens_per_s=prompt / alone if alone else math.inf,
            step_s=step,
            decode_tokens_per_s=max(held, 1) / step if step else math.inf,
            requests_per_s=most_requests_per_s(
                time, prompt, output, held, model.max_num_batched_tokens
            ),
            kv_bytes_per_s=prompt * size / alone if alone else math.inf,
            link_bytes_per_s=link * size,
            transfer_s=transfer_seconds(model.transfer, prompt, **blocks),
            limiting_prompt=limiting_prompt(time, model.transfer, **blocks),
        )

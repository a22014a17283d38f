"""Workloads: who arrives when, with how much to read and to write.

A workload is data. Both sides of a comparison are sent the same bytes at the same moments, and
a seed fixes them for another machine and another day.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vllm_sched.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

LONG: Final = "long"
SHORT: Final = "short"
BACKGROUND: Final = "background"
BATCH: Final = "batch"
CLASSES: Final = (SHORT, LONG, BATCH, BACKGROUND)

# Ordinary ids in every vocabulary: special tokens lie below in ours and above in others'.
TOKEN_IDS = range(10, 400)
# A worker's flag too: the background's length is reckoned in steps of this size.
STEP_TOKENS = 512


@dataclass(frozen=True)
class PlannedRequest:
    """One request: when, of which class, how many tokens in and out."""

    at: float  # seconds after the round's start; of no meaning for the background
    klass: str
    prompt_tokens: int
    output_tokens: int
    lane: str = ""  # that it asks for, where the `lanes` policy is on; others don't heed it

    @property
    def before_start(self) -> bool:
        """Whether it is already decoding when the round starts."""
        return self.klass == BACKGROUND


@dataclass(frozen=True)
class Workload:
    """Arrivals, background first, and the seed of their prompts."""

    name: str
    arrivals: tuple[PlannedRequest, ...]
    seed: int
    lone_prompt_tokens: int  # the prompt that is also timed with nothing else running
    worker_flags: tuple[str, ...] = ()

    def prompts(self, round_number: int) -> list[list[int]]:
        """Token ids per arrival: the same for both sides, never the same twice on one side."""
        rng = random.Random(f"{self.name}/{self.seed}/{round_number}")
        return [rng.choices(TOKEN_IDS, k=arrival.prompt_tokens) for arrival in self.arrivals]

    def lone_prompts(self, round_number: int, count: int) -> list[list[int]]:
        """Token ids for requests that run alone."""
        rng = random.Random(f"{self.name}/{self.seed}/{round_number}/lone")
        return [rng.choices(TOKEN_IDS, k=self.lone_prompt_tokens) for _ in range(count)]


def long_blocks_short(
    *,
    longs: int = 2,
    seed: int = 0,
    long_tokens: int = 12_000,
    shorts: int = 8,
    short_tokens: int = 100,
    output_tokens: int = 16,
    background: int = 4,
    first_short_at: float = 0.3,
    short_every: float = 0.15,
) -> Workload:
    """Long prompts arrive at once; short ones follow while the first of them is being read.

    The shorts are spread evenly over the second after the longs, whatever the machine: none
    waits for an earlier one, so each meets the longs at another point of their prefill.

    Every request has a fixed output length, the background decodes too, so a round is the
    same work on both sides and a side cannot win tokens per second by starving somebody.
    The background is long enough for four times the steps that full budgets would need:
    a scheduler that cuts prompts into small chunks still has somebody to keep waiting.
    """
    foreground = longs * long_tokens + shorts * short_tokens
    outlasting = 64 + 4 * foreground // STEP_TOKENS
    return Workload(
        name="long-blocks-short",
        seed=seed,
        lone_prompt_tokens=short_tokens,
        worker_flags=("--max-num-batched-tokens", str(STEP_TOKENS), "--no-enable-prefix-caching"),
        arrivals=(
            *(PlannedRequest(0.0, BACKGROUND, 24, outlasting) for _ in range(background)),
            *(PlannedRequest(0.0, LONG, long_tokens, output_tokens) for _ in range(longs)),
            *(
                PlannedRequest(
                    round(first_short_at + i * short_every, 6), SHORT, short_tokens, output_tokens
                )
                for i in range(shorts)
            ),
        ),
    )


def equal_prompts(
    *, longs: int = 8, seed: int = 0, long_tokens: int = 4000, output_tokens: int = 16
) -> Workload:
    """Let prompts of one length arrive together: a scheduler decides but who is served first."""
    return Workload(
        name="equal-prompts",
        seed=seed,
        lone_prompt_tokens=long_tokens,
        worker_flags=("--max-num-batched-tokens", str(STEP_TOKENS), "--no-enable-prefix-caching"),
        arrivals=tuple(PlannedRequest(0.0, LONG, long_tokens, output_tokens) for _ in range(longs)),
    )


def chat_beside_batch(
    *,
    longs: int = 96,
    seed: int = 0,
    batch_tokens: int = 300,
    batch_output: int = 60,
    chats: int = 40,
    chat_tokens: int = 100,
    output_tokens: int = 16,
    first_chat_at: float = 1.0,
    chat_every: float = 0.25,
) -> Workload:
    """Let chats come one by one beside more batch work than the worker has slots for.

    `longs` counts the batch requests: enough to outlast the chats.
    """
    return Workload(
        name="chat-beside-batch",
        seed=seed,
        lone_prompt_tokens=chat_tokens,
        worker_flags=(
            *("--max-num-batched-tokens", str(STEP_TOKENS), "--no-enable-prefix-caching"),
            *("--max-num-seqs", "16"),
        ),
        arrivals=(
            *(PlannedRequest(0.0, BATCH, batch_tokens, batch_output, BATCH) for _ in range(longs)),
            *(
                PlannedRequest(
                    round(first_chat_at + i * chat_every, 6), SHORT, chat_tokens, output_tokens
                )
                for i in range(chats)
            ),
        ),
    )


def saturated(
    *,
    longs: int = 256,
    seed: int = 0,
    slots: int = 32,
    mean_prompt: int = 100,
    mean_output: int = 50,
) -> Workload:
    """Keep a worker's slots full with outputs that forget how long they have been.

    `longs` counts the requests. All are there from the start, as behind a closed loop with no time
    to think; only the rate while some still wait is to be looked at.
    """
    rng = random.Random(f"saturated/{seed}")
    return Workload(
        name="saturated",
        seed=seed,
        lone_prompt_tokens=mean_prompt,
        worker_flags=("--max-num-seqs", str(slots), "--no-enable-prefix-caching"),
        arrivals=tuple(
            PlannedRequest(
                0.0,
                BATCH,
                rng.randint(mean_prompt // 2, mean_prompt * 3 // 2),
                1 + min(int(rng.expovariate(1 / mean_output)), 8 * mean_output),
            )
            for _ in range(longs)
        ),
    )


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "long-blocks-short": long_blocks_short,
    "equal-prompts": equal_prompts,
    "chat-beside-batch": chat_beside_batch,
    "saturated": saturated,
}


def build(name: str, **parameters: int | float | None) -> Workload:
    """Make the workload of that name; with its own defaults for what is None."""
    given = {key: value for key, value in parameters.items() if value is not None}
    try:
        make = WORKLOADS[name]
    except KeyError:
        valid = ", ".join(sorted(WORKLOADS))
        raise UsageError(f"unknown workload {name!r}; use one of: {valid}") from None
    return make(**given)

"""Workloads of a comparison: arrival times and lengths of requests.

Both sides of a comparison get the same bytes at the same times; a seed makes them repeatable.
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
TURN: Final = "turn"
BACKGROUND: Final = "background"
BATCH: Final = "batch"
CLASSES: Final = (SHORT, TURN, LONG, BATCH, BACKGROUND)

# Ordinary ids in every vocabulary, without special tokens.
TOKEN_IDS = range(10, 400)
# Also a worker flag, and the step size of the background's length.
STEP_TOKENS = 512


@dataclass(frozen=True)
class PlannedRequest:
    """The time, class and lengths of one request."""

    at: float  # seconds after the round's start; not used for the background
    klass: str
    prompt_tokens: int
    output_tokens: int
    lane: str = ""  # the requested lane; only the `lanes` policy uses it
    cached_tokens: int = 0  # of the prompt, computed before the round starts

    @property
    def before_start(self) -> bool:
        """Whether the request already decodes when the round starts."""
        return self.klass == BACKGROUND


@dataclass(frozen=True)
class Workload:
    """Arrivals, background first, and the seed of their prompts."""

    name: str
    arrivals: tuple[PlannedRequest, ...]
    seed: int
    lone_prompt_tokens: int  # length of the prompts that are also timed alone
    worker_flags: tuple[str, ...] = ()

    def prompts(self, round_number: int) -> list[list[int]]:
        """Return token ids per arrival: equal for both sides, different in each round."""
        rng = random.Random(f"{self.name}/{self.seed}/{round_number}")
        return [rng.choices(TOKEN_IDS, k=arrival.prompt_tokens) for arrival in self.arrivals]

    def lone_prompts(self, round_number: int, count: int) -> list[list[int]]:
        """Return token ids of requests that run alone."""
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
    """Return long prompts that arrive at once, and short ones during the first long prefill.

    The shorts are spread over a second, so that each meets another point of the prefill.

    All output lengths are fixed, so both sides do the same work in a round. The background lasts
    four times as long as full budgets need, so it also outlasts small chunks.
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


def agent_turns(
    *,
    longs: int = 2,
    seed: int = 0,
    long_tokens: int = 12_000,
    turns: int = 8,
    new_tokens: int = 300,
    output_tokens: int = 16,
    background: int = 4,
    first_turn_at: float = 0.3,
    turn_every: float = 0.15,
) -> Workload:
    """Return turns of agents, nearly all cached, that arrive during new prompts of their length."""
    foreground = longs * long_tokens + turns * new_tokens
    outlasting = 64 + 4 * foreground // STEP_TOKENS
    cached = long_tokens - new_tokens
    return Workload(
        name="agent-turns",
        seed=seed,
        lone_prompt_tokens=new_tokens,
        worker_flags=("--max-num-batched-tokens", str(STEP_TOKENS)),
        arrivals=(
            *(PlannedRequest(0.0, BACKGROUND, 24, outlasting) for _ in range(background)),
            *(PlannedRequest(0.0, LONG, long_tokens, output_tokens) for _ in range(longs)),
            *(
                PlannedRequest(
                    round(first_turn_at + i * turn_every, 6),
                    TURN,
                    long_tokens,
                    output_tokens,
                    cached_tokens=cached,
                )
                for i in range(turns)
            ),
        ),
    )


def equal_prompts(
    *, longs: int = 8, seed: int = 0, long_tokens: int = 4000, output_tokens: int = 16
) -> Workload:
    """Return prompts of one length that arrive together; a scheduler only decides their order."""
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
    """Return chats that arrive one by one during more batch requests than the worker has slots.

    `longs` counts the batch requests, enough to outlast the chats.
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
    """Return a workload that keeps all slots full with exponential output lengths.

    `longs` counts the requests. All arrive at the start; only the rate while some wait matters.
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
    "agent-turns": agent_turns,
    "equal-prompts": equal_prompts,
    "chat-beside-batch": chat_beside_batch,
    "saturated": saturated,
}


def build(name: str, **parameters: int | float | None) -> Workload:
    """Return the workload `name`; a parameter of None means its default."""
    given = {key: value for key, value in parameters.items() if value is not None}
    try:
        make = WORKLOADS[name]
    except KeyError:
        valid = ", ".join(sorted(WORKLOADS))
        raise UsageError(f"unknown workload {name!r}; use one of: {valid}") from None
    return make(**given)

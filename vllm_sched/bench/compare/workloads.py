"""Workloads of a comparison: arrival times and lengths of requests.

Both sides of a comparison get the same bytes at the same times; a seed makes them repeatable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vllm_sched.errors import UsageError

LONG: Final = "long"
SHORT: Final = "short"
TURN: Final = "turn"
BACKGROUND: Final = "background"
BATCH: Final = "batch"
CLASSES: Final = (SHORT, TURN, LONG, BATCH, BACKGROUND)

# Ordinary ids in every vocabulary, without special tokens.
TOKEN_IDS = range(10, 400)
SHORT_TOKENS, OUTPUT_TOKENS = 100, 16
# Also the step size of the background's length.
STEP_TOKENS = 512
STEP_FLAGS = ("--max-num-batched-tokens", str(STEP_TOKENS))
NO_CACHE = "--no-enable-prefix-caching"


@dataclass(frozen=True)
class PlannedRequest:
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
        rng = random.Random(f"{self.name}/{self.seed}/{round_number}/lone")
        return [rng.choices(TOKEN_IDS, k=self.lone_prompt_tokens) for _ in range(count)]


def long_blocks_short(
    *,
    longs: int = 2,
    seed: int = 0,
    long_tokens: int = 12_000,
    shorts: int = 8,
    background: int = 4,
) -> Workload:
    """Return long prompts that arrive at once, and short ones during the first long prefill.

    The shorts are spread over a second, so that each meets another point of the prefill.
    """
    arriving = [PlannedRequest(at, SHORT, SHORT_TOKENS, OUTPUT_TOKENS) for at in _moments(shorts)]
    return Workload(
        name="long-blocks-short",
        seed=seed,
        lone_prompt_tokens=SHORT_TOKENS,
        worker_flags=(*STEP_FLAGS, NO_CACHE),
        arrivals=_beside_longs(arriving, longs, long_tokens, background),
    )


def agent_turns(
    *,
    longs: int = 2,
    seed: int = 0,
    long_tokens: int = 12_000,
    turns: int = 8,
    new_tokens: int = 300,
    background: int = 4,
) -> Workload:
    """Return turns of agents, nearly all cached, that arrive during new prompts of their length."""
    turn = PlannedRequest(
        0.0, TURN, long_tokens, OUTPUT_TOKENS, cached_tokens=long_tokens - new_tokens
    )
    arriving = [replace(turn, at=at) for at in _moments(turns)]
    return Workload(
        name="agent-turns",
        seed=seed,
        lone_prompt_tokens=new_tokens,
        worker_flags=STEP_FLAGS,
        arrivals=_beside_longs(arriving, longs, long_tokens, background),
    )


def _moments(count: int, first: float = 0.3, every: float = 0.15) -> list[float]:
    return [round(first + number * every, 6) for number in range(count)]


def _beside_longs(
    arriving: Sequence[PlannedRequest], longs: int, long_tokens: int, background: int
) -> tuple[PlannedRequest, ...]:
    """Return the requests with long prompts and decodes before them.

    Output lengths are fixed, so both sides do the same work. The background lasts four times as
    long as full budgets need, and outlasts small chunks.
    """
    new_tokens = sum(arrival.prompt_tokens - arrival.cached_tokens for arrival in arriving)
    outlasting = 64 + 4 * (longs * long_tokens + new_tokens) // STEP_TOKENS
    return (
        *(PlannedRequest(0.0, BACKGROUND, 24, outlasting) for _ in range(background)),
        *(PlannedRequest(0.0, LONG, long_tokens, OUTPUT_TOKENS) for _ in range(longs)),
        *arriving,
    )


def equal_prompts(*, longs: int = 8, seed: int = 0) -> Workload:
    """Return prompts of one length that arrive together; a scheduler only decides their order."""
    tokens = 4000
    return Workload(
        name="equal-prompts",
        seed=seed,
        lone_prompt_tokens=tokens,
        worker_flags=(*STEP_FLAGS, NO_CACHE),
        arrivals=tuple(PlannedRequest(0.0, LONG, tokens, OUTPUT_TOKENS) for _ in range(longs)),
    )


def chat_beside_batch(*, longs: int = 96, seed: int = 0) -> Workload:
    """Return chats that arrive one by one during more batch requests than the worker has slots.

    `longs` counts the batch requests, enough to outlast the chats.
    """
    chats = _moments(40, first=1.0, every=0.25)
    return Workload(
        name="chat-beside-batch",
        seed=seed,
        lone_prompt_tokens=SHORT_TOKENS,
        worker_flags=(*STEP_FLAGS, NO_CACHE, "--max-num-seqs", "16"),
        arrivals=(
            *(PlannedRequest(0.0, BATCH, 300, 60, BATCH) for _ in range(longs)),
            *(PlannedRequest(at, SHORT, SHORT_TOKENS, OUTPUT_TOKENS) for at in chats),
        ),
    )


def saturated(*, longs: int = 256, seed: int = 0) -> Workload:
    """Return a workload that keeps all slots full with exponential output lengths.

    `longs` counts the requests. All arrive at the start; only the rate while some wait matters.
    """
    rng = random.Random(f"saturated/{seed}")
    prompt, output = 100, 50  # means
    return Workload(
        name="saturated",
        seed=seed,
        lone_prompt_tokens=prompt,
        worker_flags=("--max-num-seqs", "32", NO_CACHE),
        arrivals=tuple(
            PlannedRequest(
                0.0,
                BATCH,
                rng.randint(prompt // 2, prompt * 3 // 2),
                1 + min(int(rng.expovariate(1 / output)), 8 * output),
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
    present = {key: value for key, value in parameters.items() if value is not None}
    try:
        make = WORKLOADS[name]
    except KeyError:
        valid = ", ".join(sorted(WORKLOADS))
        raise UsageError(f"unknown workload {name!r}; use one of: {valid}") from None
    return make(**present)

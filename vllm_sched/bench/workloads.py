"""Workloads: who arrives when, with how much to read and to write.

A workload is data. Both sides of a comparison are sent the same bytes at the same moments, and
a seed fixes them for another machine and another day.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from vllm_sched.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

LONG: Final = "long"
SHORT: Final = "short"
BACKGROUND: Final = "background"
CLASSES: Final = (SHORT, LONG, BACKGROUND)

# Ordinary ids in every vocabulary: special tokens lie below in ours and above in others'.
TOKEN_IDS = range(10, 400)
# A worker's flag too: the background's length is reckoned in steps of this size.
STEP_TOKENS = 512


@dataclass(frozen=True)
class Arrival:
    """One request: when, of which class, how many tokens in and out."""

    at: float  # seconds after the round's start; of no meaning for the background
    klass: str
    prompt_tokens: int
    output_tokens: int

    @property
    def before_start(self) -> bool:
        """Whether it is already decoding when the round starts."""
        return self.klass == BACKGROUND


@dataclass(frozen=True)
class Workload:
    """Arrivals, background first, and the seed of their prompts."""

    name: str
    arrivals: tuple[Arrival, ...]
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

    def shrunk(self, factor: int = 6) -> Workload:
        """Return the same shape at a fraction of the size: a round to throw away."""
        return replace(
            self,
            seed=self.seed + 1,
            arrivals=tuple(
                replace(
                    arrival,
                    at=arrival.at / factor,
                    prompt_tokens=max(8, arrival.prompt_tokens // factor),
                    output_tokens=max(8, arrival.output_tokens // factor),
                )
                for arrival in self.arrivals
            ),
        )


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
            *(Arrival(0.0, BACKGROUND, 24, outlasting) for _ in range(background)),
            *(Arrival(0.0, LONG, long_tokens, output_tokens) for _ in range(longs)),
            *(
                Arrival(
                    round(first_short_at + i * short_every, 6), SHORT, short_tokens, output_tokens
                )
                for i in range(shorts)
            ),
        ),
    )


WORKLOADS: dict[str, Callable[..., Workload]] = {"long-blocks-short": long_blocks_short}


def build(name: str, **parameters: int | float) -> Workload:
    """Make the workload of that name."""
    try:
        make = WORKLOADS[name]
    except KeyError:
        valid = ", ".join(sorted(WORKLOADS))
        raise UsageError(f"unknown workload {name!r}; use one of: {valid}") from None
    return make(**parameters)

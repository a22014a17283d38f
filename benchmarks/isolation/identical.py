"""The same prompts by every route, compared token by token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from vllm_sched.bench.workloads import TOKEN_IDS

OUTPUT = 16
TIMEOUT_S = 300.0
# What chunks cut elsewhere round otherwise. With another prompt's KV cache it is 0.01 and more:
# that is seen here even where the best token stays the best.
NEAR = 1e-3
SHORTEST, LONGEST = 10, 12_000


@dataclass(frozen=True)
class Answer:
    """Tokens, and the logarithm of how likely each was."""

    tokens: tuple[int, ...]
    likely: tuple[float, ...]

    def same(self, other: Answer) -> bool:
        """Whether both are of the same prompt."""
        pairs = zip(self.likely, other.likely, strict=True)
        return self.tokens == other.tokens and all(abs(a - b) < NEAR for a, b in pairs)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Make prompts of all sizes, short and long ones mixed."""
    rng = random.Random(f"identical/{seed}")
    step = (LONGEST / SHORTEST) ** (1 / max(count - 1, 1))
    sizes = [round(SHORTEST * step**number) for number in range(count)]
    rng.shuffle(sizes)
    return [rng.choices(TOKEN_IDS, k=size) for size in sizes]


async def differing(
    routes: Mapping[str, str],
    asked: Sequence[Sequence[int]],
    model: str,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, int]:
    """Count the answers of each route that are not those of the first; each is asked twice.

    The second time prefixes are cached, here and there.
    """
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    counts: dict[str, int] = {}
    async with aiohttp.ClientSession(timeout=timeout) as session:
        truth: list[Answer] = []
        for name, url in routes.items():
            for cache in ("cold", "warm"):
                tell(f"{len(asked)} prompts by {name}, {cache}")
                found = [await _ask(session, url, model, prompt) for prompt in asked]
                truth = truth or found
                counts[f"{name}, {cache}"] = sum(
                    not ours.same(theirs) for ours, theirs in zip(found, truth, strict=True)
                )
                await asyncio.sleep(0)
    return counts


async def _ask(
    session: aiohttp.ClientSession, url: str, model: str, prompt: Sequence[int]
) -> Answer:
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": OUTPUT, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "logprobs": 1,
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        (choice,) = (await answer.json())["choices"]
    return Answer(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))

"""The same prompts by every route, compared token by token."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from vllm_sched.bench.compare.workloads import TOKEN_IDS

OUTPUT = 16
TIMEOUT_S = 300.0
LOOKS, PAUSE_S = 20, 0.5  # until a worker should have counted what it has done
# What chunks cut elsewhere round otherwise. With another prompt's KV cache it is 0.01 and more:
# that is seen here even where the best token stays the best.
NEAR = 1e-3
SHORTEST, LONGEST = 10, 12_000
# Of a decode worker: what its engine has fetched.
FETCHED = re.compile(r"^vllm:nixl_xfer_time_seconds_count\S* (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Pass:
    """All prompts once; `forget`: the workers whose caches are emptied before."""

    cache: str
    forget: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """A way that the prompts go; whether all are handed over, and to whom, is seen to."""

    name: str
    url: str
    passes: tuple[Pass, ...]
    decode: str = ""  # the decode worker, where all are to be handed over to it


@dataclass(frozen=True)
class Answer:
    """Tokens, the logarithm of how likely each was, and who gave them."""

    tokens: tuple[int, ...]
    likely: tuple[float, ...]
    by: str = ""

    def same(self, other: Answer) -> bool:
        """Whether both are of the same prompt."""
        pairs = zip(self.likely, other.likely, strict=True)
        return self.tokens == other.tokens and all(abs(a - b) < NEAR for a, b in pairs)


@dataclass(frozen=True)
class Found:
    """What came of one pass."""

    route: str
    asked: int
    differ: int
    by: Mapping[str, int] = field(default_factory=dict)
    fetched: int | None = None  # by the decode worker's engine, where all were to be

    @property
    def handed_over(self) -> int:
        """How many were served by two workers."""
        return sum(count for name, count in self.by.items() if ">" in name)

    @property
    def wrong(self) -> bool:
        """Whether an answer differs, or what was to be handed over was not."""
        missing = self.fetched is not None and min(self.handed_over, self.fetched) < self.asked
        return self.differ > 0 or missing

    @property
    def said(self) -> str:
        """Put it in a line."""
        ways = ", ".join(f"{count} by {name}" for name, count in sorted(self.by.items()) if name)
        line = f"{self.route}: {self.differ} of {self.asked} answers differ"
        if ways:
            line += f"; {ways}"
        return line if self.fetched is None else f"{line}; {self.fetched} transfers"


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Make prompts of all sizes, short and long ones mixed."""
    rng = random.Random(f"identical/{seed}")
    step = (LONGEST / SHORTEST) ** (1 / max(count - 1, 1))
    sizes = [round(SHORTEST * step**number) for number in range(count)]
    rng.shuffle(sizes)
    return [rng.choices(TOKEN_IDS, k=size) for size in sizes]


async def differing(
    routes: Sequence[Route],
    asked: Sequence[Sequence[int]],
    model: str,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Found]:
    """Count the answers of each pass that are not those of the first."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    results: list[Found] = []
    async with aiohttp.ClientSession(timeout=timeout) as session:
        truth: list[Answer] = []
        for route in routes:
            for each in route.passes:
                for url in each.forget:
                    await _forget(session, url)
                name = f"{route.name}, {each.cache}"
                tell(f"{len(asked)} prompts by {name}")
                before = await _fetched(session, route.decode)
                found = [await _ask(session, route.url, model, prompt) for prompt in asked]
                truth = truth or found
                differ = sum(not a.same(b) for a, b in zip(found, truth, strict=True))
                fetched = None
                if route.decode:
                    fetched = await _have_fetched(session, route.decode, before + len(asked))
                    fetched -= before
                by = Counter(answer.by for answer in found)
                results.append(Found(name, len(asked), differ, by, fetched))
    return results


async def _forget(session: aiohttp.ClientSession, url: str) -> None:
    async with session.post(f"{url}/reset_prefix_cache") as answer:
        answer.raise_for_status()


async def _fetched(session: aiohttp.ClientSession, url: str) -> int:
    """Read how many transfers a decode worker has done."""
    if not url:
        return 0
    async with session.get(f"{url}/metrics") as answer:
        return int(sum(float(number) for number in FETCHED.findall(await answer.text())))


async def _have_fetched(session: aiohttp.ClientSession, url: str, most: int) -> int:
    """Read it once it is as many as it should be, or will hardly be any more."""
    for _ in range(LOOKS):
        if (done := await _fetched(session, url)) >= most:
            break
        await asyncio.sleep(PAUSE_S)
    return done


async def _ask(
    session: aiohttp.ClientSession, url: str, model: str, prompt: Sequence[int]
) -> Answer:
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": OUTPUT, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "logprobs": 1,
    }  # fmt: skip
    explain = {"X-Explain": "1"}
    async with session.post(f"{url}/v1/completions", json=body, headers=explain) as answer:
        answer.raise_for_status()
        (choice,) = (await answer.json())["choices"]
        route = answer.headers.get("X-Route", "")
    return Answer(
        tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), who(route)
    )


def who(route: str) -> str:
    """Name who answered, `d0` or `p0>d0`, by what the router says: `d0; prefill=p0; ...`."""
    name, *more = route.split("; ")
    prefills = (part.partition("=")[2] for part in more if part.startswith("prefill="))
    return ">".join([*prefills, name])

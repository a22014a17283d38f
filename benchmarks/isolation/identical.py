"""Compare the tokens of the same prompts by every route."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from vllm_sched.bench.compare.workloads import TOKEN_IDS

OUTPUT_TOKENS = 16
TIMEOUT_S = 300.0
POLLS, POLL_S = 20, 0.5  # until a worker's metrics count its transfers
# Other chunk boundaries round log-probabilities differently, by less than this. The KV cache of
# another prompt changes them by 0.01 or more, even if the best token stays the same.
LOGPROB_TOLERANCE = 1e-3
SHORTEST, LONGEST = 10, 12_000
# Transfers of a decode worker's engine.
FETCHED = re.compile(r"^vllm:nixl_xfer_time_seconds_count\S* (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Pass:
    """All prompts once, after the caches of the workers in `forget` are reset."""

    cache: str
    forget: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """A URL that the prompts are sent to, and the expected hand-overs."""

    name: str
    url: str
    passes: tuple[Pass, ...]
    decode: str = ""  # the decode worker that every prompt must be handed over to


@dataclass(frozen=True)
class Answer:
    """Tokens with their log-probabilities, and the workers that served them."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    by: str = ""

    def same_as(self, other: Answer) -> bool:
        """Return whether tokens are equal and log-probabilities within LOGPROB_TOLERANCE."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens == other.tokens and all(abs(a - b) < LOGPROB_TOLERANCE for a, b in pairs)


@dataclass(frozen=True)
class PassResult:
    """The results of one pass."""

    route: str
    sent: int
    differ: int
    by: Mapping[str, int] = field(default_factory=dict)
    fetched: int | None = None  # transfers of the decode worker's engine, if all were expected

    @property
    def handed_over(self) -> int:
        """Number of prompts that two workers served."""
        return sum(count for name, count in self.by.items() if ">" in name)

    @property
    def wrong(self) -> bool:
        """True if an answer differs, or an expected hand-over is missing."""
        missing = self.fetched is not None and min(self.handed_over, self.fetched) < self.sent
        return self.differ > 0 or missing

    @property
    def summary(self) -> str:
        by = ", ".join(f"{count} by {name}" for name, count in sorted(self.by.items()) if name)
        line = f"{self.route}: {self.differ} of {self.sent} answers differ"
        if by:
            line += f"; {by}"
        return line if self.fetched is None else f"{line}; {self.fetched} transfers"


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of 10 to 12,000 tokens, in random order."""
    rng = random.Random(f"identical/{seed}")
    step = (LONGEST / SHORTEST) ** (1 / max(count - 1, 1))
    sizes = [round(SHORTEST * step**number) for number in range(count)]
    rng.shuffle(sizes)
    return [rng.choices(TOKEN_IDS, k=size) for size in sizes]


async def compare(
    routes: Sequence[Route],
    sent: Sequence[Sequence[int]],
    model: str,
    report: Callable[[str], None] = lambda _: None,
) -> list[PassResult]:
    """Count the answers of each pass that differ from those of the first pass."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    results: list[PassResult] = []
    async with aiohttp.ClientSession(timeout=timeout) as session:
        expected: list[Answer] = []
        for route in routes:
            for round_ in route.passes:
                for url in round_.forget:
                    await _reset_cache(session, url)
                name = f"{route.name}, {round_.cache}"
                report(f"{len(sent)} prompts by {name}")
                before = await _transfers(session, route.decode)
                texts = [await _complete(session, route.url, model, prompt) for prompt in sent]
                expected = expected or texts
                differ = sum(not a.same_as(b) for a, b in zip(texts, expected, strict=True))
                fetched = None
                if route.decode:
                    fetched = await _wait_transfers(session, route.decode, before + len(sent))
                    fetched -= before
                by = Counter(answer.by for answer in texts)
                results.append(PassResult(name, len(sent), differ, by, fetched))
    return results


async def _reset_cache(session: aiohttp.ClientSession, url: str) -> None:
    async with session.post(f"{url}/reset_prefix_cache") as answer:
        answer.raise_for_status()


async def _transfers(session: aiohttp.ClientSession, url: str) -> int:
    """Return the number of transfers of a decode worker."""
    if not url:
        return 0
    async with session.get(f"{url}/metrics") as answer:
        return int(sum(float(number) for number in FETCHED.findall(await answer.text())))


async def _wait_transfers(session: aiohttp.ClientSession, url: str, wanted: int) -> int:
    """Return the number of transfers once it is as wanted, or after POLLS polls."""
    for _ in range(POLLS):
        if (done := await _transfers(session, url)) >= wanted:
            break
        await asyncio.sleep(POLL_S)
    return done


async def _complete(
    session: aiohttp.ClientSession, url: str, model: str, prompt: Sequence[int]
) -> Answer:
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "logprobs": 1,
    }  # fmt: skip
    explain = {"X-Explain": "1"}
    async with session.post(f"{url}/v1/completions", json=body, headers=explain) as answer:
        answer.raise_for_status()
        (choice,) = (await answer.json())["choices"]
        route = answer.headers.get("X-Route", "")
    return Answer(
        tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), workers_of(route)
    )


def workers_of(route: str) -> str:
    """Return `d0` or `p0>d0` for an X-Route header such as `d0; prefill=p0; ...`."""
    name, *more = route.split("; ")
    prefills = (part.partition("=")[2] for part in more if part.startswith("prefill="))
    return ">".join([*prefills, name])

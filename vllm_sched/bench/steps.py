"""Measure what steps of a worker take, from outside, through its OpenAI API.

- decode alone: streams that run together; a gap between two tokens is a step.
- both: a prompt is sent to a worker that decodes; the gap that ends when the prompt's first token
  comes is the step that prefilled it.
- prefill alone: prompts that come while another one, the plug, is being prefilled. They have the
  next step to themselves, which lasts from the plug's token to theirs.

What else happens on a machine only ever adds to a time, so every point is the quickest quarter of a
few. Prompts that are timed are random, so that no prefix of theirs is cached.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Self

import aiohttp

from vllm_sched.bench.excerpt import excerpt
from vllm_sched.bench.runner import ahead_of_others
from vllm_sched.bench.workloads import TOKEN_IDS
from vllm_sched.cost.calibration import Measured
from vllm_sched.cost.step_time import StepShape
from vllm_sched.errors import VllmSchedError

TIMEOUT_S: Final = 300.0
# Each event says how many tokens there are so far.
COUNT_ALWAYS: Final = {"include_usage": True, "continuous_usage_stats": True}
TOKENS: Final = re.compile(rb'"completion_tokens":\s*(\d+)')
# Answers that are cut off leave the worker busy for a step or two.
SETTLE_S: Final = 0.1
# Tokens streamed, of which the first few and the last are not of full batches.
STREAMED, WINDOW = 44, 8
REPEATS: Final = 5
BATCH_PROMPTS: Final = (1, 4)
# Prompts follow the plug so much later; tokens that come further apart are of different steps.
FOLLOW_S: Final = 0.002
TOGETHER: Final = 0.3


class MeasureError(VllmSchedError):
    """A worker that can't be measured; the message says why in one line."""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    budget: int
    seed: int = 0

    @classmethod
    def of(cls, *, budget: int, max_batch: int, max_model_len: int, seed: int = 0) -> Self:
        """Spread what is measured over what the worker takes in one step."""
        batches = [1]
        while batches[-1] * 2 <= max_batch:
            batches.append(batches[-1] * 2)
        longest = min(budget - max_batch, max_model_len - STREAMED - 1)
        if longest < 64:
            raise MeasureError(
                f"a step of {budget} tokens leaves a prompt {longest} beside {max_batch} decodes, "
                "64 are needed; give a larger --budget or a smaller --max-batch"
            )
        prompts = sorted({round(16 * (longest / 16) ** (n / 9)) for n in range(10)})
        contexts = sorted({16, max(longest // 4, 16), longest})
        return cls(tuple(batches), tuple(contexts), tuple(prompts), budget, seed)


@dataclass
class Stream:
    """One streamed answer: when its tokens came, and how many there were by then."""

    prompt_tokens: int
    ticks: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def count(self) -> int:
        """Tokens that have come."""
        return self.tokens[-1] if self.tokens else 0

    def tick(self, now: float, tokens: int) -> None:
        """Take in what came: one token, unless somebody on the way was slow and merged some."""
        self.ticks.append(now)
        self.tokens.append(tokens)
        self._news.set()

    def gap(self, at: int) -> float | None:
        """Return the time of the step that made this tick; None if it made more than one token."""
        if not 0 < at < len(self.ticks) or self.tokens[at] != self.tokens[at - 1] + 1:
            return None
        return self.ticks[at] - self.ticks[at - 1]

    def end(self) -> None:
        """Let nobody wait for more."""
        self.ended = True
        self._news.set()

    async def reached(self, tokens: int) -> None:
        """Wait for so many tokens."""
        while self.count < tokens:
            if self.ended:
                raise MeasureError(f"an answer ended after {self.count} of {tokens} tokens")
            self._news.clear()
            await self._news.wait()


class Meter:
    """A worker, and the requests that measure it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, plan_seed: int = 0) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._rng = random.Random(plan_seed)
        self.model = ""
        self.max_model_len = 0

    async def meet(self) -> None:
        """Ask for the model's name and limits."""
        content = json.loads(await self._get("/v1/models"))
        try:
            card = content["data"][0]
            self.model, self.max_model_len = card["id"], int(card["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise MeasureError(
                f"{self._url}/v1/models names no model with a max_model_len; is that a vLLM worker?"
            ) from None

    async def measure(self, plan: Plan, tell: Callable[[str], None]) -> list[Measured]:
        """Measure everything, after a warm-up that is thrown away."""
        tell("warming up")
        await self._decode(plan.batches[-1], plan.contexts[0])
        await self._prefill(1, plan.prompts[-1], plan.prompts[-1])
        found: list[Measured] = []
        for batch in plan.batches:
            for context in plan.contexts:
                tell(f"decoding: {batch} at a time, context {context}")
                found += await self._decode(batch, context)
        for count in BATCH_PROMPTS:
            for tokens in plan.prompts:
                if count * tokens <= plan.prompts[-1]:
                    tell(f"prefill alone: {count} of {tokens} tokens")
                    found += await self._prefill(count, tokens, plan.prompts[-1])
        for batch in plan.batches:
            tell(f"both: prompts beside {batch} decoding")
            found += await self._mixed(batch, plan)
        return found

    # One kind of step each

    async def _decode(self, batch: int, context: int) -> list[Measured]:
        async with self._streams(batch, context, 2 * STREAMED + 4 * batch) as streams:
            for stream in streams:
                await stream.reached(1)
            latest = max(streams, key=lambda stream: stream.ticks[0])
            await latest.reached(STREAMED)
        gaps = [
            (gap, latest.tokens[at])
            for at in range(2, len(latest.ticks))
            if latest.tokens[at] <= STREAMED and (gap := latest.gap(at)) is not None
        ]
        found = []
        for start in range(0, len(gaps) - WINDOW + 1, WINDOW):
            window = gaps[start : start + WINDOW]
            seconds = quick(gap for gap, _ in window)
            each = context + round(statistics.fmean(token for _, token in window)) - 1
            found.append(Measured(StepShape(decodes=batch, context_tokens=batch * each), seconds))
        return found

    async def _mixed(self, batch: int, plan: Plan) -> list[Measured]:
        rounds = [tokens for tokens in plan.prompts for _ in range(REPEATS)]
        found: list[Measured] = []
        gaps: dict[int, list[float]] = {tokens: [] for tokens in plan.prompts}
        contexts: list[int] = []
        # Long enough for all prompts with some steps between; they are cut off at the end.
        steps = min(len(rounds) * 40, self.max_model_len - plan.contexts[0] - 1)
        async with self._streams(batch, plan.contexts[0], steps) as streams:
            for stream in streams:
                await stream.reached(1)
            for tokens in rounds:
                if any(stream.count + 40 > steps for stream in streams):
                    break
                seconds, context = await self._beside(streams, tokens)
                if seconds is not None:
                    gaps[tokens].append(seconds)
                    contexts.append(context)
        for tokens, seen in gaps.items():
            if len(seen) > REPEATS // 2:
                shape = StepShape(
                    tokens, tokens * tokens / 2, batch, round(statistics.median(contexts))
                )
                found.append(Measured(shape, quick(seen)))
        return found

    async def _beside(self, streams: Sequence[Stream], tokens: int) -> tuple[float | None, int]:
        """Time the step that prefills one prompt beside running streams."""
        newcomer = await self._stream(self._prompt(tokens), 1)
        first = newcomer.ticks[0]
        context = sum(stream.prompt_tokens + stream.count for stream in streams)
        # The step's other tokens come with its own, a little before or after.
        for stream in streams:
            await stream.reached(stream.count + 3)
        gaps = []
        for stream in streams:
            at = min(range(1, len(stream.ticks)), key=lambda n: abs(stream.ticks[n] - first))
            if (gap := stream.gap(at)) is not None:
                gaps.append(gap)
        return (statistics.median(gaps) if gaps else None), context

    async def _prefill(self, prompts: int, tokens: int, plug: int) -> list[Measured]:
        """Time a step that prefills so many prompts of so many tokens and does nothing else."""
        times: list[float] = []
        for _ in range(2 * REPEATS):
            if (seconds := await self._behind(prompts, tokens, plug)) is not None:
                times.append(seconds)
            if len(times) == REPEATS:
                break
        if len(times) <= REPEATS // 2:
            return []
        shape = StepShape(prompts * tokens, prompts * tokens * tokens / 2)
        return [Measured(shape, quick(times))]

    async def _behind(self, prompts: int, tokens: int, plug: int) -> float | None:
        """Time the step behind a plug; None if the prompts were not all in it, alone."""
        batch = [self._prompt(tokens) for _ in range(prompts)]
        first, then = await asyncio.gather(
            self._stream(self._prompt(plug), 1), self._stream(batch, 1, after_s=FOLLOW_S)
        )
        seconds = then.ticks[0] - first.ticks[0]
        return seconds if then.ticks[-1] - then.ticks[0] < TOGETHER * seconds else None

    # Requests

    @asynccontextmanager
    async def _streams(self, count: int, context: int, tokens: int) -> AsyncIterator[list[Stream]]:
        """Have so many answers streamed inside the block; they are cut off at its end."""
        streams = [Stream(context) for _ in range(count)]
        # All but the end of the prompt is one, and cached: a decode reads its context all the same,
        # and hundreds of long prompts need not be computed for the sake of what follows them.
        *shared, _ = self._prompt(context)
        await self._stream([*shared, *self._prompt(1)], 1)
        tasks = [
            asyncio.create_task(self._stream([*shared, *self._prompt(1)], tokens, into=stream))
            for stream in streams
        ]
        try:
            yield streams
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            # Why a stream failed says more than that one was too short.
            for error in ended:
                if isinstance(error, MeasureError):
                    raise error
            await asyncio.sleep(SETTLE_S)

    async def _stream(
        self,
        prompt: Sequence[int] | Sequence[Sequence[int]],
        tokens: int,
        *,
        into: Stream | None = None,
        after_s: float = 0.0,
    ) -> Stream:
        stream = into or Stream(0)
        if after_s:
            await asyncio.sleep(after_s)
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": COUNT_ALWAYS,
        }  # fmt: skip
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise MeasureError(
                        f"{self._url} answered {answer.status}: {excerpt(await answer.text())}"
                    )
                rest = b""
                async for chunk in answer.content.iter_any():
                    now = time.perf_counter()
                    *events, rest = (rest + chunk).split(b"\n\n")
                    made = [event for event in events if b'"choices":[{' in event]
                    if made:
                        counted = TOKENS.search(made[-1])
                        known = stream.count + len(made)
                        stream.tick(now, int(counted[1]) if counted else known)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _unreachable(self._url, error) from None
        finally:
            stream.end()
        if not stream.ticks:
            raise MeasureError(f"{self._url} ended an answer without a token")
        return stream

    def _prompt(self, tokens: int) -> list[int]:
        return self._rng.choices(TOKEN_IDS, k=tokens)

    async def _get(self, path: str) -> bytes:
        try:
            async with self._session.get(self._url + path) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _unreachable(self._url, error) from None
        if answer.status != 200:
            raise MeasureError(f"{self._url}{path} answered {answer.status}: {excerpt(content)}")
        return content


@asynccontextmanager
async def meter(url: str, seed: int = 0) -> AsyncIterator[Meter]:
    """Meet a worker."""
    key = os.environ.get("VLLM_API_KEY", "")
    with ahead_of_others():
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        ) as session:
            found = Meter(session, url, seed)
            await found.meet()
            yield found


def quick(times: Iterable[float]) -> float:
    """Return the time that a quarter is quicker than."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4]


def _unreachable(url: str, error: BaseException) -> MeasureError:
    why = excerpt(str(error) or type(error).__name__)
    return MeasureError(f"{url}: {why}; is a worker listening there?")

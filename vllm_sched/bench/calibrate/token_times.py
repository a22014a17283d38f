"""One client of a worker's OpenAI API that records when each token arrives."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Final

from vllm_sched.bench.client.priority import realtime_priority
from vllm_sched.bench.client.wire import COMPLETIONS, Address, Wire, WireError
from vllm_sched.bench.compare.workloads import TOKEN_IDS
from vllm_sched.errors import VllmSchedError

TIMEOUT_S: Final = 300.0
# Each event contains the number of tokens so far.
STREAM_OPTIONS: Final = {"include_usage": True, "continuous_usage_stats": True}
TOKENS_PATTERN: Final = re.compile(rb'"completion_tokens":\s*(\d+)')
# Cancelled streams keep the worker busy for a step or two.
SETTLE_S: Final = 0.1
# The vLLM metric whose labels contain the cache size.
CACHE_PATTERN: Final = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
LABEL_PATTERN: Final = re.compile(r'(\w+)="(\d+)"')
POLICIES_PATTERN: Final = re.compile(
    r'^vllm_sched_info\{.*\bpolicies="(?!none")([^"]+)"', re.MULTILINE
)


class MeasureError(VllmSchedError):
    """A worker can't be measured; the message says why in one line."""


@dataclass
class TimedStream:
    """A streamed response: when its tokens arrived, and how many there were by then."""

    prompt_tokens: int
    ticks: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _rest: bytes = b""

    @property
    def count(self) -> int:
        return self.tokens[-1] if self.tokens else 0

    def feed(self, data: bytes) -> None:
        now = time.perf_counter()
        *events, self._rest = (self._rest + data).split(b"\n\n")
        token_events = [event for event in events if b'"choices":[{' in event]
        if token_events:
            counted = TOKENS_PATTERN.search(token_events[-1])
            self.tick(now, int(counted[1]) if counted else self.count + len(token_events))

    def tick(self, now: float, tokens: int) -> None:
        """Record an event: one token, or several if events were merged on the way."""
        self.ticks.append(now)
        self.tokens.append(tokens)
        self._news.set()

    def gap(self, at: int) -> float | None:
        """Return the time of the step before this tick; None if it made several tokens."""
        if not 0 < at < len(self.ticks) or self.tokens[at] != self.tokens[at - 1] + 1:
            return None
        return self.ticks[at] - self.ticks[at - 1]

    def nearest(self, when: float) -> int:
        """Return the index of the tick, except the first, that is nearest to a moment."""
        return min(range(1, len(self.ticks)), key=lambda at: abs(self.ticks[at] - when))

    def end(self) -> None:
        self.ended = True
        self._news.set()

    async def wait_for_more(self, tokens: int) -> None:
        until = self.count + tokens
        while self.count < until and not self.ended:
            self._news.clear()
            await self._news.wait()

    async def wait_until(self, tokens: int) -> None:
        """Wait until the stream has `tokens` tokens; raise if it ends earlier."""
        while self.count < tokens:
            if self.ended:
                raise MeasureError(f"a response ended after {self.count} of {tokens} tokens")
            self._news.clear()
            await self._news.wait()


class TokenApi:
    """A worker's completions API, used with new random prompts."""

    def __init__(self, wire: Wire, seed: int = 0) -> None:
        self._wire = wire
        self._rng = random.Random(seed)
        self.model = self.root = ""
        self.max_model_len = 0
        self.kv_tokens: int | None = None
        self.block_tokens: int | None = None

    async def read_model(self) -> None:
        content = await self._get("/v1/models")
        try:
            card = json.loads(content)["data"][0]
            self.model, self.max_model_len = card["id"], int(card["max_model_len"])
            self.root = str(card.get("root") or "")
        except (KeyError, IndexError, TypeError, ValueError):
            raise MeasureError(
                f"{self._wire.address}/v1/models lists no model with a max_model_len; "
                "is this a vLLM worker?"
            ) from None

    async def read_metrics(self) -> None:
        """Read the size of the KV cache, if /metrics has it; raise if the worker runs policies."""
        try:
            page = (await self._get("/metrics")).decode(errors="replace")
        except MeasureError:
            return
        if (running := POLICIES_PATTERN.search(page)) is not None:
            raise MeasureError(
                f"{self._wire.address} runs {running[1].replace('+', ' and ')}, and policies "
                "change what a step computes; measure a worker started with --policy none"
            )
        if (match := CACHE_PATTERN.search(page)) is not None:
            labels = {name: int(value) for name, value in LABEL_PATTERN.findall(match[1])}
            blocks, block = labels.get("num_gpu_blocks", 0), labels.get("block_size", 0)
            if blocks and block:
                # If groups of layers share the blocks, a token takes several.
                self.kv_tokens = labels.get("kv_cache_size_tokens", blocks * block)
                self.block_tokens = block

    @asynccontextmanager
    async def streams(
        self, count: int, context: int, tokens: int
    ) -> AsyncIterator[list[TimedStream]]:
        """Run `count` streams inside the block; they are cancelled at its end."""
        streams = [TimedStream(context) for _ in range(count)]
        # The prompts share a cached prefix. A decode step reads its whole context anyway, and
        # hundreds of long prompts need not be computed.
        *shared, _ = self.prompt(context)
        await self.stream([*shared, *self.prompt(1)], 1)
        tasks = [
            asyncio.create_task(self.stream([*shared, *self.prompt(1)], tokens, into=stream))
            for stream in streams
        ]
        try:
            yield streams
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            # A stream's own error is more useful than the error that it was too short.
            for error in ended:
                if isinstance(error, MeasureError):
                    raise error
            await asyncio.sleep(SETTLE_S)

    async def stream(
        self,
        prompt: Sequence[int] | Sequence[Sequence[int]],
        tokens: int,
        *,
        into: TimedStream | None = None,
        after_s: float = 0.0,
    ) -> TimedStream:
        stream = into or TimedStream(0)
        if after_s:
            await asyncio.sleep(after_s)
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": STREAM_OPTIONS,
        }  # fmt: skip
        try:
            await self._wire.stream(COMPLETIONS, json.dumps(body).encode(), stream.feed, TIMEOUT_S)
        except WireError as error:
            raise self._failed("", error) from None
        finally:
            stream.end()
        if not stream.ticks:
            raise MeasureError(f"{self._wire.address} returned no token")
        return stream

    def prompt(self, tokens: int) -> list[int]:
        return self._rng.choices(TOKEN_IDS, k=tokens)

    async def _get(self, path: str) -> bytes:
        try:
            return await self._wire.get(path, TIMEOUT_S)
        except WireError as error:
            raise self._failed(path, error) from None

    def _failed(self, path: str, error: WireError) -> MeasureError:
        address = self._wire.address
        return MeasureError(f"{address}{path}: {str(error).removeprefix(f'{address}: ')}")


@contextmanager
def wire_to(url: str) -> Iterator[Wire]:
    """Yield connections to a worker; the process has priority on this machine."""
    key = os.environ.get("VLLM_API_KEY", "")
    wire = Wire(Address.parse(url), {"Authorization": f"Bearer {key}"} if key else {})
    with realtime_priority(), closing(wire):
        yield wire

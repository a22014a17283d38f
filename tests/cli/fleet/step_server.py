"""A fake worker that batches, sleeps for the modelled step time, and streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.bench.fake_openai import hosting
from vllm_sched.cost.step_time import StepShape, StepTime


@dataclass(eq=False)
class RunningPrompt:
    index: int
    context: int
    left: int
    out: asyncio.Queue[tuple[int, int] | None]
    made: int = 0
    computed: int = 0  # tokens of the prompt


@dataclass
class StepServer:
    """Serves `/v1/models` and `/v1/completions`; faults are set beforehand."""

    time: StepTime
    max_model_len: int = 4096
    budget: int = 2048
    metrics: str | None = None
    card: dict[str, Any] | str | None = None  # text: a page of another service
    status: int = 200
    ends_after: int | None = None  # output tokens, regardless of max_tokens
    hangs_after: int | None = None  # completions
    _waiting: list[RunningPrompt] = field(default_factory=list)
    _running: list[RunningPrompt] = field(default_factory=list)

    async def models(self, _: web.Request) -> web.Response:
        """Return the model list."""
        if isinstance(self.card, str):
            return web.Response(text=self.card, content_type="text/html")
        card = {"id": "fake", "max_model_len": self.max_model_len}
        return web.json_response({"data": [card if self.card is None else self.card]})

    async def page(self, _: web.Request) -> web.Response:
        """Return the metrics page, or 404."""
        return web.Response(text=self.metrics or "", status=404 if self.metrics is None else 200)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Stream the answers of one or several prompts."""
        body = await request.json()
        if self.status != 200:
            return web.json_response({"error": "no\nway"}, status=self.status)
        if self.hangs_after is not None:
            self.hangs_after -= 1
            if self.hangs_after < 0:
                await asyncio.Event().wait()
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        tokens = body["max_tokens"] if self.ends_after is None else self.ends_after
        out: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()
        streams = [RunningPrompt(n, len(prompt), tokens, out) for n, prompt in enumerate(prompts)]
        answer = web.StreamResponse()
        await answer.prepare(request)
        self._waiting += streams
        try:
            going = len(streams)
            while going:
                made = await out.get()
                if made is None:
                    going -= 1
                    continue
                event = {
                    "choices": [{"index": made[0], "text": "x"}],
                    "usage": {"completion_tokens": made[1]},
                }
                text = json.dumps(event, separators=(",", ":"))
                await answer.write(f"data: {text}\n\n".encode())
        finally:
            for running in streams:
                running.left = 0
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def steps(self) -> None:
        """Run steps until the server hangs."""
        while self.hangs_after is None or self.hangs_after >= 0:
            self._running, self._waiting = [*self._running, *self._waiting], []
            self._running = [prompt for prompt in self._running if prompt.left > 0]
            decoding = [prompt for prompt in self._running if prompt.made]
            left, tokens, pairs = self.budget - len(decoding), 0, 0.0
            stepped = list(decoding)
            for prompt in self._running:
                chunk = 0 if prompt.made else min(prompt.context - prompt.computed, left)
                tokens, left = tokens + chunk, left - chunk
                pairs += chunk * (prompt.computed + chunk / 2)
                prompt.computed += chunk
                if chunk and prompt.computed == prompt.context:
                    stepped.append(prompt)
            shape = StepShape(
                tokens, pairs, len(decoding), sum(prompt.context for prompt in decoding)
            )
            await asyncio.sleep(self.time.seconds(shape) or 0.001)
            for prompt in stepped:
                prompt.left -= 1
                prompt.made += 1
                prompt.context += 1
                prompt.out.put_nowait((prompt.index, prompt.made))
                if prompt.left <= 0:
                    prompt.out.put_nowait(None)


@asynccontextmanager
async def served(server: StepServer) -> AsyncIterator[str]:
    """Serve in the running loop; yield the URL."""
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/metrics", server.page)
    app.router.add_post("/v1/completions", server.completions)
    async with hosting(app) as url:
        stepping = asyncio.create_task(server.steps())
        try:
            yield url
        finally:
            stepping.cancel()

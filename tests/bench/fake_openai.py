"""A fake OpenAI endpoint with configurable latencies and faults."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

TOKENS_PER_WORD = 2
TEMPLATE_TOKENS = 5


@dataclass
class FakeOpenAI:
    """The endpoint's settings and the requests that it received."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokenizer: bool = True
    lists_models: bool = True
    without_list: int = 404  # status of /v1/models without a list
    knows_ignore_eos: bool = True
    tells_usage: bool = True
    counts: int | None = None  # token count of every prompt
    message_tokens: int = 0  # added by the template to each message
    longest_answer: int = 1_000_000
    cached_tokens: int | None = None  # reported for every prompt
    paths: tuple[str, ...] = ("/v1/completions", "/v1/chat/completions")
    max_model_len: int | None = 4096
    key: str = ""
    workers: tuple[str, ...] = ()  # named in X-Route if X-Explain is sent
    failing: tuple[int, ...] = ()  # numbers of the refused completions
    retry_after: str = ""  # header of the refusals
    hangs: bool = False
    streams: bool = True
    slots: int = 1000  # concurrent requests
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        """Free all slots."""
        self.free = asyncio.Semaphore(self.slots)

    @property
    def played(self) -> list[dict[str, Any]]:
        return [body for body in self.bodies if _length(body) > 1]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        if self.tokenizer:
            app.router.add_post("/tokenize", self._tokenize)
        for path in self.paths:
            app.router.add_post(path, self._complete)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        if not self.lists_models:
            return web.Response(status=self.without_list)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        served = [{"id": name, "max_model_len": self.max_model_len} for name in ("fake", "other")]
        return web.json_response({"data": served})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"count": self._count(await request.json())})

    def _count(self, body: dict[str, Any]) -> int:
        template = self.message_tokens * len(body.get("messages", ()))
        return tokens(body) + template if self.counts is None else self.counts

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if not self.knows_ignore_eos and "ignore_eos" in body:
            return web.json_response({"error": "Unrecognized: ignore_eos"}, status=400)
        if _length(body) > 1 and len(self.played) in self.failing:
            headers = {"Retry-After": self.retry_after} if self.retry_after else None
            content = {"error": {"message": "no\nroom"}}
            return web.json_response(content, status=503, headers=headers)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            async with self.free:
                return await self._streamed(request, body)
        finally:
            self.under_way -= 1

    async def _streamed(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not self.streams:
            return web.json_response({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 2}})
        chat = "messages" in body
        headers = {"Content-Type": "text/event-stream"}
        if self.workers and "X-Explain" in request.headers:
            name = self.workers[len(self.bodies) % len(self.workers)]
            headers["X-Route"] = f"{name}; reason=least; {name}=0.1 (busy)"
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        if _length(body) > 1:
            self.begun.set()
            if self.hangs:
                await asyncio.Event().wait()
        await asyncio.sleep(self.ttft_s)
        if chat:
            await response.write(event({"delta": {"role": "assistant", "content": ""}}))
        wanted = min(_length(body), self.longest_answer)
        for number in range(wanted):
            if number:
                await asyncio.sleep(self.itl_s)
            piece = {"delta": {"content": " a"}} if chat else {"text": " a"}
            await response.write(event(piece))
        if chat:
            await response.write(event({"delta": {}, "finish_reason": "length"}))
        usage: dict[str, Any] = {"prompt_tokens": self._count(body), "completion_tokens": wanted}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if self.tells_usage:
            await response.write(b"data: " + dumped({"choices": [], "usage": usage}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def hosting(app: web.Application, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve on a free port; yield the URL."""
    server = TestServer(app)
    await server.start_server(ssl=tls)
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


@asynccontextmanager
async def serving(fake: FakeOpenAI, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeOpenAI]:
    async with hosting(fake.app(), tls) as fake.url:
        yield fake


def tokens(body: dict[str, Any]) -> int:
    """Return the tokens of a prompt, or of a chat with its template."""
    if "messages" in body:
        words = sum(len(message["content"].split()) for message in body["messages"])
        return TEMPLATE_TOKENS + TOKENS_PER_WORD * words
    prompt = body["prompt"]
    return TOKENS_PER_WORD * len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def event(choice: dict[str, Any]) -> bytes:
    return b"data: " + dumped({"choices": [{"index": 0, **choice}], "usage": None}) + b"\n\n"


def dumped(message: dict[str, Any]) -> bytes:
    """Return JSON without spaces, as vLLM writes it."""
    return json.dumps(message, separators=(",", ":")).encode()


def _length(body: dict[str, Any]) -> int:
    return int(body.get("max_tokens") or body["max_completion_tokens"])

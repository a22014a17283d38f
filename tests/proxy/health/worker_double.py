"""A scripted worker for probes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from tests.proxy.health.vllm_page import STARTED, Engine, vllm_page


class WorkerDouble:
    """A worker whose responses may change at any time."""

    def __init__(self) -> None:
        self.url = ""
        self.health = 200
        self.metrics: bytes = vllm_page(Engine(running=2, prompt_tokens=100))
        self.models: object = models(("tiny", 4096))
        self.models_status = 200
        self.hangs = False
        self.endless = False  # an endless metrics page
        self.redirects: dict[str, str] = {}  # locations by path
        self.seen: list[tuple[str, str | None]] = []  # path and Authorization
        self.peers: set[object] = set()  # client addresses
        self._probed = asyncio.Condition()
        self._closing = asyncio.Event()

    def restart(self, *cards: tuple[str, int | None]) -> None:
        """Restart with other models."""
        self.metrics = vllm_page(Engine(), started=STARTED + 60)
        self.models = models(*cards)

    def count(self, path: str) -> int:
        """Return the number of requests for a path."""
        return sum(seen == path for seen, _ in self.seen)

    async def probed(self, times: int) -> None:
        """Wait for this number of requests for /health."""
        async with self._probed:
            await self._probed.wait_for(lambda: self.count("/health") >= times)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer any request."""
        self.seen.append((request.path, request.headers.get("Authorization")))
        if request.transport is not None:
            self.peers.add(request.transport.get_extra_info("peername"))
        async with self._probed:
            self._probed.notify_all()
        if self.hangs:
            await self._closing.wait()
        if (elsewhere := self.redirects.get(request.path)) is not None:
            return web.Response(status=307, headers={"Location": elsewhere})
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path == "/metrics":
            if self.endless:
                return await self._drip(request)
            return web.Response(body=self.metrics)
        if isinstance(self.models, bytes):
            return web.Response(status=self.models_status, body=self.models)
        return web.json_response(self.models, status=self.models_status)

    async def _drip(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while not self._closing.is_set():
            await answer.write(b"x" * 65_536)
        return answer

    def close(self) -> None:
        """End hanging responses."""
        self._closing.set()


def models(*cards: tuple[str, int | None]) -> dict[str, object]:
    """Return a model list as vLLM writes it."""
    return {"object": "list", "data": [{"id": n, "max_model_len": length} for n, length in cards]}


@asynccontextmanager
async def worker_double() -> AsyncIterator[WorkerDouble]:
    """Serve a worker on a free port."""
    double = WorkerDouble()
    app = web.Application()
    app.router.add_get("/{path:.*}", double.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    double.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield double
    finally:
        double.close()
        await runner.cleanup()

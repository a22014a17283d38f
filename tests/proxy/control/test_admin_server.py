"""The admin API on a real port."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest
from fastapi import FastAPI

from proxy.control.admin_server import AdminServer, admin_socket

DEADLINE_S = 10.0


async def test_it_serves_until_stopped_and_leaves_signals_alone() -> None:
    app = FastAPI()

    @app.get("/hello")
    async def hello() -> str:
        return "hello"

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    server = AdminServer(app, await admin_socket("127.0.0.1", 0))
    task = asyncio.create_task(server.run())
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{server.port}/hello")
        assert answer.json() == "hello"
        now = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert now == handlers
        server.stop()
        await task


async def test_a_port_in_use_is_an_error_at_once() -> None:
    first = AdminServer(FastAPI(), await admin_socket("127.0.0.1", 0))
    with pytest.raises(OSError, match="in use"):
        await admin_socket("127.0.0.1", first.port)
    first.stop()

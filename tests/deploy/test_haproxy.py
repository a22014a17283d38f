"""HAProxy with the configuration of deploy/compose, in front of two small servers."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.haproxy import CONFIG, HAProxy
from tests.programs import fetched
from vllm_sched.workers.launch import free_port

DEADLINE_S = 60.0
HEADER = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Router:
    """A server with `/ready`, and streams that a test writes."""

    def __init__(self) -> None:
        self._ready = True
        self._writers: list[asyncio.StreamWriter] = []
        self._checks: asyncio.Queue[bool] = asyncio.Queue()
        self.streams: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.Queue()
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a check, or leave the connection to the test."""
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"GET /ready "):
            self.streams.put_nowait((reader, writer))
            self._writers.append(writer)
            return
        self._checks.put_nowait(self._ready)
        status = b"200 OK" if self._ready else b"503 Service Unavailable"
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
        writer.close()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    async def become(self, *, ready: bool) -> None:
        """Change, and wait until HAProxy has seen it: before the third check of the new state."""
        self._ready = ready
        seen = 0
        while seen < 3:
            seen += await self._checks.get() is ready


class Balancer:
    def __init__(self, port: int, routers: tuple[Router, Router]) -> None:
        self.routers = routers
        self._port = port

    async def request(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        return reader, writer


@asynccontextmanager
async def balancer(folder: Path) -> AsyncIterator[Balancer]:
    routers, ports = (Router(), Router()), (free_port(), free_port())
    async with AsyncExitStack() as stack:
        for router, port in zip(routers, ports, strict=True):
            server = await asyncio.start_server(router.serve, "127.0.0.1", port)
            stack.callback(server.close)
            stack.callback(router.close)
        front = await asyncio.to_thread(HAProxy, folder, ports)
        stack.callback(front.close)
        for router in routers:
            await asyncio.wait_for(router.become(ready=True), DEADLINE_S)
        yield Balancer(front.port, routers)


def test_haproxy_accepts_the_configuration(tmp_path: Path) -> None:
    names = tmp_path / "haproxy.cfg"
    names.write_text(re.sub(r" router(-2)?:8000", " 127.0.0.1:8000", CONFIG.read_text()))
    done = subprocess.run([fetched("haproxy"), "-c", "-f", names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


async def test_stream_passes_by_the_piece_and_outlives_readiness(tmp_path: Path) -> None:
    async with balancer(tmp_path) as front, asyncio.timeout(DEADLINE_S):
        first, second = front.routers
        await second.become(ready=False)
        client, writer = await front.request()
        _, server = await first.streams.get()
        server.write(HEADER + b"5\r\npiece\r\n")
        assert b"piece" in await client.readuntil(b"piece")
        await second.become(ready=True)
        await first.become(ready=False)
        server.write(b"4\r\nlast\r\n0\r\n\r\n")
        assert b"last" in await client.readuntil(b"0\r\n\r\n")
        _, other = await front.request()
        await second.streams.get()  # new requests go to the ready one
        assert first.streams.empty()
        writer.close()
        other.close()


@pytest.mark.parametrize("begun", [False, True])
async def test_client_that_leaves_ends_its_request(tmp_path: Path, *, begun: bool) -> None:
    async with balancer(tmp_path) as front, asyncio.timeout(DEADLINE_S):
        await front.routers[1].become(ready=False)
        client, writer = await front.request()
        reader, server = await front.routers[0].streams.get()
        if begun:
            server.write(HEADER + b"5\r\npiece\r\n")
            await client.readuntil(b"piece")
        writer.close()
        with suppress(ConnectionResetError):
            assert await reader.read() == b""


async def test_error_without_a_ready_router_is_json(tmp_path: Path) -> None:
    async with balancer(tmp_path) as front, asyncio.timeout(DEADLINE_S):
        for router in front.routers:
            await router.become(ready=False)
        client, writer = await front.request()
        answer = await client.readuntil(b"}}")
        writer.close()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer.lower()
        assert b'"code": "no_router"' in answer

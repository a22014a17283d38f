"""HAProxy with the configuration of deploy/compose, in front of two small servers."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.deploy.test_compose import COMPOSE
from tests.programs import fetched

CONFIG = COMPOSE / "replicas" / "haproxy.cfg"
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
        """End all streams."""
        for writer in self._writers:
            writer.close()

    async def become(self, *, ready: bool) -> None:
        """Change, and wait until HAProxy has seen it: before the third check of the new state."""
        self._ready = ready
        seen = 0
        while seen < 3:
            seen += await self._checks.get() is ready


class Balancer:
    """HAProxy and its routers."""

    def __init__(self, port: int) -> None:
        self.routers = Router(), Router()
        self._port = port

    async def request(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        return reader, writer


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]


@asynccontextmanager
async def balancer(folder: Path) -> AsyncIterator[Balancer]:
    """Start HAProxy in front of two routers."""
    api, health, *behind = free_ports(4)
    text = CONFIG.read_text()
    ports = [
        ("bind :8000", f"bind 127.0.0.1:{api}"),
        ("127.0.0.1:8001", f"127.0.0.1:{health}"),
        (" router:8000", f" 127.0.0.1:{behind[0]}"),
        (" router-2:8000", f" 127.0.0.1:{behind[1]}"),
    ]
    for given, wanted in (*ports, ("inter 1s", "inter 50ms"), ("maxconn 20000", "maxconn 100")):
        assert given in text
        text = text.replace(given, wanted)
    file = folder / "haproxy.cfg"
    file.write_text(text)
    made = Balancer(api)
    async with AsyncExitStack() as stack:
        for router, port in zip(made.routers, behind, strict=True):
            server = await asyncio.start_server(router.serve, "127.0.0.1", port)
            stack.callback(server.close)
            stack.callback(router.close)
        process = await asyncio.create_subprocess_exec(fetched("haproxy"), "-f", str(file))
        try:
            for router in made.routers:
                await asyncio.wait_for(router.become(ready=True), DEADLINE_S)
            yield made
        finally:
            process.kill()
            await process.wait()


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

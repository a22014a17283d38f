"""The admin API on a real port."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, StreamingResponse

from proxy.admin import connection as admin_connection
from proxy.admin import server
from proxy.admin.body_limit import MAX_BODY_BYTES, BodyLimit
from proxy.admin.server import AdminServer, admin_socket, max_connections
from proxy.net.tls import ServedContext
from tests.proxy.certificates import Authority
from tests.proxy.wire.raw_client import Client, get
from tests.proxy.wire.site import eventually

DEADLINE_S = 10.0
HALF = b"GET /hello HTTP/1.1\r\nHost: localhost\r\nX-Half: "
MOST = 6


ON = ("asyncio", "uvloop")


class Served:
    """A server, and what its application was given."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.add_middleware(BodyLimit)
        self.bodies: list[int] = []
        self.streams = 0
        self.server: AdminServer

        @self.app.get("/hello")
        async def hello() -> str:
            return "hello"

        @self.app.post("/take")
        async def take(request: Request) -> int:
            self.bodies.append(len(await request.body()))
            return self.bodies[-1]

        @self.app.get("/endless")
        async def endless(size: int) -> StreamingResponse:
            async def pieces() -> AsyncIterator[bytes]:
                self.streams += 1
                try:
                    while True:
                        yield b"x" * size
                        await asyncio.sleep(0.01)
                finally:
                    self.streams -= 1

            return StreamingResponse(pieces())

    async def connect(self, **options: Any) -> Client:
        """Open a connection."""
        return await Client.connect(self.server.port, **options)

    async def answers(self) -> bool:
        """Whether a new connection is served now."""
        client = await self.connect()
        try:
            return (await client.ask(get("/hello"))).status == 200
        finally:
            client.close()


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Served]:
    """Serve for a while."""
    served = Served()
    served.server = AdminServer(served.app, await admin_socket("127.0.0.1", 0), tls=tls)
    task = asyncio.create_task(served.server.run())
    async with asyncio.timeout(3 * DEADLINE_S):
        yield served
        served.server.stop()
        await task


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """Serve `MOST` connections at most."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", MOST)
    async with serving() as one:
        yield one


async def test_it_serves_until_stopped_and_leaves_signals_alone() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with serving() as served, httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{served.server.port}/hello")
        assert answer.json() == "hello"
        now = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert now == handlers


async def test_a_port_in_use_is_an_error_at_once() -> None:
    first = AdminServer(FastAPI(), await admin_socket("127.0.0.1", 0))
    with pytest.raises(OSError, match="in use"):
        await admin_socket("127.0.0.1", first.port)
    first.stop()


async def test_it_can_be_stopped_with_connections_open(served: Served) -> None:
    async with AsyncExitStack() as stack:
        for data in (b"", HALF, get("/endless?size=1")):
            client = await served.connect()
            stack.callback(client.close)
            await client.send(data)
        await eventually(lambda: served.streams == 1 and served.server.connections == 3)


# Bounds


async def test_half_sent_heads_beyond_the_bound_give_way_to_requests(served: Served) -> None:
    """The oldest of them is closed at once, and the new connection is served."""
    with ExitStack() as stack:
        half = []
        for _ in range(10 * MOST):
            client = await served.connect()
            stack.callback(client.close)
            await client.send(HALF)
            half.append(client)
        await eventually(lambda: served.server.connections == MOST)
        for client in half[: 9 * MOST]:
            assert await client.closed() == b""
        assert await served.answers()
        assert served.server.connections <= MOST


async def test_so_do_half_sent_bodies_and_connections_without_a_byte(served: Served) -> None:
    with ExitStack() as stack:
        for number in range(10 * MOST):
            client = await served.connect()
            stack.callback(client.close)
            head = b"POST /take HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx"
            await client.send(head if number % 2 else b"")
        await eventually(lambda: served.server.connections == MOST)
        assert await served.answers()
    assert served.bodies == []


async def test_requests_that_are_answered_give_way_to_none(served: Served) -> None:
    with ExitStack() as stack:
        streams = []
        for _ in range(MOST):
            client = await served.connect()
            stack.callback(client.close)
            await client.send(get("/endless?size=1"))
            streams.append(client)
        await eventually(lambda: served.streams == MOST)
        late = await served.connect()
        stack.callback(late.close)
        assert await late.closed() == b""
        for client in streams:
            assert (await client.head()).status == 200
            assert await client.piece() == b"x"
        streams[0].close()
        await eventually(lambda: served.server.connections < MOST)
        assert await served.answers()


@pytest.mark.parametrize(
    ("files", "most"), [(64, 8), (20, 4), (1 << 20, 64), (resource.RLIM_INFINITY, 64)]
)
def test_the_bound_and_open_files(monkeypatch: pytest.MonkeyPatch, files: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert max_connections() == most


# Deadlines


@dataclass
class Timer:
    """A deadline of a connection."""

    passes: Callable[[], object]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """The deadlines of connections, which pass when the test says so."""

    def __init__(self) -> None:
        self._all: list[Timer] = []

    @property
    def running(self) -> list[Timer]:
        """Those that have neither passed nor been cancelled."""
        return [each for each in self._all if not each.cancelled]

    def call_later(self, passes: Callable[[], object]) -> Timer:
        """Note one more."""
        self._all.append(Timer(passes))
        return self._all[-1]

    def expire(self) -> None:
        """Let all of them pass."""
        for each in self.running:
            each.cancel()
            each.passes()


class TimedLoop:
    """A loop whose calls after `TIMEOUT_S` are for the test to make."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timers: Timers) -> None:
        self._loop, self._timers = loop, timers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay: float, callback: Any, *args: Any) -> Any:
        if delay == admin_connection.TIMEOUT_S:
            return self._timers.call_later(callback)
        return self._loop.call_later(delay, callback, *args)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    """Have no deadline pass by itself."""
    found, made = Timers(), admin_connection.AdminConnection.__init__

    def make(connection: Any, *args: Any) -> None:
        made(connection, *args)
        connection.loop = TimedLoop(connection.loop, found)

    monkeypatch.setattr(admin_connection.AdminConnection, "__init__", make)
    return found


@pytest.mark.parametrize(
    "data",
    [
        b"",
        HALF,
        get("/hello"),
        get("/hello") + HALF,
        b"POST /take HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx",
        b"POST /take HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n",
    ],
    ids=["nothing", "half a head", "idle", "half a second head", "half a body", "half of chunks"],
)
async def test_half_requests_have_a_deadline(timers: Timers, served: Served, data: bytes) -> None:
    client = await served.connect()
    await client.send(data)
    if data.startswith(get("/hello")):
        assert (await client.answer()).status == 200
    await eventually(lambda: timers.running)
    [due] = timers.running
    if data.endswith(HALF):  # bytes that trickle in win no time
        for _ in range(3):
            await client.send(b"x")
            await asyncio.sleep(0.01)
    assert timers.running == [due]
    timers.expire()
    assert await client.closed() == b""
    await eventually(lambda: served.server.connections == 0)
    client.close()


async def test_a_stream_that_is_read_has_no_end(timers: Timers, served: Served) -> None:
    client = await served.connect()
    await client.send(get("/endless?size=1"))
    await client.head()
    for _ in range(3):
        assert await client.piece() == b"x"
        assert timers.running == []
    client.close()


async def test_a_client_that_takes_nothing_is_given_up(timers: Timers, served: Served) -> None:
    client = await served.connect(rcvbuf=4096, limit=4096)
    await client.send(get("/endless?size=1000000"))
    await eventually(lambda: served.streams == 1)
    await eventually(lambda: timers.running)
    timers.expire()
    await eventually(lambda: served.server.connections == 0 and served.streams == 0)
    client.close()


async def test_a_client_that_takes_it_late_is_served(timers: Timers, served: Served) -> None:
    client = await served.connect(rcvbuf=4096, limit=4096)
    await client.send(get("/endless?size=1000000"))
    await eventually(lambda: timers.running)
    [due] = timers.running
    client.read_on()
    reading = asyncio.create_task(client.reader.read(-1))
    await eventually(lambda: due.cancelled)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    client.close()


async def test_a_head_without_end_is_refused(served: Served) -> None:
    client = await served.connect()
    await client.send(HALF + b"x" * (server.MAX_HEAD_BYTES + 1))
    assert (await client.closed()).startswith(b"HTTP/1.1 400 ")
    client.close()


# Bodies


POST = b"POST /take HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def chunked(total: int) -> bytes:
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    return piece * (total // 0x10000)


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_of_a_body_that_is_too_large_no_more_is_read(served: Served, framing: str) -> None:
    client = await served.connect()
    if framing == "length":
        await client.send(POST + b"Content-Length: %d\r\n\r\n" % (400 << 20))
    else:
        await client.send(CHUNKED + chunked(2 * MAX_BODY_BYTES))
    answer = await client.answer()
    assert answer.status == 413
    error = answer.json()["error"]
    assert error["code"] == "too_large"
    assert str(MAX_BODY_BYTES) in error["message"]
    assert served.bodies == []
    client.close()


async def test_the_largest_body_passes_whole(served: Served) -> None:
    client = await served.connect()
    body = b"x" * MAX_BODY_BYTES
    head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    assert (await client.ask(head + body)).json() == len(body)
    whole = CHUNKED + chunked(len(body)) + b"0\r\n\r\n"
    assert (await client.ask(whole)).json() == len(body)
    client.close()


async def test_how_much_of_a_body_is_held() -> None:
    """The pieces after the one that is too much are not asked for."""
    asked = 0

    async def receive() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": b"x" * 65_536, "more_body": True}

    said: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        said.append(message)

    scope = {"type": "http", "headers": []}
    await BodyLimit(PlainTextResponse("passed on"))(scope, receive, send)  # type: ignore[arg-type]
    assert said[0]["status"] == 413
    assert asked == MAX_BODY_BYTES // 65_536 + 1


# TLS


async def test_tls_handshakes_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", MOST)
    authority = Authority(tmp_path)
    context = ssl.create_default_context(cafile=authority.ca_file)
    async with serving(ServedContext(authority.port("admin")).context) as served:
        with ExitStack() as stack:
            silent = []
            for number in range(10 * MOST):
                client = await served.connect()
                stack.callback(client.close)
                await client.send(b"\x16\x03\x01" if number % 2 else b"")  # half of a first record
                silent.append(client)
            await eventually(lambda: served.server.connections == MOST)
            for client in silent[: 9 * MOST]:
                assert await client.closed() == b""
            known = await served.connect(tls=context)
            stack.callback(known.close)
            assert (await known.ask(get("/hello"))).status == 200
            assert served.server.connections <= MOST


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_tls_handshake_has_a_deadline(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "TIMEOUT_S", 0.2)
    async with serving(ServedContext(Authority(tmp_path).port("admin")).context) as served:
        client = await served.connect()
        await client.send(data)
        await client.closed()
        await eventually(lambda: served.server.connections == 0)
        client.close()


# Open files


@contextmanager
def no_more_files(spare: int = 0) -> Any:
    """Let this process open so many further files or sockets."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = socket.socket()
    first = held.fileno()
    held.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_it_serves_once_files_are_free(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "NO_FILES_PAUSE_S", 0.05)
    raw = socket.socket()
    raw.setblocking(False)
    with no_more_files():
        with suppress(BlockingIOError):
            raw.connect(("127.0.0.1", served.server.port))
        await asyncio.sleep(0.2)
        assert served.server.connections == 0
    client = Client(*await asyncio.open_connection(sock=raw))
    assert (await client.ask(get("/hello"))).status == 200
    client.close()

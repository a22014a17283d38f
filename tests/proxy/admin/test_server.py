"""The admin API on a real port."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, StreamingResponse

from proxy.admin import connection as admin_connection
from proxy.admin import port, server
from proxy.admin.body_limit import MAX_BODY_BYTES, BodyLimit
from proxy.admin.port import AdminPort, admin_socket
from proxy.admin.server import AdminServer, max_connections
from proxy.net.tls import ServedContext
from tests.proxy.certificates import Authority
from tests.proxy.wire.raw_client import Client, get
from tests.proxy.wire.site import eventually

DEADLINE_S = 60.0
HALF_HEAD = b"GET /hello HTTP/1.1\r\nHost: localhost\r\nX-Half: "
POST = b"POST /take HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HALF_BODY = POST + b"Content-Length: 9\r\n\r\nx"
MAX_CONNECTIONS = 6
EVENT_LOOPS = ("uvloop",)  # as the router


class Served:
    """A server, and the bodies that its application received."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.add_middleware(BodyLimit)
        self.bodies: list[int] = []
        self.streams = 0
        self.clients: list[Client] = []
        self.server: AdminServer
        self.port: int

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

    async def send(self, data: bytes, **options: Any) -> Client:
        """Send bytes on a new connection, which stays open until the server has stopped."""
        client = await Client.connect(self.port, **options)
        self.clients.append(client)
        await client.send(data)
        return client

    async def is_serving(self) -> bool:
        client = await self.send(get("/hello"))
        return (await client.answer()).status == 200


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Served]:
    served = Served()
    sock = await admin_socket("127.0.0.1", 0)
    served.port = sock.getsockname()[1]
    served.server = AdminServer(served.app, sock, tls=tls)
    task = asyncio.create_task(served.server.run())
    async with asyncio.timeout(3 * DEADLINE_S):
        try:
            yield served
        finally:
            served.server.stop()
            await task
            for client in served.clients:
                client.close()


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """Serve with a limit of `MAX_CONNECTIONS`."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", MAX_CONNECTIONS)
    async with serving() as started:
        yield started


async def test_server_does_not_change_signal_handlers() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with serving() as served:
        assert await served.is_serving()
        now = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert now == handlers


async def test_port_in_use_raises_at_once() -> None:
    with await admin_socket("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        await admin_socket("127.0.0.1", first.getsockname()[1])


class Made:
    """A port, and the server that a connection makes; it waits for `may_be_made`."""

    def __init__(self, sock: socket.socket, error: type[Exception] | None = None) -> None:
        self.app, self.error = Served().app, error
        self.asked, self.may_be_made = threading.Event(), threading.Event()
        self.port = AdminPort(sock, self.make)

    def make(self, sock: socket.socket) -> AdminServer:
        self.asked.set()
        assert self.may_be_made.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        return AdminServer(self.app, sock)


@pytest.mark.parametrize("stopped", ["before run", "without a client", "while made", "served"])
async def test_server_is_made_for_the_first_client_unless_the_port_stops(stopped: str) -> None:
    made = Made(await admin_socket("127.0.0.1", 0))
    number = made.port.port
    if stopped == "before run":
        made.port.stop()
    running = asyncio.create_task(made.port.run())
    if stopped in ("while made", "served"):
        await asyncio.sleep(0)
        assert not made.asked.is_set()
        client = await Client.connect(number)
        await asyncio.to_thread(made.asked.wait, DEADLINE_S)
        if stopped == "served":
            made.may_be_made.set()
            assert (await client.ask(get("/hello"))).status == 200
        client.close()
    elif stopped == "without a client":
        await asyncio.sleep(0)
    made.port.stop()
    made.port.stop()  # has no effect
    made.may_be_made.set()
    await asyncio.wait_for(running, DEADLINE_S)
    assert made.asked.is_set() == (stopped in ("while made", "served"))
    (await admin_socket("127.0.0.1", number)).close()


@pytest.mark.parametrize("error", [OSError, ImportError])
async def test_port_tries_again_after_a_failed_import(
    error: type[Exception], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "RETRY_INTERVAL_S", 0.01)
    made = Made(await admin_socket("127.0.0.1", 0), error)
    made.may_be_made.set()
    running = asyncio.create_task(made.port.run())
    client = await Client.connect(made.port.port)
    assert await client.closed() == b""
    client.close()
    assert f"the admin API cannot be loaded: {error.__name__}()" in caplog.text
    made.error = None
    client = await Client.connect(made.port.port)
    assert (await client.ask(get("/hello"))).status == 200
    client.close()
    made.port.stop()
    await asyncio.wait_for(running, DEADLINE_S)


async def test_port_tries_again_without_open_files_and_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Made(await admin_socket("127.0.0.1", 0), OSError)
    made.may_be_made.set()
    running = asyncio.create_task(made.port.run())
    raw = socket.socket()
    raw.setblocking(False)
    with raw, limit_descriptors():
        with suppress(BlockingIOError):
            raw.connect(("127.0.0.1", made.port.port))
        await eventually(lambda: caplog.text)
        made.port.stop()
        await asyncio.wait_for(running, DEADLINE_S)


async def test_server_stops_with_open_connections(served: Served) -> None:
    for data in (b"", HALF_HEAD, get("/endless?size=1")):
        await served.send(data)
    await eventually(lambda: served.streams == 1 and served.server.connections == 3)


# Limit of connections


async def test_oldest_incomplete_request_gives_way_to_a_new_connection(served: Served) -> None:
    for data in (b"", HALF_HEAD, HALF_BODY) * 4 * MAX_CONNECTIONS:
        await served.send(data)
    await eventually(lambda: served.server.connections == MAX_CONNECTIONS)
    for client in served.clients[:-MAX_CONNECTIONS]:
        assert await client.closed() == b""
    assert await served.is_serving()
    assert served.server.connections <= MAX_CONNECTIONS
    assert served.bodies == []


async def test_running_requests_do_not_give_way(served: Served) -> None:
    streams = [await served.send(get("/endless?size=1")) for _ in range(MAX_CONNECTIONS)]
    await eventually(lambda: served.streams == MAX_CONNECTIONS)
    late = await served.send(b"")
    assert await late.closed() == b""
    for client in streams:
        assert (await client.head()).status == 200
        assert await client.piece() == b"x"
    streams[0].close()
    await eventually(lambda: served.server.connections < MAX_CONNECTIONS)
    assert await served.is_serving()


@pytest.mark.parametrize(
    ("files", "expected"), [(64, 8), (20, 4), (1 << 20, 64), (resource.RLIM_INFINITY, 64)]
)
def test_connection_limit_depends_on_the_file_limit(
    monkeypatch: pytest.MonkeyPatch, files: int, expected: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert max_connections() == expected


# Deadlines


@dataclass
class Timer:
    """A timeout of a connection, which expires on request."""

    callback: Callable[[], object]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def expire(self) -> None:
        self.cancel()
        self.callback()


class Timers(list[Timer]):
    """All timeouts of connections."""

    @property
    def running(self) -> list[Timer]:
        """Timers that have neither expired nor been cancelled."""
        return [timer for timer in self if not timer.cancelled]


class TimedLoop:
    """A loop whose calls after `TIMEOUT_S` go to `Timers`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timers: Timers) -> None:
        self._loop, self._timers = loop, timers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay: float, callback: Any, *args: Any) -> Any:
        if delay == admin_connection.TIMEOUT_S:
            self._timers.append(Timer(callback))
            return self._timers[-1]
        return self._loop.call_later(delay, callback, *args)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    timers, original = Timers(), admin_connection.AdminConnection.__init__

    def make(connection: Any, *args: Any) -> None:
        original(connection, *args)
        connection.loop = TimedLoop(connection.loop, timers)

    monkeypatch.setattr(admin_connection.AdminConnection, "__init__", make)
    return timers


@pytest.mark.parametrize(
    "data",
    [b"", HALF_HEAD, get("/hello"), get("/hello") + HALF_HEAD, HALF_BODY, CHUNKED + b"1\r\nx\r\n"],
    ids=["nothing", "half a head", "idle", "half a second head", "half a body", "half of chunks"],
)
async def test_incomplete_requests_time_out(timers: Timers, served: Served, data: bytes) -> None:
    client = await served.send(data)
    if data.startswith(get("/hello")):
        assert (await client.answer()).status == 200
    await eventually(lambda: timers.running)
    [timer] = timers.running
    if data.endswith(HALF_HEAD):  # further bytes do not extend the timeout
        for _ in range(3):
            await client.send(b"x")
            await asyncio.sleep(0.01)
    assert timers.running == [timer]
    timer.expire()
    assert await client.closed() == b""
    await eventually(lambda: served.server.connections == 0)


async def test_stream_that_is_read_has_no_timeout(timers: Timers, served: Served) -> None:
    client = await served.send(get("/endless?size=1"))
    await client.head()
    for _ in range(3):
        assert await client.piece() == b"x"
        assert timers.running == []


async def test_client_that_does_not_read_times_out(timers: Timers, served: Served) -> None:
    endless, small = get("/endless?size=1000000"), {"rcvbuf": 4096, "limit": 4096}
    reads, _ = [await served.send(endless, **small) for _ in range(2)]
    await eventually(lambda: served.streams == len(timers.running) == 2)
    reads.read_on()
    reading = asyncio.create_task(reads.reader.read(-1))
    await eventually(lambda: len(timers.running) == 1)
    timers.running[0].expire()
    await eventually(lambda: served.streams == 1)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_oversized_head_is_refused(served: Served) -> None:
    client = await served.send(HALF_HEAD + b"x" * (server.MAX_HEAD_BYTES + 1))
    assert (await client.closed()).startswith(b"HTTP/1.1 400 ")


# Bodies


def chunked(total: int) -> bytes:
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    return piece * (total // 0x10000)


@pytest.mark.parametrize(
    "data",
    [POST + b"Content-Length: %d\r\n\r\n" % (400 << 20), CHUNKED + chunked(2 * MAX_BODY_BYTES)],
    ids=["length", "chunked"],
)
async def test_oversized_body_gets_413(served: Served, data: bytes) -> None:
    client = await served.send(data)
    answer = await client.answer()
    assert answer.status == 413
    error = answer.json()["error"]
    assert error["code"] == "too_large"
    assert str(MAX_BODY_BYTES) in error["message"]
    assert served.bodies == []


async def test_largest_allowed_body_is_accepted(served: Served) -> None:
    size = MAX_BODY_BYTES
    client = await served.send(POST + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
    assert (await client.answer()).json() == size
    assert (await client.ask(CHUNKED + chunked(size) + b"0\r\n\r\n")).json() == size


async def test_oversized_body_is_not_read_to_its_end() -> None:
    pieces_read = 0

    async def receive() -> dict[str, Any]:
        nonlocal pieces_read
        pieces_read += 1
        return {"type": "http.request", "body": b"x" * 65_536, "more_body": True}

    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {"type": "http", "headers": []}
    await BodyLimit(PlainTextResponse("passed on"))(scope, receive, send)  # type: ignore[arg-type]
    assert messages[0]["status"] == 413
    assert pieces_read == MAX_BODY_BYTES // 65_536 + 1


# TLS


async def test_tls_handshakes_count_as_connections(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", MAX_CONNECTIONS)
    authority = Authority(tmp_path)
    async with serving(ServedContext(authority.port("admin")).context) as served:
        for data in (b"", b"\x16\x03\x01") * 5 * MAX_CONNECTIONS:  # half of a TLS record
            await served.send(data)
        await eventually(lambda: served.server.connections == MAX_CONNECTIONS)
        for client in served.clients[:-MAX_CONNECTIONS]:
            assert await client.closed() == b""
        encrypted = await served.send(get("/hello"), tls=authority.client())
        assert (await encrypted.answer()).status == 200
        assert served.server.connections <= MAX_CONNECTIONS


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
async def test_tls_handshake_times_out(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "TIMEOUT_S", 0.2)
    async with serving(ServedContext(Authority(tmp_path).port("admin")).context) as served:
        client = await served.send(data)
        await client.closed()
        await eventually(lambda: served.server.connections == 0)


# Descriptors


@contextmanager
def limit_descriptors(spare: int = 0) -> Any:
    """Limit this process to this number of new descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = socket.socket()
    first = held.fileno()
    held.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + spare, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_server_accepts_once_descriptors_are_free(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "NO_FILES_PAUSE_S", 0.05)
    raw = socket.socket()
    raw.setblocking(False)
    with limit_descriptors():
        with suppress(BlockingIOError):
            raw.connect(("127.0.0.1", served.port))
        await asyncio.sleep(0.2)
        assert served.server.connections == 0
    client = Client(*await asyncio.open_connection(sock=raw))
    assert (await client.ask(get("/hello"))).status == 200
    client.close()

"""GET over a kept connection, from servers that keep it, close it or misbehave."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest

from proxy.config import WorkerTlsConfig
from proxy.health.http_client import HttpClient, ProbeResponseError
from proxy.net.tls import server_context
from tests.proxy.certificates import Authority
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.site import eventually

EVENT_LOOPS = ("uvloop",)  # as the router
MAX_BYTES, DEADLINE_S = 1 << 20, 20.0
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Server:
    """Sends the same pieces to every request, and may close afterwards."""

    def __init__(self, *pieces: bytes, closes: bool = False) -> None:
        self.pieces, self.closes = pieces, closes
        self.connections = 0
        self.requests: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(*pieces: bytes, closes: bool = False) -> AsyncIterator[tuple[Server, HttpClient]]:
    """Start a server and a client."""
    server = Server(*pieces, closes=closes)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    with closing(HttpClient(server.url, "k1", None)) as client:
        yield server, client
    listening.close()
    for writer in server.writers:
        writer.close()
    await listening.wait_closed()


async def test_connection_is_kept() -> None:
    async with serving(GOOD) as (server, client):
        for _ in range(3):
            assert await client.get("/a", MAX_BYTES) == (200, b"hello")
        assert server.connections == 1
    assert server.requests[0] == (
        b"GET /a HTTP/1.1\r\nHost: %b\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
        b"Authorization: Bearer k1\r\n\r\n" % server.url.removeprefix("http://").encode()
    )


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        ([bytes([byte]) for byte in GOOD], (200, b"hello")),
        ([b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"], (503, b"")),
        ([b"HTTP/1.1 204 None\r\n\r\n"], (204, b"")),
        ([b"HTTP/1.1 103 Hints\r\nX: y\r\n\r\n", GOOD], (200, b"hello")),
        ([b"HTTP/1.1 103 Hints\r\nX: y\r\n\r\n" + GOOD], (200, b"hello")),
        (
            [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\nhe\r\n",
             b"3\r\nllo\r\n0\r\n\r\n"],
            (200, b"hello"),
        ),
        ([b"HTTP/1.1 307 Go\r\nLocation: /b\r\nContent-Length: 0\r\n\r\n"], (307, b"")),
    ],
)  # fmt: skip
async def test_response_framing_is_parsed(pieces: list[bytes], answer: tuple[int, bytes]) -> None:
    async with serving(*pieces) as (server, client):
        for _ in range(2):
            assert await client.get("/", MAX_BYTES) == answer
        assert server.connections == 1


async def test_close_ends_a_response_without_framing() -> None:
    async with serving(b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo", closes=True) as (server, client):
        for _ in range(2):
            assert await client.get("/", MAX_BYTES) == (200, b"hello")
        assert server.connections == 2


async def test_connection_close_is_honoured() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"
    async with serving(head) as (server, client):
        for _ in range(2):
            assert await client.get("/", MAX_BYTES) == (200, b"hello")
        assert server.connections == 2


async def test_closed_connection_is_replaced() -> None:
    async with serving(GOOD, closes=True) as (server, client):
        for _ in range(3):  # with and without the end noticed
            assert await client.get("/", MAX_BYTES) == (200, b"hello")
        assert server.connections == 3


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "without a response"),
        ([GOOD[:-1]], "is incomplete"),
        ([GOOD[:9]], "is incomplete"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe"], "is incomplete"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "not HTTP"),
        ([b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"], "switched protocols"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", b"x" * MAX_BYTES], f"more than {MAX_BYTES} bytes"),
        ([b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * MAX_BYTES], "headers or framing without end"),
    ],
)
async def test_malformed_response_raises(pieces: list[bytes], message: str) -> None:
    async with serving(*pieces, closes=True) as (server, client):
        for _ in range(2):
            with pytest.raises(ProbeResponseError, match=message):
                await client.get("/", MAX_BYTES)
        assert server.connections == 2


async def test_surplus_data_is_not_the_next_response() -> None:
    async with serving(GOOD + b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n") as (server, client):
        for _ in range(3):
            assert await client.get("/", MAX_BYTES) == (200, b"hello")
        assert server.connections == 3


async def test_response_to_a_cancelled_request_is_not_the_next_one() -> None:
    async with serving() as (server, client):
        asking = asyncio.create_task(client.get("/", MAX_BYTES))
        await eventually(lambda: server.requests)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        server.pieces = (GOOD,)
        assert await client.get("/", MAX_BYTES) == (200, b"hello")
        assert server.connections == 2


async def test_refused_connection_raises() -> None:
    async with serving() as (server, _):
        pass
    with (
        closing(HttpClient(server.url, None, None)) as client,
        pytest.raises(OSError, match="onnect"),
    ):
        await client.get("/", MAX_BYTES)


async def test_invalid_host_name_raises() -> None:
    with (
        closing(HttpClient(f"http://{'a' * 70}:1", None, None)) as client,
        pytest.raises(ValueError, match="label"),
    ):
        await client.get("/", MAX_BYTES)


async def test_changed_tls_files_open_a_new_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    worker = FakeWorker()
    worker.tls = server_context(authority.port("worker", host="127.0.0.1"))
    await worker.listen()
    worker_tls = authority.worker_tls()
    try:
        with closing(HttpClient(worker.url, None, worker_tls)) as client:
            assert (await client.get("/health", MAX_BYTES))[0] == 200
            assert (await client.get("/health", MAX_BYTES))[0] == 200
            assert len(worker.connections) == 1
            assert worker_tls.ca_file is not None
            worker_tls.ca_file.write_bytes(worker_tls.ca_file.read_bytes() + b"\n")
            assert (await client.get("/health", MAX_BYTES))[0] == 200
            assert len(worker.connections) == 2
        stranger = HttpClient(worker.url, None, WorkerTlsConfig())
        with closing(stranger), pytest.raises(OSError, match="certificate"):
            await stranger.get("/health", MAX_BYTES)
    finally:
        await worker.stop()


def answer_hello(
    listening: socket.socket, context: ssl.SSLContext, answered: threading.Event
) -> None:
    """Answer the client's hello, and wait for its end."""
    connection, _ = listening.accept()
    with connection:
        connection.settimeout(DEADLINE_S)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=True)
        while not outgoing.pending:
            incoming.write(connection.recv(1 << 16))
            with suppress(ssl.SSLWantReadError):
                tls.do_handshake()
        connection.sendall(outgoing.read())
        answered.set()
        while connection.recv(1 << 16):
            pass


class Blocking(asyncio.Protocol):
    """Blocks the loop in `connection_made` until `until` returns."""

    def __init__(self, until: Callable[[], None]) -> None:
        self.until = until

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.until()
        transport.close()


async def test_cancel_in_the_handshake_writes_nothing(tmp_path: Path) -> None:
    """A busy loop may read the server's hello after the cancel.

    uvloop has closed the connection then, and must not write the rest of the handshake.
    """
    authority = Authority(tmp_path / "certificates")
    context, answered = (
        server_context(authority.port("worker", host="127.0.0.1")),
        threading.Event(),
    )
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    with (
        socket.create_server(("127.0.0.1", 0)) as worker,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        serving = threading.Thread(
            target=answer_hello, args=(worker, context, answered), daemon=True
        )
        serving.start()
        url = f"https://127.0.0.1:{worker.getsockname()[1]}"
        with closing(HttpClient(url, None, authority.worker_tls())) as client:
            asking = asyncio.create_task(client.get("/health", MAX_BYTES))

            def give_up() -> None:
                assert answered.wait(DEADLINE_S)
                asking.cancel()

            await asyncio.sleep(0)  # lets the request start
            await loop.create_connection(lambda: Blocking(give_up), *other.getsockname())
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.to_thread(serving.join, DEADLINE_S)
            assert not serving.is_alive()
    assert errors == []


def test_router_starts_without_libraries_that_it_may_not_need() -> None:
    """Discovery and warm-up of transfers import aiohttp, a client of the admin API the others."""
    code = (
        "import sys, proxy.app, proxy.processes.__main__\n"
        "from proxy.setup.app import App\n"
        "from proxy.config import parse\n"
        "App(parse(\"{model: m, workers: [{name: a, url: 'http://h:1'}]}\", 'fleet.yaml'))\n"
        "print(*sorted({'aiohttp', 'fastapi', 'uvicorn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"

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
from tests.present import present
from tests.proxy.certificates import Authority
from tests.proxy.running import serving
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import free_port

EVENT_LOOPS = ("uvloop",)  # as the router
MAX_BYTES, DEADLINE_S = 1 << 20, 20.0
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


@asynccontextmanager
async def answering(
    *pieces: bytes, end: str = "keep"
) -> AsyncIterator[tuple[FakeWorker, HttpClient]]:
    """Start a client, and a server that sends these pieces to every request."""
    server = FakeWorker()
    server.always(scripts.raw(*pieces, gap_s=0.001, end=end))
    async with serving(server):
        with closing(HttpClient(server.url, "k1", None)) as client:
            yield server, client


async def test_connection_is_kept() -> None:
    async with answering(GOOD) as (server, client):
        for _ in range(3):
            assert await client.get("/a", MAX_BYTES) == (200, b"hello")
        assert len(server.connections) == 1
    assert server.calls[0].head == (
        b"GET /a HTTP/1.1\r\nHost: %b\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
        b"Authorization: Bearer k1\r\n\r\n" % server.url.removeprefix("http://").encode()
    )


HINTS = b"HTTP/1.1 103 Hints\r\nX: y\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe"


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        ([bytes([byte]) for byte in GOOD], (200, b"hello")),
        ([b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"], (503, b"")),
        ([b"HTTP/1.1 204 None\r\n\r\n"], (204, b"")),
        ([HINTS, GOOD], (200, b"hello")),
        ([HINTS + GOOD], (200, b"hello")),
        ([CHUNKED, b"\r\n3\r\nllo\r\n0\r\n\r\n"], (200, b"hello")),
        ([b"HTTP/1.1 307 Go\r\nLocation: /b\r\nContent-Length: 0\r\n\r\n"], (307, b"")),
    ],
)
async def test_response_framing_is_parsed(pieces: list[bytes], answer: tuple[int, bytes]) -> None:
    async with answering(*pieces) as (server, client):
        for _ in range(2):
            assert await client.get("/", MAX_BYTES) == answer
        assert len(server.connections) == 1


@pytest.mark.parametrize(
    ("pieces", "end"),
    [
        pytest.param([b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo"], "close", id="end by close"),
        pytest.param([GOOD], "close", id="close after the end"),  # noticed or not
        pytest.param([GOOD.replace(b"OK", b"OK\r\nConnection: close")], "keep", id="header"),
        pytest.param([GOOD + GOOD.replace(b"200", b"500")], "keep", id="surplus data"),
    ],
)
async def test_connection_that_cannot_be_kept_is_replaced(pieces: list[bytes], end: str) -> None:
    async with answering(*pieces, end=end) as (server, client):
        for _ in range(3):
            assert await client.get("/", MAX_BYTES) == (200, b"hello")
        assert len(server.connections) == 3


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "without a response"),
        ([GOOD[:-1]], "is incomplete"),
        ([GOOD[:9]], "is incomplete"),
        ([CHUNKED], "is incomplete"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "not HTTP"),
        ([b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"], "switched protocols"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", b"x" * MAX_BYTES], f"more than {MAX_BYTES} bytes"),
        ([b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * MAX_BYTES], "headers or framing without end"),
    ],
)
async def test_malformed_response_raises(pieces: list[bytes], message: str) -> None:
    async with answering(*pieces, end="close") as (server, client):
        for _ in range(2):
            with pytest.raises(ProbeResponseError, match=message):
                await client.get("/", MAX_BYTES)
        assert len(server.connections) == 2


async def test_response_to_a_cancelled_request_is_not_the_next_one() -> None:
    async with answering() as (server, client):
        asking = asyncio.create_task(client.get("/", MAX_BYTES))
        await eventually(lambda: server.calls)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        server.always(scripts.raw(GOOD))
        assert await client.get("/", MAX_BYTES) == (200, b"hello")
        assert len(server.connections) == 2


@pytest.mark.parametrize(
    ("host", "error", "message"),
    [("127.0.0.1", OSError, "onnect"), ("a" * 70, ValueError, "label")],
    ids=["refused", "invalid name"],
)
async def test_failed_connection_raises(host: str, error: type[Exception], message: str) -> None:
    with (
        closing(HttpClient(f"http://{host}:{free_port()}", None, None)) as client,
        pytest.raises(error, match=message),
    ):
        await client.get("/", MAX_BYTES)


async def test_changed_tls_files_open_a_new_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    worker = FakeWorker()
    worker.tls = server_context(authority.port("worker"))
    worker_tls = authority.worker_tls()
    ca_file = present(worker_tls.ca_file)
    async with serving(worker):
        with closing(HttpClient(worker.url, None, worker_tls)) as client:
            for _ in range(2):
                assert (await client.get("/health", MAX_BYTES))[0] == 200
            assert len(worker.connections) == 1
            ca_file.write_bytes(ca_file.read_bytes() + b"\n")
            assert (await client.get("/health", MAX_BYTES))[0] == 200
            assert len(worker.connections) == 2
        stranger = HttpClient(worker.url, None, WorkerTlsConfig())
        with closing(stranger), pytest.raises(OSError, match="certificate"):
            await stranger.get("/health", MAX_BYTES)


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
    context, answered = server_context(authority.port("worker")), threading.Event()
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    with (
        socket.create_server(("127.0.0.1", 0)) as worker,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        thread = threading.Thread(
            target=answer_hello, args=(worker, context, answered), daemon=True
        )
        thread.start()
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
            await asyncio.to_thread(thread.join, DEADLINE_S)
            assert not thread.is_alive()
    assert errors == []


def test_router_starts_without_libraries_that_it_may_not_need() -> None:
    """Discovery in Kubernetes imports aiohttp, a client of the admin API the others."""
    fleet = """
model: m
transfer: nixl
workers: [{name: a, role: prefill, url: 'http://a:1'}, {name: b, role: decode, url: 'http://b:1'}]
"""
    code = (
        "import sys, proxy.app, proxy.processes.__main__\n"
        "from proxy.setup.app import App\n"
        "from proxy.config import parse\n"
        f"App(parse({fleet!r}, 'fleet.yaml'))\n"
        "print(*sorted({'aiohttp', 'fastapi', 'uvicorn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"

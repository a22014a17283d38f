"""GET over one kept connection, from servers that keep it, close it, or say what they like."""

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

ON = ("uvloop",)  # as the router
MOST, DEADLINE_S = 1 << 20, 20.0
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Server:
    """Says the same to everybody, in as many writes; then it may close."""

    def __init__(self, *pieces: bytes, closes: bool = False) -> None:
        self.pieces, self.closes = pieces, closes
        self.connections = 0
        self.asked: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
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
    """Start one, and somebody who asks it."""
    server = Server(*pieces, closes=closes)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    with closing(HttpClient(server.url, "k1", None)) as asker:
        yield server, asker
    listening.close()
    for writer in server.writers:
        writer.close()
    await listening.wait_closed()


async def test_answers_come_over_one_connection() -> None:
    async with serving(GOOD) as (server, asker):
        for _ in range(3):
            assert await asker.get("/a", MOST) == (200, b"hello")
        assert server.connections == 1
    assert server.asked[0] == (
        b"GET /a HTTP/1.1\r\nHost: %b\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
        b"Authorization: Bearer k1\r\n\r\n" % server.url.removeprefix("http://").encode()
    )


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        ([bytes([each]) for each in GOOD], (200, b"hello")),
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
async def test_each_framing_of_an_answer(pieces: list[bytes], answer: tuple[int, bytes]) -> None:
    async with serving(*pieces) as (server, asker):
        for _ in range(2):
            assert await asker.get("/", MOST) == answer
        assert server.connections == 1


async def test_an_answer_that_the_end_of_the_connection_ends() -> None:
    async with serving(b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo", closes=True) as (server, asker):
        for _ in range(2):
            assert await asker.get("/", MOST) == (200, b"hello")
        assert server.connections == 2


async def test_one_who_wants_to_close_is_not_asked_again_over_it() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"
    async with serving(head) as (server, asker):
        for _ in range(2):
            assert await asker.get("/", MOST) == (200, b"hello")
        assert server.connections == 2


async def test_a_connection_that_was_closed_meanwhile_is_made_anew() -> None:
    async with serving(GOOD, closes=True) as (server, asker):
        for _ in range(3):  # whether the end has been heard of by then, or not
            assert await asker.get("/", MOST) == (200, b"hello")
        assert server.connections == 3


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([], "without a response"),
        ([GOOD[:-1]], "is incomplete"),
        ([GOOD[:9]], "is incomplete"),
        (
            [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe"],
            "is incomplete",
        ),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "not HTTP"),
        ([b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"], "switched protocols"),
        ([b"HTTP/1.1 200 OK\r\n\r\n", b"x" * MOST], f"more than {MOST} bytes"),
        ([b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * MOST], f"more than {MOST} bytes"),
    ],
)
async def test_what_is_no_answer(pieces: list[bytes], words: str) -> None:
    async with serving(*pieces, closes=True) as (server, asker):
        for _ in range(2):
            with pytest.raises(ProbeResponseError, match=words):
                await asker.get("/", MOST)
        assert server.connections == 2


async def test_what_follows_an_answer_is_not_the_next_one() -> None:
    async with serving(GOOD + b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n") as (server, asker):
        for _ in range(3):
            assert await asker.get("/", MOST) == (200, b"hello")
        assert server.connections == 3


async def test_an_answer_that_nobody_waited_for_is_not_the_next_one() -> None:
    async with serving() as (server, asker):
        asking = asyncio.create_task(asker.get("/", MOST))
        await eventually(lambda: server.asked)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        server.pieces = (GOOD,)
        assert await asker.get("/", MOST) == (200, b"hello")
        assert server.connections == 2


async def test_nobody_listens() -> None:
    async with serving() as (server, _):
        pass
    with (
        closing(HttpClient(server.url, None, None)) as asker,
        pytest.raises(OSError, match="onnect"),
    ):
        await asker.get("/", MOST)


async def test_a_host_that_can_be_no_name() -> None:
    with (
        closing(HttpClient(f"http://{'a' * 70}:1", None, None)) as asker,
        pytest.raises(ValueError, match="label"),
    ):
        await asker.get("/", MOST)


async def test_over_tls_and_with_new_files_over_a_new_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    worker = FakeWorker()
    worker.tls = server_context(authority.port("worker", host="127.0.0.1"))
    await worker.listen()
    met = authority.worker_tls()
    try:
        with closing(HttpClient(worker.url, None, met)) as asker:
            assert (await asker.get("/health", MOST))[0] == 200
            assert (await asker.get("/health", MOST))[0] == 200
            assert len(worker.connections) == 1
            assert met.ca_file is not None
            met.ca_file.write_bytes(met.ca_file.read_bytes() + b"\n")
            assert (await asker.get("/health", MOST))[0] == 200
            assert len(worker.connections) == 2
        stranger = HttpClient(worker.url, None, WorkerTlsConfig())
        with closing(stranger), pytest.raises(OSError, match="certificate"):
            await stranger.get("/health", MOST)
    finally:
        await worker.stop()


def answers_hello(listening: socket.socket, shown: ssl.SSLContext, told: threading.Event) -> None:
    """Be a server as far as what a client's last word of a handshake answers; wait for the end."""
    connection, _ = listening.accept()
    with connection:
        connection.settimeout(DEADLINE_S)
        came, said = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = shown.wrap_bio(came, said, server_side=True)
        while not said.pending:
            came.write(connection.recv(1 << 16))
            with suppress(ssl.SSLWantReadError):
                tls.do_handshake()
        connection.sendall(said.read())
        told.set()
        while connection.recv(1 << 16):
            pass


class Holds(asyncio.Protocol):
    """Keeps the loop from going on, once it is connected, until something is so."""

    def __init__(self, until: Callable[[], None]) -> None:
        self.until = until

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.until()
        transport.close()


async def test_a_cancel_in_the_handshake_leaves_nothing_to_write(tmp_path: Path) -> None:
    """A busy loop connects, and reads what answers its hello, before it goes on: it is too late.

    uvloop closes the connection then, and would write the last word of the handshake to it.
    """
    authority = Authority(tmp_path / "certificates")
    shown, told = server_context(authority.port("worker", host="127.0.0.1")), threading.Event()
    wrong: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    with (
        socket.create_server(("127.0.0.1", 0)) as worker,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        serving = threading.Thread(target=answers_hello, args=(worker, shown, told), daemon=True)
        serving.start()
        url = f"https://127.0.0.1:{worker.getsockname()[1]}"
        with closing(HttpClient(url, None, authority.worker_tls())) as asker:
            asking = asyncio.create_task(asker.get("/health", MOST))

            def give_up() -> None:
                assert told.wait(DEADLINE_S)
                asking.cancel()

            await asyncio.sleep(0)  # it asks first
            await loop.create_connection(lambda: Holds(give_up), *other.getsockname())
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.to_thread(serving.join, DEADLINE_S)
            assert not serving.is_alive()
    assert wrong == []


def test_a_router_reads_in_no_client_library() -> None:
    """One that discovers workers, or warms up transfers, does: 10 MB."""
    code = (
        "import sys\n"
        "from proxy.setup.app import App\n"
        "from proxy.config import parse\n"
        "App(parse(\"{model: m, workers: [{name: a, url: 'http://h:1'}]}\", 'fleet.yaml'))\n"
        "print('aiohttp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

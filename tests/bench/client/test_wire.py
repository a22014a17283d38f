"""The bench client's HTTP wire against raw socket servers."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager

import pytest

from vllm_sched.bench.client.wire import Address, Wire, WireError
from vllm_sched.errors import UsageError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def talking_to(handler: Handler) -> AsyncIterator[Wire]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    wire = Wire(Address("127.0.0.1", port, tls=False, root="/root"), {"X-Key": "k"})
    try:
        yield wire
    finally:
        wire.close()
        server.close()


async def request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.lower().split("content-length:")[1].split()[0])
    return head, await reader.readexactly(length)


def answered(body: bytes) -> bytes:
    return OK + b"Content-Length: %d\r\n\r\n" % len(body) + body


def once(sent: bytes, *, waits: bool = False) -> Handler:
    """Return a handler that sends these bytes and closes, at once or after the client."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(sent)
        if waits:
            await reader.read()

    return handler


async def test_sequential_requests_share_a_connection() -> None:
    heads: list[str] = []
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            try:
                head, body = await request(reader)
            except asyncio.IncompleteReadError:
                return
            heads.append(head)
            writer.write(answered(b"<" + body + b">"))

    async with talking_to(handler) as wire:
        assert await wire.post("/a", b"1", 5) == b"<1>"
        assert await wire.get("/b", 5) == b"<>"
        assert connections == 1
        # A task may take a connection before its previous user has woken up.
        batches = [asyncio.gather(*(wire.post("/c", b"%d" % i, 5) for i in range(20)))]
        batches += [asyncio.gather(*(wire.post("/d", b"%d" % i, 5) for i in range(20)))]
        for batch in batches:
            assert await batch == [b"<%d>" % i for i in range(20)]
    assert heads[0].startswith("POST /root/a HTTP/1.1\r\n")
    assert heads[1].startswith("GET /root/b HTTP/1.1\r\n")
    assert "X-Key: k\r\n" in heads[0]


async def test_connection_closed_while_idle_is_replaced() -> None:
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        _, body = await request(reader)
        writer.write(answered(body))  # closes without `Connection: close`

    async with talking_to(handler) as wire:
        for i in range(3):
            assert await wire.post("/", b"%d" % i, 5) == b"%d" % i
    assert connections == 3


HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "waits", "body"),
    [(HINTS + answered(b"a"), True, b"a"), (OK + b"\r\nall there is", False, b"all there is")],
    ids=["after hints", "until the connection ends"],
)
async def test_complete_answer_is_returned(sent: bytes, *, waits: bool, body: bytes) -> None:
    async with talking_to(once(sent, waits=waits)) as wire:
        assert await wire.post("/", b"{}", 5) == body


async def test_connection_closed_on_reuse_logs_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with talking_to(once(answered(b"a") + b"unexpected bytes")) as wire:
        for _ in range(20):
            assert await wire.post("/", b"{}", 5) == b"a"
        await asyncio.sleep(0)
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_stream_passes_headers_then_each_piece() -> None:
    seen: list[tuple[bytes, ...]] = []
    got_first = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK + b"X-Route: s0; x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await got_first.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    def on_body(piece: bytes) -> None:
        seen.append((piece,))
        got_first.set()

    async with talking_to(handler) as wire:
        await wire.stream("/", b"", on_body, 5, on_header=lambda *header: seen.append(header))
    assert seen == [
        (b"x-route", b"s0; x"),
        (b"transfer-encoding", b"chunked"),
        (b"one",),
        (b"two",),
    ]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "closed with no answer"),
        (b"gibberish\r\n\r\n", "is not HTTP"),
        (OK + b"Content-Length: 10\r\n\r\nhalf", "broke off"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", "broke off"),
        (OK[:12], "broke off"),
        (HINTS, "broke off"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\nno\nroom!!", "HTTP 503: no room!!"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "HTTP 404$"),
    ],
)
async def test_incomplete_answer_is_a_one_line_error(sent: bytes, message: str) -> None:
    async with talking_to(once(sent)) as wire:
        with pytest.raises(WireError, match=message) as caught:
            await wire.post("/", b"", 5)
    assert "\n" not in str(caught.value)


async def test_slow_answer_times_out_and_closes_the_connection() -> None:
    left = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await request(reader)
        assert await reader.read() == b""
        left.set()

    async with talking_to(handler) as wire:
        with pytest.raises(WireError, match=r"no complete response within 0\.05 s"):
            await wire.post("/", b"", 0.05)
        await asyncio.wait_for(left.wait(), 5)  # the server can stop working


async def test_server_that_accepts_no_connection_is_reported_soon() -> None:
    with socket.socket() as server, ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):  # its queue is full
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        wire = Wire(Address(*server.getsockname(), tls=False, root=""), {}, connect_s=0.05)
        with pytest.raises(WireError, match=r"no connection within 0\.05 s; check the address"):
            await wire.get("/", 30.0)


async def test_refused_connection_is_a_one_line_error() -> None:
    with pytest.raises(WireError, match=r"^http://127\.0\.0\.1:9: .*refused"):
        await Wire(Address.parse("http://127.0.0.1:9"), {}).get("/", 5)
    with pytest.raises(WireError, match=r"nowhere\.invalid"):
        await Wire(Address.parse("http://nowhere.invalid"), {}).get("/", 5)


async def test_port_without_tls_is_a_one_line_error() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    async with talking_to(handler) as wire:
        secure = Wire(Address("127.0.0.1", wire.address.port, tls=True, root=""), {})
        no_tls = r"^https://127\.0\.0\.1.*; does this port use TLS\?$"
        with pytest.raises(WireError, match=no_tls) as caught:
            await secure.get("/", 5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "address", "written"),
    [
        ("http://a:1", Address("a", 1, tls=False, root=""), "http://a:1"),
        ("a:8000/v1/", Address("a", 8000, tls=False, root=""), "http://a:8000"),
        ("https://a/x/v1", Address("a", 443, tls=True, root="/x"), "https://a:443/x"),
        ("http://[::1]:7", Address("::1", 7, tls=False, root=""), "http://[::1]:7"),
    ],
)
def test_urls_are_parsed(url: str, address: Address, written: str) -> None:
    assert Address.parse(url) == address
    assert str(address) == written


@pytest.mark.parametrize(
    "url", ["", "ftp://a", "http://", "http://a:x", "http://a:99999", "http://[::1"]
)
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not a URL"):
        Address.parse(url)

"""Backpressure: a side that does not read stops the other, and no data piles up in the router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.net.tls import server_context
from proxy.wire.client.connection import ClientConnection
from tests.proxy.certificates import Authority
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.raw_client import Client, chat, get, request
from tests.proxy.wire.site import Fake, Site, eventually


def largest_socket_buffer(kind: str) -> int:
    """Return the size to which the kernel lets a socket's buffer grow."""
    return int(Path(f"/proc/sys/net/ipv4/tcp_{kind}").read_text().split()[2])


PIECE_BYTES = 64 * 1024
# A worker's socket, the router's two, and what three programs hold; the client's is small.
MAX_BUFFERED_BYTES = 2 * largest_socket_buffer("wmem") + largest_socket_buffer("rmem") + (2 << 20)
TOTAL_BYTES = MAX_BUFFERED_BYTES // PIECE_BYTES * PIECE_BYTES + (8 << 20)
CHUNKED_HEAD = scripts.head(200, (b"transfer-encoding", b"chunked"))


def flood(total: int = TOTAL_BYTES, head: bytes = scripts.STREAM_HEAD) -> scripts.Script:
    """Send `total` bytes as fast as the peer accepts them."""

    async def run(call: Call) -> None:
        await call.send(head)
        for number in range(total // PIECE_BYTES):
            await call.send(
                scripts.chunk(b"data: %s\n\n" % (b"%08d" % number).ljust(PIECE_BYTES - 8))
            )
        await call.send(scripts.LAST_CHUNK)

    return run


def check_whole(body: bytes, total: int = TOTAL_BYTES) -> None:
    """Check that the body of a flood is whole."""
    events = [event.removeprefix(b"data: ").rstrip() for event in body.split(b"\n\n")[:-1]]
    assert events == [b"%08d" % number for number in range(total // PIECE_BYTES)]


async def bytes_until_stall(call: Call) -> int:
    """Wait until the worker can send no more; return how much it has sent."""
    sent = -1
    async with asyncio.timeout(10):
        while sent != call.connection.sent or not call.connection.stalled.is_set():
            sent = call.connection.sent
            await asyncio.sleep(0.1)
    return sent


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_unread_responses_do_not_pile_up(
    start: Start, tmp_path: Path, encrypted: bool
) -> None:
    authority = Authority(tmp_path)
    tls = authority.client() if encrypted else None
    shown = server_context(authority.port("router")) if encrypted else None
    site = await start(tls=shown)
    site.fake.always(flood())
    clients = [await site.client(limit=1024, rcvbuf=8192, tls=tls) for _ in range(8)]
    for number, client in enumerate(clients, start=1):
        await client.send(chat(stream=True))
        await site.fake.got(number)
    for call in site.served():
        await bytes_until_stall(call)
    unsent = [connection._transport.get_write_buffer_size() for connection in site.wire.clients]
    assert len(unsent) == len(clients)
    assert max(unsent) < 400 << 10


@pytest.mark.parametrize("head", [scripts.STREAM_HEAD, CHUNKED_HEAD], ids=["events", "other"])
async def test_client_that_does_not_read_stalls_its_worker(site: Site, head: bytes) -> None:
    site.fake.always(flood(head=head))
    client = await site.send(chat(stream=True), limit=1024, rcvbuf=8192)
    call = await site.fake.got()
    assert await bytes_until_stall(call) < MAX_BUFFERED_BYTES
    # Other clients are served.
    site.fake.always(scripts.stream(3))
    assert (await site.ask(chat(stream=True))).body.endswith(scripts.DONE)
    assert (await site.ask(get("/health"))).status == 200
    # The whole response arrives once the client reads.
    client.read_on()
    check_whole((await client.answer(within=20.0)).body)


async def test_client_with_a_full_socket_stalls_its_worker_from_the_start(start: Start) -> None:
    """Responses to earlier requests may fill the socket."""
    site = await start(Fake("w0", max_requests=1))
    gate = site.fake.hold_next()
    site.fake.always(flood())
    first, client = await site.client(), await site.client(limit=1024, rcvbuf=8192)
    await first.send(chat())
    await site.fake.got()
    await client.send(chat(stream=True))
    await eventually(lambda: site.wire.queued)
    [waiting] = site.wire.queued.values()
    connection = waiting.client
    before = b"." * (16 << 20)
    connection.write(before)
    await eventually(lambda: not connection.writable)
    gate.set()
    assert await bytes_until_stall(await site.fake.got(2)) < MAX_BUFFERED_BYTES
    client.read_on()
    async with asyncio.timeout(10):
        assert await client.reader.readexactly(len(before)) == before
    check_whole((await client.answer(within=20.0)).body)


async def test_slow_reader_gets_the_whole_stream(start: Start) -> None:
    total = 8 << 20
    site = await start(wire={"idle_s": 100.0})
    site.stand_still()
    site.fake.always(flood(total))
    client = await site.send(chat(stream=True), rcvbuf=65536)
    await client.head()
    pieces = []
    while piece := await client.piece():
        pieces.append(piece)
        if len(pieces) % 8 == 0:
            site.skip(15.0)  # several times idle_s in total; each piece restarts the timeout
            await asyncio.sleep(0.02)
            assert site.wire.ticks.timer is not None
            site.wire.ticks.timer.cancel()
            site.wire.ticks.tick()
    check_whole(b"".join(pieces), total)


async def test_client_that_stops_reading_is_dropped_after_idle_s(start: Start) -> None:
    """Otherwise the worker would never free the request's blocks."""
    site = await start(wire={"idle_s": 0.3})
    site.fake.always(flood())
    await site.send(chat(stream=True), limit=1024, rcvbuf=8192)
    call = await site.fake.got()
    await call.was_lost()
    await site.settled()
    await eventually(lambda: not site.wire.clients)


# Clients that send requests and do not read the responses

REQUESTS = 400
LARGE = request(b'{"model":"tiny","prompt":"' + b"x" * (8 << 20) + b'"}', path="/v1/completions")


async def start_unread_client(site: Site) -> tuple[Client, ClientConnection]:
    """Send more requests than sockets can answer, read nothing, and wait until writes stall."""
    client = await site.client(limit=1024, rcvbuf=4096)
    (connection,) = site.wire.clients
    for _ in range(REQUESTS):
        client.writer.write(get("/metrics"))
    await eventually(lambda: not connection.writable)
    return client, connection


@pytest.mark.parametrize("more", [LARGE, get("/health") * 20_000], ids=["bodies", "heads"])
async def test_client_that_does_not_read_is_not_read_from(site: Site, more: bytes) -> None:
    client, connection = await start_unread_client(site)
    client.writer.write(more * 3)
    await eventually(lambda: connection in site.wire.unread)
    assert not connection._transport.is_reading()
    assert connection._reader._body_charge.size < 1 << 20
    assert sum(len(request.body) for request in connection._reader.ready) < 1 << 20
    assert (await site.ask(chat("hi"))).status == 200, "other clients are served"
    assert not connection._transport.is_reading()


async def test_client_that_reads_again_gets_all_responses_in_order(site: Site) -> None:
    client, connection = await start_unread_client(site)
    client.writer.write(chat("x" * 20_000) + get("/nowhere"))
    await eventually(lambda: connection in site.wire.unread)
    client.read_on()
    for _ in range(REQUESTS):
        assert (await client.answer()).body.startswith(b"# HELP")
    assert (await client.answer()).status == 200
    assert (await client.answer()).status == 404
    assert connection not in site.wire.unread
    assert site.wire.body_budget.held == 0


@pytest.mark.parametrize("end", ["idle_s", "reset"])
async def test_requests_of_a_client_that_does_not_read_end_with_it(start: Start, end: str) -> None:
    site = await start(wire={"idle_s": 100.0})
    client, connection = await start_unread_client(site)
    await eventually(lambda: connection in site.wire.unread)
    assert connection._reader.ready
    assert site.wire.body_budget.held > 0
    if end == "reset":
        client.reset()
    else:
        site.skip(101.0)
    await eventually(lambda: not site.wire.clients)
    assert not connection._reader.ready
    assert site.wire.body_budget.held == 0


async def test_pipelined_requests_count_towards_max_collected_bytes(start: Start) -> None:
    """Heads read ahead of a slow response grow when they are parsed."""
    site = await start(wire={"max_collected_bytes": 400 << 10, "max_body_bytes": 100 << 10})
    gate = site.fake.hold()
    few, many = await site.client(), await site.client()
    await few.send(chat() + get("/health") * 300)
    await eventually(lambda: site.wire.body_budget.held > 300 << 10)
    next_one = request(b"{}", b"X-Request-Id: mine", path="/v1/messages")
    await many.send(chat() + next_one + get("/health") * 300)
    await eventually(lambda: len(site.wire.unread) == 2)
    assert site.wire.body_budget.held < 400 << 10
    gate.set()
    assert [(await few.answer()).status for _ in range(301)] == [200] * 301
    assert (await many.answer()).status == 200
    refused = await many.answer()
    assert (refused.status, refused.one(b"x-request-id")) == (503, b"mine")
    error = refused.json()
    assert error["error"]["message"].startswith("Too many large requests")
    assert (error["error"]["type"], error["request_id"]) == ("overloaded_error", "mine")
    assert await many.closed() == b""
    assert site.wire.body_budget.held == 0

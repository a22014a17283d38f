"""Backpressure: a slow side stops the other side, and no data piles up in the router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.net.tls import server_context
from tests.proxy.certificates import Authority
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.raw_client import chat, get
from tests.proxy.wire.site import Fake, eventually


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


def numbered_pieces(total: int = TOTAL_BYTES) -> list[bytes]:
    return [b"%08d" % number for number in range(total // PIECE_BYTES)]


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


@pytest.mark.parametrize("events", [True, False])
async def test_client_that_does_not_read_stalls_its_worker(start: Start, events: bool) -> None:
    site = await start()
    site.fake.always(flood(head=scripts.STREAM_HEAD if events else CHUNKED_HEAD))
    client = await site.send(chat(stream=True), limit=1024, rcvbuf=8192)
    call = await site.fake.got()
    assert await bytes_until_stall(call) < MAX_BUFFERED_BYTES
    # Other clients are served.
    site.fake.always(scripts.stream(3))
    assert (await site.ask(chat(stream=True))).body.endswith(scripts.DONE)
    assert (await site.ask(get("/health"))).status == 200
    # The whole response arrives once the client reads.
    client.read_on()
    answer = await client.answer(within=20.0)
    events = answer.body.split(b"\n\n")[:-1]
    assert [event.removeprefix(b"data: ").rstrip() for event in events] == numbered_pieces()


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
    answer = await client.answer(within=20.0)
    events = answer.body.split(b"\n\n")[:-1]
    assert [event.removeprefix(b"data: ").rstrip() for event in events] == numbered_pieces()


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
    events = b"".join(pieces).split(b"\n\n")[:-1]
    assert [event.removeprefix(b"data: ").rstrip() for event in events] == numbered_pieces(total)


async def test_client_that_stops_reading_is_dropped_after_idle_s(start: Start) -> None:
    """Otherwise the worker would never free the request's blocks."""
    site = await start(wire={"idle_s": 0.3})
    site.fake.always(flood())
    await site.send(chat(stream=True), limit=1024, rcvbuf=8192)
    call = await site.fake.got()
    await call.was_lost()
    await site.settled()
    await eventually(lambda: not site.wire.clients)

"""A client that leaves: its worker hears of it at once, whatever was going on.

Cancels that never reach the engine are the complaint about every peer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from proxy.wire.client.connection import MAX_AHEAD_BYTES
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.raw_client import DEADLINE_S, Client, chat, request
from tests.proxy.wire.site import Fake, Site, eventually

LEAVE: dict[str, Callable[[Client], None]] = {
    "close": Client.close,
    "reset": Client.reset,
    "half close": Client.half_close,
}


@pytest.fixture
def start(start: Start) -> Start:
    """Start routers for which no time passes: nothing ends there by a deadline."""

    async def begin(*fakes: Fake, router: Any = None, wire: Any = None) -> Site:
        site = await start(*fakes, router=router, wire=wire)
        site.stand_still()
        return site

    return begin


@pytest.fixture(params=LEAVE)
def leave(request: pytest.FixtureRequest) -> Callable[[Client], None]:
    """Go, in one of three ways."""
    return LEAVE[request.param]


async def lost(call: Call) -> None:
    await call.was_lost()


JSON_HEAD = scripts.head(200, (b"content-type", b"application/json"), (b"content-length", b"99"))
# What the worker does, whether a stream is asked for, and how much of the answer has come.
MOMENTS = {
    "before the head": (scripts.stall, False, 0),
    "before the head of a stream": (scripts.stall, True, 0),
    "between head and first event": (scripts.stream(0, end="stall"), True, 0),
    "in mid stream": (scripts.stream(3, end="stall"), True, 2),
    "while tokens keep coming": (scripts.stream(100_000, gap_s=0.002), True, 2),
    "in a body without events": (scripts.raw(JSON_HEAD + b'{"a', end="stall"), False, 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
async def test_once_the_worker_has_the_request(
    site: Site, leave: Callable[[Client], None], moment: str
) -> None:
    script, stream, read = MOMENTS[moment]
    site.fake.then(script)
    client = await site.send(chat(stream=stream))
    call = await site.fake.got()
    if read > 0:
        await client.head()
    if read > 1:
        await client.piece()
    assert site.charges() != {}
    leave(client)
    await call.was_lost()
    await site.settled()


async def test_who_takes_nothing_more_is_not_waited_for_without_end(start: Start) -> None:
    """It closes its half; what lies here of its answer is less than would have its worker wait."""
    site = await start()
    go = asyncio.Event()
    site.fake.then(scripts.gated(go, scripts.stream(1, text="x" * 60_000, end="stall")))
    client = await site.send(chat(stream=True), limit=1024, rcvbuf=4096)
    call = await site.fake.got()
    [theirs] = site.wire.clients
    raw = theirs._transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    go.set()
    await eventually(lambda: theirs._transport.get_write_buffer_size() > 0)
    assert theirs.writable
    client.half_close()
    await lost(call)
    assert site.wire.clients == {theirs}
    site.skip(site.wire.settings.idle_s + 1.0)
    await eventually(lambda: not site.wire.clients)


async def test_who_was_refused_is_waited_for_no_longer_because_it_leaves(start: Start) -> None:
    """Part of an earlier answer lies here, and why the connection ends."""
    site = await start()
    site.fake.then(scripts.answer(200, b"x" * 60_000))
    client = await site.client(limit=1024, rcvbuf=4096)
    [theirs] = site.wire.clients
    raw = theirs._transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    await client.send(chat() + b"NONSENSE\r\n\r\n")
    await eventually(lambda: theirs._leaving)
    assert theirs._transport.get_write_buffer_size() > 0
    client.half_close()
    await eventually(theirs._transport.is_closing)  # it has heard of that
    assert site.wire.clients == {theirs}
    site.skip(site.wire.settings.linger_s + 1.0)
    await eventually(lambda: not site.wire.clients)


async def test_while_it_waits_in_the_queue(start: Start, leave: Callable[[Client], None]) -> None:
    site = await start(Fake("w0", max_requests=1))
    site.fake.then(scripts.stall)
    first, second = await site.client(), await site.client()
    await first.send(chat())
    await site.fake.got()
    await second.send(chat())
    await eventually(lambda: len(site.router.queue) == 1)
    leave(second)
    await eventually(lambda: len(site.router.queue) == 0)
    assert site.router.queue.bytes == 0
    leave(first)
    await site.settled()
    assert len(site.fake.served) == 1  # it was not sent after all


async def test_while_tokens_are_counted(start: Start, leave: Callable[[Client], None]) -> None:
    site = await start(Fake("w0", max_model_len=2048), Fake("w1"), wire={"count_s": 5.0})
    for fake in site.fakes.values():
        fake.always(scripts.stall, "/tokenize")
    client = await site.send(chat("word " * 1600))
    await eventually(lambda: any(fake.calls for fake in site.fakes.values()))
    leave(client)
    [call] = [call for fake in site.fakes.values() for call in fake.calls]
    await lost(call)
    await site.settled()
    await asyncio.sleep(0.05)
    assert not any(fake.served for fake in site.fakes.values())


async def test_while_the_connection_is_made(start: Start, leave: Callable[[Client], None]) -> None:
    """The worker takes none for now: its listening queue is full."""
    site = await start(wire={"connect_s": 30.0})
    await site.fake.hang()
    client = await site.send(chat())
    await eventually(lambda: site.worker().requests == 1)
    leave(client)
    await site.settled()
    assert site.fake.calls == []


async def test_while_its_body_arrives(site: Site, leave: Callable[[Client], None]) -> None:
    client = await site.send(request(b"x" * 1000)[:-500])
    leave(client)
    await eventually(lambda: not site.wire.clients)
    assert site.fake.calls == []


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("more", [0, 40_000])
async def test_however_much_it_has_sent_ahead(site: Site, way: str, more: int) -> None:
    """Beyond some of it the router reads no further, and must see the end all the same.

    What it does not read has room in its socket: the end of what lies in the client's own is
    nothing that anybody could see.
    """
    site.fake.then(scripts.stall)
    client = await site.send(chat())
    call = await site.fake.got()
    ahead = chat("x" * (MAX_AHEAD_BYTES + more))
    await client.send(ahead[: len(ahead) - more] if more else ahead[:1000])
    if more:
        await eventually(lambda: site.wire.unread)
        await client.send(ahead[len(ahead) - more :])
    getattr(client, way)()
    await lost(call)
    await site.settled()
    assert site.wire.unread == set()
    assert len(site.fake.served) == 1


async def test_while_it_takes_nothing(site: Site) -> None:
    """The client reads nothing, the stream is paused; then it goes."""
    site.fake.then(scripts.stream(1_000_000, text="x" * 1000))
    client = await site.send(chat(stream=True), limit=1024, rcvbuf=4096)
    call = await site.fake.got()
    async with asyncio.timeout(DEADLINE_S):
        await call.connection.stalled.wait()
    client.reset()
    await lost(call)
    await site.settled()


async def test_a_client_that_left_is_no_failure_of_the_worker(site: Site) -> None:
    for _ in range(10):
        site.fake.then(scripts.stall)
        client = await site.send(chat())
        await site.fake.got(len(site.fake.served) + 1)
        client.close()
    await site.settled()
    assert (await site.ask(chat())).status == 200

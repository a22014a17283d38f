"""Clients that leave: the worker's connection closes at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from proxy.wire.client.connection import MAX_AHEAD_BYTES, ClientConnection
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import DEADLINE_S, Client, chat, request
from tests.proxy.wire.site import Fake, Site, eventually

LEAVE: dict[str, Callable[[Client], None]] = {
    "close": Client.close,
    "reset": Client.reset,
    "half close": Client.half_close,
}


@pytest.fixture
def start(start: Start) -> Start:
    """Start routers whose clock stands still, so that no deadline ends a request."""

    async def begin(*fakes: Fake, router: Any = None, wire: Any = None) -> Site:
        site = await start(*fakes, router=router, wire=wire)
        site.stand_still()
        return site

    return begin


@pytest.fixture(params=LEAVE)
def leave(request: pytest.FixtureRequest) -> Callable[[Client], None]:
    """Return a way for a client to leave."""
    return LEAVE[request.param]


JSON_HEAD = scripts.head(200, (b"content-type", b"application/json"), (b"content-length", b"99"))
# The worker's script, whether to stream, and how much the client reads (1: head, 2: and a piece).
PHASES = {
    "before the head": (scripts.stall, False, 0),
    "between head and first event": (scripts.stream(0, end="stall"), True, 0),
    "in the middle of a stream": (scripts.stream(3, end="stall"), True, 2),
    "while tokens keep coming": (scripts.stream(100_000, gap_s=0.002), True, 2),
    "in a body without events": (scripts.raw(JSON_HEAD + b'{"a', end="stall"), False, 1),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_leaving_cancels_a_request_on_its_worker(
    site: Site, leave: Callable[[Client], None], phase: str
) -> None:
    script, stream, read = PHASES[phase]
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
    assert site.worker().breaker.has_no_failures


async def narrow_client(site: Site) -> tuple[Client, ClientConnection]:
    """Return a client that does not read, and the router's side of its small sockets."""
    client = await site.client(limit=1024, rcvbuf=4096)
    [connection] = site.wire.clients
    raw = connection._transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return client, connection


async def test_half_closed_client_that_stops_reading_is_dropped_after_idle_s(site: Site) -> None:
    """The unread rest of its response is too small to stall the worker."""
    site.fake.then(scripts.stream(1, text="x" * 60_000, end="stall"))
    client, connection = await narrow_client(site)
    await client.send(chat(stream=True))
    call = await site.fake.got()
    await eventually(lambda: connection._transport.get_write_buffer_size() > 0)
    assert connection.writable
    client.half_close()
    await call.was_lost()
    assert site.wire.clients == {connection}
    site.skip(site.wire.settings.idle_s + 1.0)
    await eventually(lambda: not site.wire.clients)


async def test_refused_client_that_half_closes_is_dropped_after_linger_s(site: Site) -> None:
    """Part of an earlier response and the refusal are still unread."""
    site.fake.then(scripts.answer(200, b"x" * 60_000))
    client, connection = await narrow_client(site)
    await client.send(chat() + b"NONSENSE\r\n\r\n")
    await eventually(lambda: connection._leaving)
    assert connection._transport.get_write_buffer_size() > 0
    client.half_close()
    await eventually(connection._transport.is_closing)  # the half close has arrived
    assert site.wire.clients == {connection}
    site.skip(site.wire.settings.linger_s + 1.0)
    await eventually(lambda: not site.wire.clients)


async def test_leaving_removes_a_queued_request(
    start: Start, leave: Callable[[Client], None]
) -> None:
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
    assert len(site.fake.served) == 1  # the queued request was not sent


async def test_leaving_cancels_a_connect(start: Start, leave: Callable[[Client], None]) -> None:
    """The worker's listening queue is full."""
    site = await start(wire={"connect_s": 30.0})
    await site.fake.hang()
    client = await site.send(chat())
    await eventually(lambda: site.worker().requests == 1)
    leave(client)
    await site.settled()
    assert site.fake.calls == []


async def test_leaving_ends_a_half_sent_request(
    site: Site, leave: Callable[[Client], None]
) -> None:
    client = await site.send(request(b"x" * 1000)[:-500])
    leave(client)
    await eventually(lambda: not site.wire.clients)
    assert site.fake.calls == []


@pytest.mark.parametrize("way", ["close", "reset"])
@pytest.mark.parametrize("more", [0, 40_000])
async def test_leaving_is_noticed_after_data_sent_ahead(site: Site, way: str, more: int) -> None:
    """The router stops reading beyond a limit and must still notice the end.

    The unread data fits into the router's socket; an end that is stuck in the client's socket is
    invisible.
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
    await call.was_lost()
    await site.settled()
    assert site.wire.unread == set()
    assert len(site.fake.served) == 1


async def test_leaving_cancels_a_paused_stream(site: Site) -> None:
    site.fake.then(scripts.stream(1_000_000, text="x" * 1000))
    client = await site.send(chat(stream=True), limit=1024, rcvbuf=4096)
    call = await site.fake.got()
    async with asyncio.timeout(DEADLINE_S):
        await call.connection.stalled.wait()
    client.reset()
    await call.was_lost()

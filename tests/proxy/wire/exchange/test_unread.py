"""Clients that do not read their responses."""

from __future__ import annotations

import pytest

from proxy.wire.client.connection import ClientConnection
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Client, chat, get, request
from tests.proxy.wire.site import Site, eventually

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
    assert site.wire.collecting.held == 0


async def test_client_that_does_not_read_is_dropped_after_idle_s(start: Start) -> None:
    site = await start(wire={"idle_s": 100.0})
    client, connection = await start_unread_client(site)
    client.writer.write(LARGE)
    await eventually(lambda: connection in site.wire.unread)
    site.skip(101.0)
    await eventually(lambda: not site.wire.clients)
    assert not connection._reader.ready
    assert site.wire.collecting.held == 0


async def test_pending_requests_are_dropped_with_their_client(site: Site) -> None:
    client, connection = await start_unread_client(site)
    await eventually(lambda: connection in site.wire.unread)
    assert connection._reader.ready
    assert site.wire.collecting.held > 0
    client.reset()
    await eventually(lambda: not site.wire.clients)
    assert not connection._reader.ready
    assert site.wire.collecting.held == 0


async def test_pipelined_requests_count_towards_max_collected_bytes(start: Start) -> None:
    """Heads read ahead of a slow response grow when they are parsed."""
    site = await start(wire={"max_collected_bytes": 400 << 10, "max_body_bytes": 100 << 10})
    gate = site.fake.hold()
    few, many = await site.client(), await site.client()
    await few.send(chat() + get("/health") * 300)
    await eventually(lambda: site.wire.collecting.held > 300 << 10)
    next_one = request(b"{}", b"X-Request-Id: mine", path="/v1/messages")
    await many.send(chat() + next_one + get("/health") * 300)
    await eventually(lambda: len(site.wire.unread) == 2)
    assert site.wire.collecting.held < 400 << 10
    gate.set()
    assert [(await few.answer()).status for _ in range(301)] == [200] * 301
    assert (await many.answer()).status == 200
    refused = await many.answer()
    assert (refused.status, refused.one(b"x-request-id")) == (503, b"mine")
    error = refused.json()
    assert error["error"]["message"].startswith("Too many large requests")
    assert (error["error"]["type"], error["request_id"]) == ("overloaded_error", "mine")
    assert await many.closed() == b""
    assert site.wire.collecting.held == 0

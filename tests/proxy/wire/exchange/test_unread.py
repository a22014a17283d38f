"""A client that reads no answers: it is not read from either, and nothing of it is kept long."""

from __future__ import annotations

import pytest

from proxy.wire.client.connection import ClientConnection
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Client, chat, get, request
from tests.proxy.wire.site import Site, eventually

ASKED = 400
LARGE = request(b'{"model":"tiny","prompt":"' + b"x" * (8 << 20) + b'"}', path="/v1/completions")


async def deaf(site: Site) -> tuple[Client, ClientConnection]:
    """Ask for more than fits into sockets, read nothing, and wait until the router feels it."""
    client = await site.client(limit=1024, rcvbuf=4096)
    (theirs,) = site.wire.clients
    for _ in range(ASKED):
        client.writer.write(get("/metrics"))
    await eventually(lambda: not theirs.writable)
    return client, theirs


@pytest.mark.parametrize("more", [LARGE, get("/health") * 20_000], ids=["bodies", "heads"])
async def test_it_is_not_read_from(site: Site, more: bytes) -> None:
    client, theirs = await deaf(site)
    client.writer.write(more * 3)
    await eventually(lambda: theirs in site.wire.unread)
    assert not theirs._transport.is_reading()
    assert theirs._reader._body_charge.size < 1 << 20
    assert sum(len(each.body) for each in theirs._reader.ready) < 1 << 20
    assert (await site.ask(chat("hi"))).status == 200, "others are"
    assert not theirs._transport.is_reading()


async def test_once_it_reads_it_has_all_its_answers_in_turn(site: Site) -> None:
    client, theirs = await deaf(site)
    client.writer.write(chat("x" * 20_000) + get("/nowhere"))
    await eventually(lambda: theirs in site.wire.unread)
    client.read_on()
    for _ in range(ASKED):
        assert (await client.answer()).body.startswith(b"# HELP")
    assert (await client.answer()).status == 200
    assert (await client.answer()).status == 404
    assert theirs not in site.wire.unread
    assert site.wire.collecting.held == 0


async def test_it_is_given_up_in_time_without_a_word(start: Start) -> None:
    site = await start(wire={"idle_s": 100.0})
    client, theirs = await deaf(site)
    client.writer.write(LARGE)
    await eventually(lambda: theirs in site.wire.unread)
    site.skip(101.0)
    await eventually(lambda: not site.wire.clients)
    assert not theirs._reader.ready
    assert site.wire.collecting.held == 0


async def test_what_it_asked_goes_with_it(site: Site) -> None:
    client, theirs = await deaf(site)
    await eventually(lambda: theirs in site.wire.unread)
    assert theirs._reader.ready
    assert site.wire.collecting.held > 0
    client.reset()
    await eventually(lambda: not site.wire.clients)
    assert not theirs._reader.ready
    assert site.wire.collecting.held == 0


async def test_what_waits_for_its_turn_is_of_what_is_held(start: Start) -> None:
    """However many heads fit into what is read ahead of a slow answer: they are large once read."""
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
    told = refused.json()
    assert told["error"]["message"].startswith("Too many large requests")
    assert (told["error"]["type"], told["request_id"]) == ("overloaded_error", "mine")
    assert await many.closed() == b""
    assert site.wire.collecting.held == 0

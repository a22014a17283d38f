"""HTTP/1.1 connections: pipelining, Expect, HEAD, timeouts."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import DEADLINE_S, chat, get, request
from tests.proxy.wire.site import Site, eventually

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BODY = b'{"model": "tiny", "messages": []}'
EXPECT = b"Expect: 100-continue"


def numbered(number: int) -> bytes:
    """Return a chat request with a number as its user."""
    return request(b'{"model": "tiny", "messages": [], "n": 1, "user": "%d"}' % number)


async def test_pipelined_responses_keep_request_order(site: Site) -> None:
    """The first response is the slowest."""
    gate = asyncio.Event()

    def reply(number: int) -> scripts.Script:
        return scripts.answer(200, b"answer %d" % number)

    site.fake.then(scripts.gated(gate, reply(0)), *map(reply, range(1, 6)))
    client = await site.send(b"".join(map(numbered, range(6))) + get("/health"))
    await site.fake.got()
    gate.set()
    assert [(await client.answer()).body for _ in range(6)] == [b"answer %d" % n for n in range(6)]
    assert (await client.answer()).status == 200
    assert [call.json()["user"] for call in site.fake.served] == list("012345")


async def test_thousands_of_pipelined_requests_do_not_recurse(site: Site) -> None:
    """A response that is ready at once must not be written from within the one before."""
    client = await site.client()
    count = 3000
    sending = asyncio.create_task(client.send(get("/health") * count + get("/nowhere") * count))
    for number in range(2 * count):
        assert (await client.answer()).status == (200 if number < count else 404)
    await sending


@pytest.mark.parametrize("chunks", [None, (10,)], ids=["fixed", "chunked"])
async def test_expect_continue_gets_100(site: Site, chunks: tuple[int, ...] | None) -> None:
    data = request(BODY, EXPECT, chunks=chunks)
    head, _, body = data.partition(b"\r\n\r\n")
    client = await site.client()
    for _ in range(2):
        await client.send(head + b"\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            assert await client.reader.readexactly(len(CONTINUE)) == CONTINUE
        await client.send(body)
        assert (await client.answer()).status == 200
    for call in site.fake.served:
        assert call.body == BODY
        assert call.all(b"expect") == []


async def test_head_request_returns_no_body(site: Site) -> None:
    client = await site.client()
    for path in ("/health", "/ready", "/v1/models", "/metrics"):
        body = (await client.ask(get(path))).body
        answer = await client.ask(request(b"", path=path, method="HEAD"))
        assert answer.status == 200
        if path != "/metrics":
            assert answer.one(b"content-length") == b"%d" % len(body)
    answer = await client.ask(request(b"", path="/nowhere", method="HEAD"))
    assert answer.status == 404
    answer = await client.ask(request(b"", path="/v1/chat/completions", method="HEAD"))
    assert answer.status == 405
    assert (await client.ask(chat())).status == 200  # no bytes of a body were in between


async def test_http_1_0_needs_no_host_and_gets_no_100_continue(site: Site) -> None:
    client = await site.client()
    data = request(BODY, EXPECT, version="1.0").replace(b"Host: localhost\r\n", b"")
    await client.send(data)
    assert (await client.answer()).status == 200


async def test_idle_connection_is_closed_after_client_idle_s(site: Site) -> None:
    client = await site.client()
    assert (await client.ask(chat())).status == 200
    [connection] = site.wire.clients
    idle_s = site.wire.settings.client_idle_s
    site.skip(0.8 * idle_s)
    assert connection.deadline > site.clock()
    site.skip(0.2 * idle_s)
    assert await client.closed() == b""


async def test_slow_request_head_is_cut_off(start: Start) -> None:
    """Slowloris: bytes keep coming, but the head never ends."""
    site = await start(wire={"linger_s": 0.1})
    site.stand_still()
    client = await site.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
    head_s = site.wire.settings.client_header_s
    await eventually(lambda: any(c.deadline == site.clock() + head_s for c in site.wire.clients))
    site.skip(0.6 * head_s)
    await client.send(b"X: y\r\n")
    await site.swept()
    site.skip(0.6 * head_s)  # more header lines do not extend the deadline
    answer = await client.closed()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")


async def test_incomplete_second_head_is_cut_off(start: Start) -> None:
    """The first head came in two parts, the second part with the start of the next head."""
    site = await start(wire={"linger_s": 0.1})
    client = await site.client()
    head_s = site.wire.settings.client_header_s
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
    await eventually(lambda: any(c.deadline < site.clock() + head_s for c in site.wire.clients))
    await client.send(b"Content-Length: 2\r\n\r\n[]GET /health HTTP/1.1\r\nHo")
    assert (await client.answer()).status == 400
    site.skip(head_s)
    rest = await client.closed()
    assert rest == b"" or rest.startswith(b"HTTP/1.1 408 ")


async def test_413_is_readable_while_the_client_sends(start: Start) -> None:
    """A close with unread bytes would reset the connection and lose the response."""
    site = await start(wire={"max_body_bytes": 10_000})
    client = await site.client()
    client.writer.write(request(b"x" * (4 << 20)))
    assert (await client.answer()).status == 413


async def test_blank_lines_before_a_request_are_ignored(site: Site) -> None:
    client = await site.send(b"\r\n\r\n" + chat())
    assert (await client.answer()).status == 200

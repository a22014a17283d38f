"""HTTP/1.1 as it is meant: what a connection may do besides one request after the other."""

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
    return request(b'{"model": "tiny", "messages": [], "n": 1, "user": "%d"}' % number)


async def test_pipelined_requests_are_answered_in_order(start: Start) -> None:
    """The first is the slowest."""
    site = await start()
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


async def test_a_heap_of_small_requests_is_answered(site: Site) -> None:
    """Whatever is answered at once must not be answered from within the one before."""
    client = await site.client()
    count = 3000
    sending = asyncio.create_task(client.send(get("/health") * count + get("/nowhere") * count))
    for number in range(2 * count):
        assert (await client.answer()).status == (200 if number < count else 404)
    await sending


@pytest.mark.parametrize("chunks", [None, (10,)], ids=["fixed", "chunked"])
async def test_expect_continue_is_answered(site: Site, chunks: tuple[int, ...] | None) -> None:
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


async def test_a_client_that_asks_and_does_not_wait_is_served(site: Site) -> None:
    client = await site.send(request(BODY, EXPECT))
    answer = await client.answer()
    if answer.status == 100:
        answer = await client.answer()
    assert answer.status == 200


async def test_going_on_is_said_when_its_turn_has_come(site: Site) -> None:
    """Between two answers, never within one."""
    gate = site.fake.hold_next(scripts.answer(200, b"first"))
    client = await site.client()
    head, _, body = request(BODY, EXPECT).partition(b"\r\n\r\n")
    await client.send(chat() + head + b"\r\n\r\n")
    await site.fake.got()
    gate.set()
    assert (await client.answer()).body == b"first"
    async with asyncio.timeout(DEADLINE_S):
        assert await client.reader.readexactly(len(CONTINUE)) == CONTINUE
    await client.send(body)
    assert (await client.answer()).status == 200


async def test_head_is_get_without_a_body(site: Site) -> None:
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


async def test_http_1_0_needs_no_host_and_never_hears_of_continue(site: Site) -> None:
    client = await site.client()
    data = request(BODY, EXPECT, version="1.0").replace(b"Host: localhost\r\n", b"")
    await client.send(data)
    assert (await client.answer()).status == 200


async def test_a_client_that_says_close_is_closed(site: Site) -> None:
    client = await site.client()
    answer = await client.ask(request(BODY, b"Connection: close"))
    assert (answer.status, answer.one(b"connection").lower()) == (200, b"close")
    assert await client.closed() == b""
    assert site.fake.served[0].all(b"connection") in ([], [b"keep-alive"])


async def test_an_idle_connection_is_closed_in_time(start: Start) -> None:
    site = await start()
    client = await site.client()
    assert (await client.ask(chat())).status == 200
    [connection] = site.wire.clients
    idle_s = site.wire.settings.client_idle_s
    site.skip(0.8 * idle_s)
    assert connection.deadline > site.clock()
    site.skip(0.2 * idle_s)
    assert await client.closed() == b""


async def test_a_head_that_drips_is_cut_off(start: Start) -> None:
    """Slowloris: bytes keep coming, the head does not."""
    site = await start(wire={"linger_s": 0.1})
    client = await site.client()
    head_s = site.wire.settings.client_header_s

    async def drip() -> None:
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
        while True:
            await client.send(b"X: y\r\n")
            await asyncio.sleep(0.03)

    dripping = asyncio.create_task(drip())
    await eventually(lambda: any(c.deadline < site.clock() + head_s for c in site.wire.clients))
    site.skip(0.5 * head_s)
    assert all(c.deadline > site.clock() for c in site.wire.clients)
    await asyncio.sleep(0.1)  # some more lines, none of which gives it longer
    site.skip(0.5 * head_s)
    answer = await client.closed()
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")


async def test_a_second_head_that_stops_coming_is_cut_off(start: Start) -> None:
    """The first came in two parts, and the second's beginning with the last of them."""
    site = await start(wire={"linger_s": 0.1})
    client = await site.client()
    head_s = site.wire.settings.client_header_s
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
    await eventually(lambda: any(c.deadline < site.clock() + head_s for c in site.wire.clients))
    await client.send(b"Content-Length: 2\r\n\r\n[]GET /health HTTP/1.1\r\nHo")
    assert (await client.answer()).status == 400
    site.skip(head_s)
    left = await client.closed()
    assert left == b"" or left.startswith(b"HTTP/1.1 408 ")


async def test_a_slow_answer_is_no_idle_client(start: Start) -> None:
    site = await start(wire={"client_idle_s": 10.0, "client_header_s": 10.0})
    site.stand_still()
    gate = site.fake.hold_next(scripts.answer(200, b"late"))
    client = await site.send(chat())
    await site.fake.got()
    site.skip(30.0)
    await site.swept()
    gate.set()
    assert (await client.answer()).body == b"late"


@pytest.mark.parametrize("chunks", [None, (1000,)], ids=["fixed", "chunked"])
async def test_a_body_beyond_the_limit_is_413(start: Start, chunks: tuple[int, ...] | None) -> None:
    site = await start(wire={"max_body_bytes": 10_000, "linger_s": 0.5})
    fits = BODY[:-1] + b" " * (10_000 - len(BODY)) + b"}"
    assert (await site.ask(request(fits, chunks=chunks))).status == 200
    answer = await site.ask(request(fits + b" ", chunks=chunks))
    assert answer.status == 413
    assert answer.error()["type"] == "invalid_request_error"
    assert len(site.fake.served) == 1


async def test_a_refused_client_can_read_why_while_it_sends(start: Start) -> None:
    """A close with unread bytes would reset, and the answer be lost."""
    site = await start(wire={"max_body_bytes": 10_000})
    client = await site.client()
    client.writer.write(request(b"x" * (4 << 20)))
    assert (await client.answer()).status == 413


async def test_blank_lines_before_a_request_are_no_matter(site: Site) -> None:
    client = await site.send(b"\r\n\r\n" + chat())
    assert (await client.answer()).status == 200

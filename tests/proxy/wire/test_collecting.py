"""Bodies that are held: together they take no more memory than they may."""

from __future__ import annotations

import asyncio

import pytest

from proxy.wire.collecting import Collecting
from proxy.wire.http import RefusedError
from tests.proxy.wire import scripts
from tests.proxy.wire.client import chat
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.site import Fake, Site, eventually

MOST = 100_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n"


def test_it_counts() -> None:
    collecting = Collecting(100)
    collecting.take(60)
    with pytest.raises(RefusedError) as error:
        collecting.take(41)
    assert error.value.refusal.status == 503
    collecting.take(40)
    collecting.give(100)
    assert collecting.held == 0


@pytest.fixture
async def small(start: Start) -> Site:
    return await start(wire={"max_collected_bytes": MOST, "max_body_bytes": MOST})


async def test_slow_bodies_do_not_fill_the_memory(small: Site) -> None:
    slow = [await small.client() for _ in range(4)]
    for client in slow[:3]:
        await client.send(HEAD + b"x" * 30_000)
    await eventually(lambda: small.wire.collecting.held == 90_000)
    await slow[3].send(HEAD + b"x" * 30_000)
    answer = await slow[3].answer()
    assert answer.status == 503
    assert answer.error()["code"] == "too_many_bodies"
    assert int(answer.one(b"retry-after")) >= 1
    assert small.wire.collecting.held == 90_000
    assert (await small.ask(chat("hi"))).status == 200, "small ones pass"
    slow[0].close()
    slow[1].reset()
    await eventually(lambda: small.wire.collecting.held == 30_000)


async def test_chunks_count_too(small: Site) -> None:
    client = await small.client()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    await client.send(head + b"7530\r\n" + b"x" * 30_000 + b"\r\n")
    await eventually(lambda: small.wire.collecting.held == 30_000)
    client.close()
    await eventually(lambda: not small.wire.collecting.held)


async def test_what_is_answered_is_counted_no_more(small: Site) -> None:
    client = await small.client()
    for _ in range(5):
        assert (await client.ask(chat("x" * 40_000))).status == 200
        assert small.wire.collecting.held == 0


async def test_what_is_whole_counts_until_its_worker_begins(small: Site) -> None:
    gate = asyncio.Event()
    small.fake.always(scripts.gated(gate, scripts.answer()))
    clients = [await small.client() for _ in range(2)]
    for number, client in enumerate(clients, start=1):
        await client.send(chat("x" * 40_000))
        await small.fake.got(number)
    assert 80_000 < small.wire.collecting.held <= MOST
    refused = await small.ask(chat("x" * 40_000))
    assert refused.status == 503
    assert refused.error()["code"] == "too_many_bodies"
    clients[0].close()
    await eventually(lambda: small.wire.collecting.held < 50_000)
    gate.set()
    assert (await clients[1].answer()).status == 200
    assert small.wire.collecting.held == 0
    assert (await small.ask(chat("x" * 40_000))).status == 200, "it was its size alone"


async def test_a_stream_holds_nothing_from_its_first_byte_on(small: Site) -> None:
    small.fake.then(scripts.stream(2, end="stall"))
    client = await small.client()
    await client.send(chat("x" * 40_000, stream=True))
    await client.head()
    assert b"tok" in await client.piece()
    assert small.wire.collecting.held == 0


async def test_what_waits_counts_whichever_way_it_ends(start: Start) -> None:
    site = await start(Fake("w0", max_requests=1), router={"queue_wait_s": 30.0})
    gate = asyncio.Event()
    site.fake.always(scripts.gated(gate, scripts.error(500)))
    clients = [await site.client() for _ in range(3)]
    for client in clients:
        await client.send(chat("x" * 40_000))
    await eventually(lambda: len(site.router.queue) == 2)
    assert site.wire.collecting.held > 120_000
    clients[1].close()
    await eventually(lambda: site.wire.collecting.held < 90_000)
    site.skip(31.0)
    assert (await clients[2].answer()).status == 429
    gate.set()
    assert (await clients[0].answer()).status == 500
    assert site.wire.collecting.held == 0


async def test_what_is_refused_for_its_head_takes_nothing(small: Site) -> None:
    client = await small.client()
    await client.send(HEAD.replace(b"/v1/completions", b"/nowhere") + b"x" * 80_000)
    await client.send(b"x" * 10_000)
    assert (await client.answer()).status == 404
    assert small.wire.collecting.held == 0

"""SIGTERM's half of the wire: nothing new, the old to its end, within a deadline."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.http.request_parser import ParserState
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.raw_client import DEADLINE_S, Answer, chat, get
from tests.proxy.wire.site import Fake, Site, eventually


async def test_the_old_is_finished(start: Start) -> None:
    site = await start()
    gate = asyncio.Event()
    site.fake.then(
        scripts.gated(gate, scripts.answer(200, b"whole")), scripts.stream(10, gap_s=0.02)
    )
    one, two = await site.client(), await site.client()
    await one.send(chat())
    await site.fake.got()
    await two.send(chat(stream=True))
    await two.head()
    draining = asyncio.create_task(site.wire.drain(60.0))
    await eventually(lambda: site.wire.draining)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", site.port)
    assert not draining.done()
    gate.set()
    assert (await one.answer()).body == b"whole"
    pieces = [await two.piece() for _ in range(10)]
    assert pieces[-1]
    rest = b"".join(pieces) + await two.closed()
    assert b"tok 9" in rest
    assert scripts.DONE in rest
    await draining


async def test_it_ends_as_soon_as_the_old_is_done(start: Start) -> None:
    site = await start()
    assert (await site.ask(chat())).status == 200
    async with asyncio.timeout(DEADLINE_S):
        await site.wire.drain(3600.0)


@asynccontextmanager
async def leaving(site: Site) -> AsyncIterator[None]:
    """Have a router in its notice meanwhile."""
    draining = asyncio.create_task(site.wire.drain(90.0))
    await eventually(lambda: site.wire.leaving)
    try:
        yield
        assert not site.wire.draining
    finally:
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)


async def test_load_balancers_are_told_while_all_is_served_still(start: Start) -> None:
    """They ask now and then; what they send until they have heard must not be refused."""
    site = await start(wire={"drain_notice_s": 60.0})
    client, prober = await site.client(), await site.client()
    assert (await prober.ask(get("/ready"))).status == 200
    async with leaving(site):
        answer = await prober.ask(get("/ready"))
        assert (answer.status, answer.one(b"retry-after")) == (503, b"1")
        assert (await site.ask(get("/health"))).status == 200
        assert (await site.ask(chat())).status == 200  # on a new connection
        assert (await client.ask(chat())).status == 200


ANSWERS = {
    "whole": (chat(), 200),
    "explained": (chat("hi", b"X-Explain: 1"), 200),
    "a stream": (chat(stream=True), 200),
    "a worker's error": (chat("no"), 400),
    "no such model": (chat(model="huge"), 404),
    "no such path": (get("/nowhere"), 404),
    "another method": (get("/v1/completions"), 405),
    "health": (get("/health"), 200),
    "ready": (get("/ready"), 503),
    "models": (get("/v1/models"), 200),
    "metrics": (get("/metrics"), 200),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("used", [False, True])
async def test_kept_connections_are_told_to_close(start: Start, name: str, used: bool) -> None:
    """Behind a balancer of connections it would else be there when nothing is served any more."""
    site = await start(wire={"drain_notice_s": 60.0})

    async def judge(call: Call) -> None:
        refuses = b'"no"' in call.body
        await (scripts.error(400) if refuses else scripts.obey("w0"))(call)

    site.fake.always(judge)
    data, status = ANSWERS[name]
    client = await site.client()
    if used:
        assert (await client.ask(chat())).all(b"connection") in ([], [b"keep-alive"])
    async with leaving(site):
        answer = await client.ask(data)
        assert (answer.status, answer.one(b"connection")) == (status, b"close")
        assert await client.closed() == b""


async def test_a_stream_that_began_before_the_notice_is_no_reason_to_close(start: Start) -> None:
    """Its head said nothing of it; whatever is asked next hears."""
    site = await start(wire={"drain_notice_s": 60.0})
    site.fake.then(scripts.stream(2, gap_s=0.02))
    client = await site.send(chat(stream=True))
    head = await client.head()
    async with leaving(site):
        assert scripts.DONE in await client.body(head)
        answer = await client.ask(chat())
        assert (answer.status, answer.one(b"connection")) == (200, b"close")


async def test_idle_connections_are_closed_when_draining_begins(start: Start) -> None:
    """Or whoever keeps one finds out by a request that is refused."""
    site = await start()
    gate = site.fake.hold()
    fresh, used, busy = [await site.client() for _ in range(3)]
    assert (await used.ask(get("/health"))).status == 200
    await busy.send(chat())
    await site.fake.got()
    draining = asyncio.create_task(site.wire.drain(60.0))
    assert await fresh.closed() == b""
    assert await used.closed() == b""
    assert not draining.done()
    gate.set()
    answer = await busy.answer()
    assert (answer.status, answer.one(b"connection")) == (200, b"close")
    await draining


async def test_what_was_sent_before_draining_began_hears_why(start: Start) -> None:
    """Though it was not read by then: a mere close would not tell that nothing was done."""
    site = await start()
    gate = site.fake.hold()
    late, busy = await site.client(), await site.client()
    assert (await late.ask(get("/health"))).status == 200
    await busy.send(chat())
    await site.fake.got()

    async def hear() -> Answer:
        answer = await late.answer()
        gate.set()
        return answer

    hearing = asyncio.create_task(hear())
    os.write(late.writer.get_extra_info("socket").fileno(), chat())
    await site.wire.drain(60.0)  # begins at once, before the loop looks at any socket
    answer = await hearing
    assert (answer.status, answer.one(b"connection")) == (503, b"close")
    assert (await busy.answer()).status == 200
    assert len(site.fake.served) == 1


async def test_a_connection_is_closed_once_its_last_answer_is_there(start: Start) -> None:
    """One whose head was written before anybody knew."""
    site = await start()
    gate = asyncio.Event()
    site.fake.then(scripts.stream(5, gap_s=0.02), scripts.gated(gate, scripts.answer()))
    one, other = await site.client(), await site.client()
    await one.send(chat(stream=True))
    head = await one.head()
    await other.send(chat())
    await site.fake.got(2)
    draining = asyncio.create_task(site.wire.drain(60.0))
    assert (await one.body(head)).endswith(scripts.DONE)
    assert await one.closed() == b""
    assert not draining.done()
    gate.set()
    await other.answer()
    await draining


async def test_the_notice_is_part_of_the_deadline(start: Start) -> None:
    site = await start(wire={"drain_notice_s": 60.0})
    port = site.port
    await asyncio.wait_for(site.wire.drain(0.2), DEADLINE_S)
    assert site.wire.draining
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("part", [20, -3])
async def test_who_is_in_the_middle_of_a_request_hears_why(start: Start, part: int) -> None:
    site = await start(wire={"linger_s": 0.1})
    client = await site.send(chat()[:part])
    [connection] = site.wire.clients
    await eventually(lambda: connection._reader.state is not ParserState.NOTHING)
    draining = asyncio.create_task(site.wire.drain(60.0))
    answer = await client.answer()
    assert (answer.status, answer.one(b"connection")) == (503, b"close")
    client.close()
    await draining


async def test_an_idle_connection_that_is_dismissed_hears_nothing(site: Site) -> None:
    client = await site.client()
    await eventually(lambda: site.wire.clients)
    [connection] = site.wire.clients
    connection.close_for_drain(site.clock())
    assert await client.closed() == b""


async def test_who_waits_in_the_queue_is_old_enough(start: Start) -> None:
    site = await start(Fake("w0", max_requests=1))
    gate = site.fake.hold()
    clients = [await site.client() for _ in range(3)]
    for client in clients:
        await client.send(chat())
    await eventually(lambda: len(site.router.queue) == 2)
    draining = asyncio.create_task(site.wire.drain(60.0))
    await asyncio.sleep(0.05)
    gate.set()
    for client in clients:
        assert (await client.answer()).status == 200
    await draining


async def test_past_the_deadline_the_rest_is_cut_off(start: Start) -> None:
    site = await start(Fake("w0", max_requests=2))
    site.fake.always(scripts.stream(2, end="stall"))
    streaming, other, waiting = [await site.client() for _ in range(3)]
    await streaming.send(chat(stream=True))
    await streaming.head()
    await other.send(chat(stream=True))
    await site.fake.got(2)
    await waiting.send(chat())
    await eventually(lambda: len(site.router.queue) == 1)
    async with asyncio.timeout(DEADLINE_S):
        await site.wire.drain(0.3)
    rest = await streaming.closed()
    assert b"[DONE]" not in rest
    assert b"error" in rest or not rest.endswith(scripts.LAST_CHUNK)
    await waiting.closed()
    for call in site.fake.served:
        await call.was_lost()
    await site.settled()

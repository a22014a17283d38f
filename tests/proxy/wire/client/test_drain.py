"""Drain: no new connections, running requests end, within a deadline."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from proxy.http.request_parser import ParserState
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import DEADLINE_S, Answer, chat, get
from tests.proxy.wire.site import Fake, Site, eventually


async def test_drain_finishes_running_requests(site: Site) -> None:
    gate = asyncio.Event()
    whole_answer = scripts.gated(gate, scripts.answer(200, b"whole"))
    site.fake.then(whole_answer, scripts.stream(10, gap_s=0.02))
    whole, streaming = await site.client(), await site.client()
    await whole.send(chat())
    await site.fake.got()
    await streaming.send(chat(stream=True))
    head = await streaming.head()
    draining = asyncio.create_task(site.wire.drain(3600.0))
    await eventually(lambda: site.wire.draining)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", site.port)
    assert (await streaming.body(head)).endswith(scripts.token("tok 9") + scripts.DONE)
    assert await streaming.closed() == b""  # its head was written before the drain began
    assert not draining.done()
    gate.set()
    assert (await whole.answer()).body == b"whole"
    async with asyncio.timeout(DEADLINE_S):
        await draining


async def test_close_ends_every_request_with_an_error(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """A second signal closes; a client must not mistake the end for a network failure."""
    site.fake.then(scripts.stream(2, end="stall"), scripts.stall)
    streaming = await site.send(chat(stream=True))
    head = await streaming.head()
    whole = await site.send(chat())
    half = await site.send(chat()[:-3])
    await site.fake.got(2)
    draining = asyncio.create_task(site.wire.drain(3600.0))
    await eventually(lambda: site.wire.draining)
    closing = asyncio.create_task(site.wire.close())
    assert b"router_stopped" in await streaming.body(head)
    for client in (whole, half):
        answer = await client.answer()
        assert (answer.status, answer.one(b"connection")) == (503, b"close")
    for client in (streaming, whole, half):
        client.close()
    await closing
    assert caplog.messages == ["2 unfinished requests are ended"]
    draining.cancel()
    for call in site.fake.served:
        await call.was_lost()


async def test_close_does_not_wait_for_a_client_that_reads_nothing(site: Site) -> None:
    piece = scripts.chunk(b"data: " + b"x" * (1 << 20) + b"\n\n")
    site.fake.always(scripts.raw(scripts.STREAM_HEAD, *[piece] * 64, end="stall"))
    client = await site.send(chat(stream=True), limit=1024, rcvbuf=4096)
    [connection] = site.wire.clients
    await eventually(lambda: not connection.writable)
    async with asyncio.timeout(DEADLINE_S):
        await site.wire.close()
    assert not site.wire.clients
    client.close()


@asynccontextmanager
async def notice_period(site: Site) -> AsyncIterator[None]:
    """Keep the router in its notice period."""
    draining = asyncio.create_task(site.wire.drain(90.0))
    await eventually(lambda: site.wire.leaving)
    try:
        yield
        assert not site.wire.draining
    finally:
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)


async def test_ready_fails_in_notice_period_while_requests_are_served(start: Start) -> None:
    """A load balancer probes at intervals and sends requests until a probe fails."""
    site = await start(wire={"drain_notice_s": 60.0})
    client, prober = await site.client(), await site.client()
    assert (await prober.ask(get("/ready"))).status == 200
    async with notice_period(site):
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
    "ready": (get("/ready"), 503),
    "models": (get("/v1/models"), 200),
    "metrics": (get("/metrics"), 200),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_notice_period_closes_kept_connections_after_a_response(
    start: Start, name: str
) -> None:
    """A balancer of connections would keep them until nothing is served any more."""
    site = await start(wire={"drain_notice_s": 60.0})
    data, status = ANSWERS[name]
    client = await site.client()
    assert (await client.ask(chat())).all(b"connection") in ([], [b"keep-alive"])
    if name == "a worker's error":
        site.fake.then(scripts.error(status))
    async with notice_period(site):
        answer = await client.ask(data)
        assert (answer.status, answer.one(b"connection")) == (status, b"close")
        assert await client.closed() == b""


async def test_connection_of_a_stream_from_before_the_notice_serves_once_more(start: Start) -> None:
    """The stream's head did not announce a close; the next response does."""
    site = await start(wire={"drain_notice_s": 60.0})
    site.fake.then(scripts.stream(2, gap_s=0.02))
    client = await site.send(chat(stream=True))
    head = await client.head()
    async with notice_period(site):
        assert scripts.DONE in await client.body(head)
        answer = await client.ask(chat())
        assert (answer.status, answer.one(b"connection")) == (200, b"close")


async def test_drain_closes_idle_connections(site: Site) -> None:
    """A client that kept one would learn of the drain from a refused request."""
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


async def test_request_sent_before_drain_but_read_after_gets_503(site: Site) -> None:
    """A bare close would leave open whether the request was executed."""
    gate = site.fake.hold()
    late, busy = await site.client(), await site.client()
    assert (await late.ask(get("/health"))).status == 200
    await busy.send(chat())
    await site.fake.got()

    async def read_answer() -> Answer:
        answer = await late.answer()
        gate.set()
        return answer

    reading = asyncio.create_task(read_answer())
    os.write(late.writer.get_extra_info("socket").fileno(), chat())
    await site.wire.drain(60.0)  # begins at once, before the loop looks at any socket
    answer = await reading
    assert (answer.status, answer.one(b"connection")) == (503, b"close")
    assert (await busy.answer()).status == 200
    assert len(site.fake.served) == 1


async def test_notice_period_counts_towards_drain_deadline(start: Start) -> None:
    site = await start(wire={"drain_notice_s": 60.0})
    port = site.port
    await asyncio.wait_for(site.wire.drain(0.2), DEADLINE_S)
    assert site.wire.draining
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("part", [20, -3])
async def test_drain_answers_503_to_a_half_sent_request(start: Start, part: int) -> None:
    site = await start(wire={"linger_s": 0.1})
    client = await site.send(chat()[:part])
    [connection] = site.wire.clients
    await eventually(lambda: connection._reader.state is not ParserState.NOTHING)
    draining = asyncio.create_task(site.wire.drain(60.0))
    answer = await client.answer()
    assert (answer.status, answer.one(b"connection")) == (503, b"close")
    client.close()
    await draining


async def test_dismissed_idle_connection_closes_without_response(site: Site) -> None:
    client = await site.client()
    await eventually(lambda: site.wire.clients)
    [connection] = site.wire.clients
    connection.close_for_drain(site.clock())
    assert await client.closed() == b""


async def test_drain_deadline_cuts_off_running_requests(start: Start) -> None:
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

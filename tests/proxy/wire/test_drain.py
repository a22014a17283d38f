"""SIGTERM's half of the wire: nothing new, the old to its end, within a deadline."""

from __future__ import annotations

import asyncio

import pytest

from proxy.wire.request_reader import Reading
from tests.proxy.wire import scripts
from tests.proxy.wire.client import DEADLINE_S, BrokenError, chat, get
from tests.proxy.wire.conftest import Start
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
    await asyncio.sleep(0.05)
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


async def test_load_balancers_are_told_while_all_is_served_still(start: Start) -> None:
    """They ask now and then; what they send until they have heard must not be refused."""
    site = await start(wire={"notice_s": 60.0})
    client = await site.client()
    assert (await client.ask(get("/ready"))).status == 200
    draining = asyncio.create_task(site.wire.drain(90.0))
    await eventually(lambda: site.wire.leaving)
    answer = await client.ask(get("/ready"))
    assert (answer.status, answer.one(b"retry-after")) == (503, b"1")
    assert (await site.ask(get("/health"))).status == 200
    assert (await site.ask(chat())).status == 200  # on a new connection
    assert (await client.ask(chat())).status == 200
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)


async def test_the_notice_is_part_of_the_deadline(start: Start) -> None:
    site = await start(wire={"notice_s": 60.0})
    port = site.port
    await asyncio.wait_for(site.wire.drain(0.2), DEADLINE_S)
    assert site.wire.draining
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_new_connections_are_refused(start: Start) -> None:
    site = await start()
    port = site.port
    gate = asyncio.Event()
    site.fake.always(scripts.gated(gate, scripts.answer()))
    client = await site.client()
    await client.send(chat())
    await site.fake.got()
    draining = asyncio.create_task(site.wire.drain(60.0))
    await asyncio.sleep(0.05)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    gate.set()
    assert (await client.answer()).status == 200
    await draining


async def test_new_requests_on_old_connections_are_refused(start: Start) -> None:
    site = await start()
    gate = asyncio.Event()
    site.fake.always(scripts.gated(gate, scripts.answer()))
    busy, idle = await site.client(), await site.client()
    assert (await idle.ask(get("/health"))).status == 200
    await busy.send(chat())
    await site.fake.got()
    draining = asyncio.create_task(site.wire.drain(60.0))
    await asyncio.sleep(0.05)
    await idle.send(chat())
    try:
        answer = await idle.answer()
    except (BrokenError, ConnectionError):
        pass  # closed at once: a client knows that it may send again
    else:
        assert answer.status == 503
        assert answer.one(b"connection") == b"close"
        assert await idle.closed() == b""
    gate.set()
    answer = await busy.answer()
    assert answer.one(b"connection").lower() == b"close"
    await draining
    assert len(site.fake.served) == 1


@pytest.mark.parametrize("part", [20, -3])
async def test_who_is_in_the_middle_of_a_request_hears_why(start: Start, part: int) -> None:
    site = await start(wire={"linger_s": 0.1})
    client = await site.client()
    await client.send(chat()[:part])
    [connection] = site.wire.clients
    await eventually(lambda: connection._reader.state is not Reading.NOTHING)
    draining = asyncio.create_task(site.wire.drain(60.0))
    answer = await client.answer()
    assert (answer.status, answer.one(b"connection")) == (503, b"close")
    client.close()
    await draining


async def test_probes_hear_of_it(start: Start) -> None:
    site = await start()
    gate = asyncio.Event()
    site.fake.always(scripts.gated(gate, scripts.answer()))
    busy, prober = await site.client(), await site.client()
    assert (await prober.ask(get("/ready"))).status == 200
    await busy.send(chat())
    await site.fake.got()
    draining = asyncio.create_task(site.wire.drain(60.0))
    await asyncio.sleep(0.05)
    assert (await prober.ask(get("/ready"))).status == 503
    gate.set()
    await busy.answer()
    await draining


async def test_who_waits_in_the_queue_is_old_enough(start: Start) -> None:
    site = await start(Fake("w0", max_requests=1))
    gate = asyncio.Event()
    site.fake.always(scripts.gated(gate, scripts.answer()))
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
        async with asyncio.timeout(DEADLINE_S):
            await call.lost.wait()
    await site.settled()


async def test_closing_leaves_nothing(site: Site) -> None:
    site.fake.always(scripts.stall)
    clients = [await site.client() for _ in range(5)]
    for client in clients:
        await client.send(chat())
    await site.fake.got(5)
    await site.wire.close()
    for client in clients:
        await client.closed()
    for call in site.fake.served:
        async with asyncio.timeout(DEADLINE_S):
            await call.lost.wait()
    await site.settled()

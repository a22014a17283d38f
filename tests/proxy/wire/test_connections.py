"""Connections to workers: kept, used again, and never trusted to be alive."""

from __future__ import annotations

import asyncio

from tests.proxy.wire import scripts
from tests.proxy.wire.client import chat
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.site import Fake, Site, eventually


async def test_clients_share_them(site: Site) -> None:
    for _ in range(10):
        assert (await site.ask(chat())).status == 200
    assert len(site.fake.connections) == 1


async def test_there_are_as_many_as_requests_at_once(site: Site) -> None:
    gate = asyncio.Event()
    site.fake.always(scripts.gated(gate, scripts.answer()))
    asking = [asyncio.create_task(site.ask(chat())) for _ in range(10)]
    await site.fake.got(10)
    gate.set()
    await asyncio.gather(*asking)
    for _ in range(10):
        await site.ask(chat())
    assert len(site.fake.connections) == 10


async def test_one_that_the_worker_closed_is_not_used(site: Site) -> None:
    async def answer_and_close(call: Call) -> None:
        await scripts.answer()(call)
        call.close()

    site.fake.always(answer_and_close)
    for _ in range(5):
        assert (await site.ask(chat())).status == 200
        await eventually(lambda: not site.fake.open)
    assert len(site.fake.connections) == 5


async def test_one_that_says_close_is_not_used(site: Site) -> None:
    site.fake.always(scripts.answer(200, b"{}", (b"Connection", b"close")))
    for _ in range(3):
        assert (await site.ask(chat())).status == 200
    assert len(site.fake.connections) == 3


async def test_one_that_dies_as_a_request_is_put_on_it(start: Start) -> None:
    """It was never read: it goes out again on a new connection, and nobody has failed."""
    for end in (scripts.hang_up, scripts.reset):
        site = await start(Fake("w0"), router={"retry_budget": 0.0})

        async def stale(call: Call, end: Script = end) -> None:
            if len(call.connection.calls) > 1:
                await end(call)
            else:
                await scripts.answer()(call)

        site.fake.always(stale)
        client = await site.client()
        for _ in range(10):
            assert (await client.ask(chat())).status == 200
        assert site.worker().breaker.closed


async def test_a_fresh_one_that_dies_is_a_failure(start: Start) -> None:
    """Or a worker that hangs up on everybody would be asked for ever."""
    site = await start(Fake("w0"))
    site.fake.always(scripts.hang_up)
    assert (await site.ask(chat())).status == 502
    assert len(site.fake.served) == 1


async def test_idle_ones_are_given_up_before_the_worker_does(start: Start) -> None:
    site = await start()
    site.stand_still()
    await site.ask(chat())
    assert len(site.fake.open) == 1
    site.skip(4.9)  # uvicorn's patience is 5 s
    await eventually(lambda: not site.fake.open)
    assert (await site.ask(chat())).status == 200


async def test_a_worker_that_starts_again_is_found_again(site: Site) -> None:
    await site.ask(chat())
    await site.fake.die()
    await site.fake.listen()
    assert (await site.ask(chat())).status == 200


async def test_a_cancelled_one_is_not_used_again(site: Site) -> None:
    """The rest of that answer may still come."""
    site.fake.then(scripts.stream(3, end="stall"))
    client = await site.client()
    await client.send(chat(stream=True))
    await client.head()
    client.close()
    await site.settled()
    assert (await site.ask(chat())).json()["choices"]
    assert len(site.fake.connections) == 2


async def test_their_count_is_right(site: Site) -> None:
    def counted() -> dict[str, int]:
        return {state: number for _, state, number in site.metrics.upstream_connections()}

    gate = asyncio.Event()
    site.fake.always(scripts.gated(gate, scripts.answer()))
    asking = [asyncio.create_task(site.ask(chat())) for _ in range(3)]
    await site.fake.got(3)
    assert counted() == {"idle": 0, "busy": 3}
    gate.set()
    await asyncio.gather(*asking)
    assert counted() == {"idle": 3, "busy": 0}
    for each in site.fake.open:
        each.reset()
    await eventually(lambda: counted() in ({}, {"idle": 0, "busy": 0}), counted)

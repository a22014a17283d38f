"""Connections to workers: kept, used again, and never trusted to be alive."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.raw_client import Client, chat
from tests.proxy.wire.site import Fake, Site, eventually


async def test_one_that_the_worker_closed_is_not_used(site: Site) -> None:
    async def answer_and_close(call: Call) -> None:
        await scripts.answer()(call)
        call.close()

    site.fake.always(answer_and_close)
    for _ in range(5):
        assert (await site.ask(chat())).status == 200
        await eventually(lambda: not site.fake.open)
    assert len(site.fake.connections) == 5


async def idle(site: Site) -> Client:
    """Have one idle connection to each worker; return a connection of a client."""
    client = await site.client()
    while not all(fake.open for fake in site.fakes.values()):
        assert (await client.ask(chat())).status == 200
    return client


@pytest.mark.parametrize("size", [10, 40_000])
async def test_one_that_closes_as_a_request_is_put_on_it(start: Start, size: int) -> None:
    """Its worker reads none of it: it goes out again to the same worker, and nothing has failed."""
    site = await start(Fake("w0"), router={"retry_budget": 0.0})
    client = await idle(site)
    for _ in range(10):
        before = len(site.fake.served)
        client.writer.write(chat("x" * size))  # is read before the end of the connection is
        site.fake.open[0].close_unread()
        assert (await client.answer()).status == 200
        assert len(site.fake.served) == before + 1
        await eventually(lambda: len(site.fake.open) == 1)
    assert site.fake.faults == []
    assert site.worker().breaker.has_no_failures
    assert site.metrics.retries == {}


@pytest.mark.parametrize("end", [scripts.hang_up, scripts.reset])
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_request_that_was_read_is_not_resent(
    start: Start, end: Script, workers: int
) -> None:
    """Though its connection had served others: it may be the request that ends it."""
    site = await start(*(Fake(f"w{n}") for n in range(workers)), router={"policy": "round_robin"})
    client = await idle(site)
    ended: list[str] = []

    async def first_ends(call: Call) -> None:
        ended.append(call.connection.worker.name)
        await (end if len(ended) == 1 else scripts.answer())(call)

    site.always(first_ends)
    assert (await client.ask(chat())).status == (200 if workers > 1 else 502)
    assert len(ended) == len(set(ended)) == workers
    assert not site.worker(ended[0]).breaker.has_no_failures


async def test_a_cancelled_one_is_not_used_again(site: Site) -> None:
    """The rest of that answer may still come."""
    site.fake.then(scripts.stream(3, end="stall"))
    client = await site.send(chat(stream=True))
    await client.head()
    client.close()
    await site.settled()
    assert (await site.ask(chat())).json()["choices"]
    assert len(site.fake.connections) == 2


async def test_their_count_is_right(site: Site) -> None:
    def counted() -> dict[str, int]:
        return {state: number for _, state, number in site.metrics.upstream_connections()}

    gate = site.fake.hold()
    asking = [asyncio.create_task(site.ask(chat())) for _ in range(3)]
    await site.fake.got(3)
    assert counted() == {"idle": 0, "busy": 3}
    gate.set()
    await asyncio.gather(*asking)
    assert counted() == {"idle": 3, "busy": 0}
    for each in site.fake.open:
        each.reset()
    await eventually(lambda: counted() in ({}, {"idle": 0, "busy": 0}), counted)

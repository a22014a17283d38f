"""Connections to workers: reuse, and loss while idle."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.raw_client import Client, chat
from tests.proxy.wire.site import Fake, Site, eventually


async def open_idle_connections(site: Site) -> Client:
    """Open one idle connection to each worker; return a client's connection."""
    client = await site.client()
    while not all(fake.open for fake in site.fakes.values()):
        assert (await client.ask(chat())).status == 200
    return client


@pytest.mark.parametrize("size", [10, 40_000])
async def test_request_is_resent_if_idle_connection_closes_unread(start: Start, size: int) -> None:
    """The request goes to the same worker again, and nothing counts as failed."""
    site = await start(Fake("w0"), router={"retry_budget": 0.0})
    client = await open_idle_connections(site)
    for _ in range(10):
        before = len(site.fake.served)
        client.writer.write(chat("x" * size))  # is sent before the close is seen
        site.fake.open[0].close_unread()
        assert (await client.answer()).status == 200
        assert len(site.fake.served) == before + 1
        await eventually(lambda: len(site.fake.open) == 1)
    assert site.fake.faults == []
    assert site.worker().breaker.has_no_failures
    assert site.metrics.retries == {}


@pytest.mark.parametrize("end", [scripts.hang_up, scripts.reset])
@pytest.mark.parametrize("workers", [1, 2])
async def test_request_is_not_resent_to_a_worker_that_read_it(
    start: Start, end: Script, workers: int
) -> None:
    """The connection had served other requests, but this request may be what ends it."""
    site = await start(*(Fake(f"w{n}") for n in range(workers)), router={"policy": "round_robin"})
    client = await open_idle_connections(site)
    ended: list[str] = []

    async def first_ends(call: Call) -> None:
        ended.append(call.connection.worker.name)
        await (end if len(ended) == 1 else scripts.answer())(call)

    site.always(first_ends)
    assert (await client.ask(chat())).status == (200 if workers > 1 else 502)
    assert len(ended) == len(set(ended)) == workers
    assert not site.worker(ended[0]).breaker.has_no_failures


async def test_upstream_connections_are_counted_by_state(site: Site) -> None:
    def counts_by_state() -> dict[str, int]:
        return {state: number for _, state, number in site.metrics.upstream_connections()}

    gate = site.fake.hold()
    asking = [asyncio.create_task(site.ask(chat())) for _ in range(3)]
    await site.fake.got(3)
    assert counts_by_state() == {"idle": 0, "busy": 3}
    gate.set()
    await asyncio.gather(*asking)
    assert counts_by_state() == {"idle": 3, "busy": 0}
    first, *others = site.fake.open
    first.close_unread()
    for connection in others:
        connection.reset()
    await eventually(lambda: counts_by_state() in ({}, {"idle": 0, "busy": 0}), counts_by_state)

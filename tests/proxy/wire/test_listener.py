"""The listener: clients wait in the kernel's queue while files lack."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import BrokenError, Client, chat, get
from tests.proxy.wire.site import Site, eventually


def limit_files(site: Site, clients: int) -> None:
    """Leave room for about so many clients and their workers."""
    listener = site.wire._listener
    listener.max_files = listener.lowest_free_file() + 2 * clients


async def test_clients_wait_until_files_for_their_workers_are_free(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    limit_files(site, 8)
    gate = site.hold()
    clients = [await site.send(chat()) for _ in range(30)]
    await eventually(lambda: site.wire._listener.is_paused)
    await asyncio.sleep(0.1)  # several sweeps
    assert 1 <= len(site.wire.clients) < 12
    assert caplog.text.count("clients have to wait for free files") == 1
    gate.set()
    for client in clients:
        assert (await client.answer()).status == 200
        client.close()
    await eventually(lambda: not site.wire._listener.is_paused)
    assert site.metrics.connects_failed > 0
    assert (await site.ask(get("/health"))).status == 200


async def test_clients_that_were_idle_for_a_second_give_up_their_files(site: Site) -> None:
    idle = [await site.client() for _ in range(12)]
    for client in idle:
        assert (await client.ask(chat())).status == 200
    fresh = await site.client()
    await eventually(lambda: len(site.wire.clients) == 13)
    site.skip(1.0)
    await fresh.ask(get("/health"))
    limit_files(site, 2)
    answers = [await site.send(chat()) for _ in range(8)]
    for client in answers:
        assert (await client.answer()).status == 200
        client.close()
    for client in idle:
        assert await client.closed() == b""
    assert (await fresh.ask(chat())).status == 200


async def test_waiting_clients_are_refused_when_the_router_stops(start: Start) -> None:
    site = await start()
    limit_files(site, 2)
    gate = site.hold()
    clients = [await site.send(chat()) for _ in range(20)]
    await eventually(lambda: site.wire._listener.is_paused)
    draining = asyncio.create_task(site.wire.drain(60.0))
    await eventually(lambda: site.wire.draining)
    gate.set()
    statuses = [await status_of(client) for client in clients]
    await draining
    assert statuses.count(200) >= 1
    assert set(statuses) == {200, None}
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", site.port)


async def status_of(client: Client) -> int | None:
    """Return a response's status; None for a closed connection."""
    try:
        return (await client.answer()).status
    except (ConnectionError, BrokenError):
        return None
    finally:
        client.close()

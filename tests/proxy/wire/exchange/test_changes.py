"""Reloads and changes of the fleet while requests run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from proxy.core.router import RouterSettings
from proxy.wire.client.connection import ClientConnection
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Client, chat
from tests.proxy.wire.site import Fake, Site, eventually


async def test_reload_keeps_running_requests(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1", up=False))
    gate = site.fakes["w0"].hold(scripts.stream(3))
    client = await site.send(chat(stream=True))
    await site.fakes["w0"].got()
    site.router.reconfigure(RouterSettings(), [site.worker("w1").spec])
    site.up("w1")
    assert (await site.ask(chat())).status == 200
    assert len(site.fakes["w1"].served) == 1
    gate.set()
    assert (await client.answer()).body.endswith(scripts.DONE)
    assert len(site.fakes["w0"].served) == 1
    site.skip(5)
    await eventually(lambda: not site.fakes["w0"].open)  # its connections are not kept


async def test_new_settings_hold_at_once(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"), router={"policy": "round_robin"})
    await asyncio.gather(*(site.ask(chat()) for _ in range(10)))
    spec = site.worker("w0").spec
    settings = replace(site.router.settings, queue_requests=0, policy="least_loaded")
    site.router.reconfigure(settings, [replace(spec, api_key="new", max_requests=1)])
    assert site.fleet.roster.get("w1") is None
    before = len(site.fakes["w1"].served)
    gate = site.fakes["w0"].hold()
    asking = asyncio.create_task(site.ask(chat()))
    await eventually(lambda: site.worker("w0").requests == 1)
    assert (await site.ask(chat())).status == 429
    gate.set()
    assert (await asking).status == 200
    assert site.fakes["w0"].served[-1].all(b"authorization") == [b"Bearer new"]
    assert len(site.fakes["w1"].served) == before


async def test_failure_at_the_old_url_does_not_bar_the_new_one(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1", up=False))
    gate = site.fakes["w0"].hold(scripts.reset)
    asking = asyncio.create_task(site.ask(chat()))
    await site.fakes["w0"].got()
    spec = replace(site.worker("w0").spec, url=site.fakes["w1"].url)
    site.router.reconfigure(RouterSettings(), [spec])
    site.charged.append(site.worker("w0"))
    site.up("w0")
    gate.set()
    assert (await asking).status == 200


@pytest.mark.parametrize(
    ("limit", "large", "status"),
    [
        ("max_body_bytes", chat("x" * 2000), 413),
        ("max_header_bytes", chat("hi", b"X-Long: " + b"x" * 2000), 431),
    ],
    ids=["body", "header"],
)
async def test_new_limits_hold_on_open_connections_from_the_next_request(
    site: Site, limit: str, large: bytes, status: int
) -> None:
    known, partial = await site.client(), await site.client()
    for _ in range(2):
        assert (await known.ask(large)).status == 200
    half = len(large) - 10
    await partial.send(large[:half])
    await eventually(lambda: site.wire.body_budget.held)
    before = site.wire.settings
    site.wire.reconfigure(replace(before, linger_s=0.1, **{limit: 1000}))
    assert (await known.ask(large)).status == status
    await partial.send(large[half:])
    assert (await partial.answer()).status == 200
    site.wire.reconfigure(before)
    assert (await partial.ask(large)).status == 200


async def test_new_limits_hold_on_accepted_connections_not_yet_made(site: Site) -> None:
    """With TLS, a connection is made some time after it is accepted."""
    connection = ClientConnection(site.wire)
    site.wire.reconfigure(replace(site.wire.settings, linger_s=0.1, max_body_bytes=1000))
    server = await asyncio.get_running_loop().create_server(lambda: connection, "127.0.0.1", 0)
    client = await Client.connect(server.sockets[0].getsockname()[1])
    answer = await client.ask(chat("x" * 2000))
    client.close()
    server.close()
    assert answer.status == 413

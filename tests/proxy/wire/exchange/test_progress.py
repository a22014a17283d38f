"""What the router does as a response arrives."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.exchange.test_queue import fill
from tests.proxy.wire.raw_client import request
from tests.proxy.wire.site import Fake, Site


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_an_embedding_teaches_the_prefill_pace(site: Site, framing: str) -> None:
    site.fake.always(scripts.answer(framing=framing))
    body = b'{"model": "tiny", "input": "hi"}'
    assert (await site.ask(request(body, path="/v1/embeddings"))).status == 200
    assert site.worker().pace.prefills == 1.0


async def test_end_of_a_request_dispatches_the_queue(start: Start) -> None:
    site = await start(Fake("w0", max_requests=1))
    gate = asyncio.Event()
    clients = await fill(site, gate, 1)
    site.wire.ticks.stop()
    gate.set()
    for client in clients:
        assert (await client.answer()).status == 200
    site.wire.ticks.start()

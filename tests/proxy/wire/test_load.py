"""Requests go elsewhere while a worker's responses are overdue."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, Site, eventually


async def send(site: Site, *requests: bytes) -> None:
    """Send requests at once on separate connections, and wait until workers have them."""
    before = len(site.served())
    for data in requests:
        await (await site.client()).send(data)
    await eventually(lambda: len(site.served()) == before + len(requests))


SYSTEM = "you are a helpful assistant. " * 300


def prompts(number: int, start: int = 0, system: str = SYSTEM) -> list[bytes]:
    return [
        chat(f"{system}question {n}", stream=True, max_tokens=500)
        for n in range(start, start + number)
    ]


async def known_prefix(start: Start) -> Site:
    """Start two workers, of which one has a long system prompt cached."""
    site = await start(Fake("w0"), Fake("w1"))
    site.always(scripts.stream(3, gap_s=0.03))
    for _ in range(5):
        assert (await site.ask(chat(SYSTEM, stream=True))).status == 200
    for fake in site.fakes.values():
        fake.calls.clear()
    return site


@pytest.mark.parametrize("system", [SYSTEM, ""], ids=["one prefix", "none"])
async def test_overdue_responses_keep_requests_away(start: Start, system: str) -> None:
    """The worker hangs while its /health responds."""
    site = await known_prefix(start)
    recovered = {name: asyncio.Event() for name in site.fakes}
    for name, fake in site.fakes.items():
        fake.always(scripts.gated(recovered[name], scripts.stream(2)))
    await send(site, *prompts(20, system=system))
    hung = max(site.fakes, key=lambda name: len(site.fakes[name].served))
    (well,) = site.fakes.keys() - {hung}
    recovered[well].set()
    await eventually(lambda: site.worker(well).requests == 0)
    before = len(site.fakes[hung].served)
    site.skip(10)
    for number in range(50):
        await site.send(prompts(1, 100 + number, system)[0])
        await eventually(lambda: len(site.served()) == 21 + number)  # noqa: B023 - at once
        await eventually(lambda: site.worker(well).requests == 0)
    assert len(site.fakes[hung].served) - before <= 5

"""Requests go elsewhere while a worker's responses are overdue."""

from __future__ import annotations

import asyncio

import pytest

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, eventually

SYSTEM = "you are a helpful assistant. " * 300


@pytest.mark.parametrize("system", [SYSTEM, ""], ids=["one prefix", "none"])
async def test_overdue_responses_keep_requests_away(start: Start, system: str) -> None:
    """The worker hangs while its /health responds. It may have a long system prompt cached."""
    site = await start(Fake("w0"), Fake("w1"))
    site.always(scripts.stream(3, gap_s=0.03))
    for _ in range(5):
        assert (await site.ask(chat(SYSTEM, stream=True))).status == 200
    for fake in site.fakes.values():
        fake.calls.clear()

    async def send(number: int) -> None:
        await site.send(chat(f"{system}question {number}", stream=True, max_tokens=500))

    recovered = {name: asyncio.Event() for name in site.fakes}
    for name, fake in site.fakes.items():
        fake.always(scripts.gated(recovered[name], scripts.stream(2)))
    for number in range(20):
        await send(number)
    await eventually(lambda: len(site.served()) == 20)
    hung = max(site.fakes, key=lambda name: len(site.fakes[name].served))
    (well,) = site.fakes.keys() - {hung}
    recovered[well].set()
    await eventually(lambda: site.worker(well).requests == 0)
    before = len(site.fakes[hung].served)
    site.skip(10)
    for number in range(20, 70):
        await send(number)
        await eventually(lambda: len(site.served()) == number + 1)  # noqa: B023 - at once
        await eventually(lambda: site.worker(well).requests == 0)
    assert len(site.fakes[hung].served) - before <= 5

"""`python -m benchmarks.replicas.soak`: what it counts."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.replicas import soak
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call, Connection, FakeWorker
from tests.proxy.wire.site import eventually


async def test_requests_above_a_workers_limit_are_counted() -> None:
    workers, fake = soak.CountedFleet(1), FakeWorker("g0")
    opening = asyncio.Event()
    script = workers.observed(fake, scripts.gated(opening, scripts.stall))
    calls = [Call(b"", Connection(fake)) for _ in range(soak.MAX_REQUESTS + 2)]
    tasks = [asyncio.create_task(script(call)) for call in calls]
    await asyncio.sleep(0)
    calls[0].lost.set()  # its router has closed the connection
    await eventually(lambda: workers.above["g0"][soak.WITH] == {1: 1})
    assert workers.requests == soak.MAX_REQUESTS + 2
    for call in calls:
        call.lost.set()
    await asyncio.gather(*tasks)


def test_error_of_the_limit_is_that_of_all_accepted_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = soak.MeteredLoad(0)
    monkeypatch.setattr(load, "_asked_at", load._since + 60)
    load.statuses.update({200: 1190, 502: 20, 429: 500})
    load.cut_off = 50
    assert load.error() == pytest.approx(0.05)

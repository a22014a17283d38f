"""Requests that wait in the queue of a full fleet."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.fleet.leases import Lease
from proxy.core.model.types import Refusal
from proxy.wire.exchange.attempt import Attempt
from proxy.wire.exchange.exchange import Exchange
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Answer, Client, chat
from tests.proxy.wire.site import Fake, Site, eventually


async def start_full(
    start: Start, waiting: int, **router: float
) -> tuple[Site, asyncio.Event, list[Client]]:
    """Occupy the only place of the only worker until the event, and queue `waiting` requests."""
    site = await start(Fake("w0", max_requests=1), router=router)
    gate = site.hold()
    clients = [await site.client() for _ in range(waiting + 1)]
    for number, client in enumerate(clients):
        await client.send(chat(f"number {number}"))
        if number == 0:
            await site.fake.got()
        else:
            await eventually(lambda number=number: len(site.router.queue) == number)
    return site, gate, clients


async def check_served(*clients: Client) -> None:
    for client in clients:
        assert (await client.answer()).status == 200


def retry_after(answer: Answer) -> int:
    text = answer.one(b"retry-after")
    assert text.isdigit()
    return int(text)


async def test_queue_wait_ends_after_queue_wait_s(start: Start) -> None:
    site, gate, (first, second, third) = await start_full(start, 2, queue_wait_s=10.0)
    site.stand_still()
    site.skip(9)
    await asyncio.sleep(0.15)  # the router checks the queue
    assert len(site.router.queue) == 2
    site.skip(1.1)
    for client in (second, third):
        answer = await client.answer()
        assert answer.status in (429, 503)
        answer.error()
        assert retry_after(answer) >= 1
    gate.set()
    assert (await first.answer()).status == 200
    assert len(site.fake.served) == 1


async def test_queued_request_gets_503_when_its_worker_goes_down(start: Start) -> None:
    site, gate, (first, second) = await start_full(start, 1)
    site.down("w0")
    assert (await second.answer()).status == 503
    gate.set()
    assert (await first.answer()).status == 200  # a running request continues


async def test_requests_count_their_wait(start: Start) -> None:
    """A placed request, and one that leaves the queue."""
    site, gate, (first, second, third) = await start_full(start, 2)
    waits: list[float] = []
    site.metrics.at_end = (lambda seen, *_: waits.append(seen.queue_s),)
    site.skip(25.0)
    third.close()
    await eventually(lambda: waits)
    assert waits[0] >= 25.0
    (wait,) = [series for key, series in site.metrics.waits.items() if key[:2] == ("none", "tiny")]
    assert wait.total == waits[0]
    gate.set()
    await check_served(first, second)
    assert waits[1] == 0.0
    assert waits[2] >= 25.0


ENDS = {
    "whole": scripts.answer(),
    "error": scripts.error(400),
    "stream": scripts.stream(2),
    "broken stream": scripts.stream(2, end="reset"),
    "no response": scripts.hang_up,
    "client leaves": scripts.stall,
}


@pytest.mark.parametrize("end", ENDS)
async def test_end_of_a_request_dispatches_the_queue(start: Start, end: str) -> None:
    site = await start(Fake("w0", max_requests=1))
    gate = site.fake.hold_next(ENDS[end])
    first = await site.send(chat(stream=True))
    await site.fake.got()
    second = await site.send(chat())
    await eventually(lambda: len(site.router.queue) == 1)
    site.wire.ticks.stop()
    if end == "client leaves":
        first.close()
    else:
        gate.set()
    await check_served(second)
    site.wire.ticks.start()


async def test_error_in_one_queued_request_does_not_affect_others(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site, gate, clients = await start_full(start, 2)
    first, _ = site.wire.queued.values()
    usual = type(first).placement_decided

    def placed(exchange: Exchange, now: float, answer: Lease | Refusal) -> None:
        if exchange is first:
            assert isinstance(answer, Lease)
            exchange._ticket, exchange._attempt = None, Attempt(exchange, answer)
            raise RuntimeError("no reason")
        usual(exchange, now, answer)

    monkeypatch.setattr(Exchange, "placement_decided", placed)
    site.worker().request_limit = 3  # room for both queued requests
    site.wire.dispatch_queued(site.clock())
    assert (await clients[1].answer()).status == 503
    gate.set()
    assert (await clients[0].answer()).status == 200
    assert (await clients[2].answer()).status == 200
    assert "cannot send a queued request" in caplog.text

"""Requests on workers that probes have marked down."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.model.role import Role
from proxy.wire.exchange.failover import DOWN_GRACE_S
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.exchange.engines import THREE, in_turn, journaled
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.pairs import chat_body, expected, pairs, words
from tests.proxy.wire.raw_client import Answer, chat, request
from tests.proxy.wire.site import Fake, Site, eventually


async def start_hung(start: Start, *names: str) -> tuple[Site, list[asyncio.Task[Answer]]]:
    """Start workers that accept 20 requests, half of them streams, and never respond."""
    site = await start(*(Fake(name) for name in names), router={"policy": "round_robin"})
    site.always(scripts.stall)
    tasks = [
        asyncio.create_task(site.ask(chat(f"q{n}", stream=n % 2 == 0), within=20.0))
        for n in range(20)
    ]
    await eventually(lambda: len(site.served()) == 20)
    return site, tasks


def pass_time(site: Site, seconds: float = DOWN_GRACE_S + 1.0) -> None:
    """Skip time, and check for overdue requests before and after."""
    for skipped in (0.0, seconds):
        site.skip(skipped)
        site.wire._failover.retry_overdue(site.clock(), site.fleet.roster, site.wire.exchanges)


async def test_requests_on_a_down_worker_go_to_other_workers(start: Start) -> None:
    site, tasks = await start_hung(start, "w0", "w1")
    site.fakes["w1"].always(scripts.obey("w1"))
    site.down("w0")
    pass_time(site, DOWN_GRACE_S - 1.0)
    assert len(site.served()) == 20
    site.skip(1.0)
    await eventually(lambda: sum(task.done() for task in tasks) == 10)
    assert {task.result().status for task in tasks if task.done()} == {200}
    site.fakes["w0"].always(scripts.obey("w0"))
    site.up("w0")
    site.down("w1")
    pass_time(site)
    assert {(await task).status for task in tasks} == {200}


@pytest.mark.parametrize("why", ["up again", "nowhere else", "no more retries"])
async def test_requests_stay_on_a_down_worker_as_last_resort(start: Start, why: str) -> None:
    """Their responses may still come."""
    site, tasks = await start_hung(start, "w0", "w1")
    if why == "no more retries":
        later = site.clock() + 600.0
        while site.router._retries.spend(later):
            pass
    for _ in range(2):
        site.down("w0")
        if why == "nowhere else":
            site.down("w1")
        if why == "up again":
            pass_time(site, DOWN_GRACE_S - 1.0)
            site.up("w0")
        pass_time(site)
    assert len(site.served()) == 20
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()


async def test_response_that_has_begun_stays_on_a_down_worker(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    site.always(scripts.stream(1, end="stall"))
    client = await site.send(chat(stream=True))
    await client.head()
    for name in site.fakes:
        site.down(name)
    site.up("w1" if site.fakes["w0"].served else "w0")
    pass_time(site)
    assert len(site.served()) == len(site.wire.exchanges) == 1
    client.close()


@pytest.mark.parametrize(
    ("role", "settings"),
    [(Role.PREFILL, {"retry_budget": 0.0}), (Role.DECODE, {})],
    ids=["prefill", "decode"],
)
async def test_either_leg_of_a_handover_moves(
    start: Start, role: Role, settings: dict[str, float]
) -> None:
    """The worker of one leg hangs and goes down. A prefill leg moves without spending a retry."""
    here = await pairs(start, **settings)
    body = chat_body()
    worker = here.victim(role, body)
    worker.then(scripts.stall)
    asking = asyncio.create_task(here.site.ask(request(body), within=20.0))
    await worker.got(1)
    here.site.down(worker.name)
    pass_time(here.site)
    assert words(await asking) == expected(body)
    await here.settled()


async def test_stream_passes_once_to_the_next_worker_if_one_fails_and_ends_in_one_piece(
    start: Start,
) -> None:
    site, engines = await journaled(start, *THREE)
    failure = scripts.chunk(scripts.event({"error": {"message": "it died", "code": 500}}))

    async def fails(call: Call) -> None:
        engines.accept(call)
        await call.send(scripts.STREAM_HEAD + failure + scripts.LAST_CHUNK)

    in_turn(site, engines.serve(dies_after=3), fails, engines.serve())
    engines.check(await site.ask(engines.request()))
    assert len(engines.asked) == 3

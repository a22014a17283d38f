"""Requests on workers that probes have called down: who goes to another, and who waits on."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.model.role import Role
from proxy.wire.exchange.failover import DOWN_GRACE_S
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.pairs import Pairs, chat_body, expected, pairs, words
from tests.proxy.wire.raw_client import Answer, chat, request
from tests.proxy.wire.site import Fake, Site, eventually


async def hung(start: Start, *names: str) -> tuple[Site, list[asyncio.Task[Answer]]]:
    """Have 20 requests, streams among them, on workers that take all and answer nothing."""
    site = await start(*(Fake(name) for name in names), router={"policy": "round_robin"})
    site.always(scripts.stall)
    asking = [
        asyncio.create_task(site.ask(chat(f"q{n}", stream=n % 2 == 0), within=20.0))
        for n in range(20)
    ]
    await eventually(lambda: len(site.served()) == 20)
    return site, asking


def over(site: Site, seconds: float = DOWN_GRACE_S + 1.0) -> None:
    """Let time pass, and the router look around before and after."""
    for skipped in (0.0, seconds):
        site.skip(skipped)
        site.wire._failover.retry_overdue(site.clock(), site.fleet.roster, site.wire.exchanges)


async def test_who_waits_on_a_worker_that_is_down_goes_to_others(start: Start) -> None:
    site, asking = await hung(start, "w0", "w1")
    site.fakes["w1"].always(scripts.obey("w1"))
    site.down("w0")
    over(site, DOWN_GRACE_S - 1.0)
    assert len(site.served()) == 20
    site.skip(1.0)
    await eventually(lambda: sum(task.done() for task in asking) == 10)
    assert {task.result().status for task in asking if task.done()} == {200}
    site.fakes["w0"].always(scripts.obey("w0"))
    site.up("w0")
    site.down("w1")
    over(site)
    assert {(await task).status for task in asking} == {200}


@pytest.mark.parametrize("why", ["up again", "nowhere else", "no more retries"])
async def test_they_stay_where_they_are(start: Start, why: str) -> None:
    """Their answers may come yet."""
    site, asking = await hung(start, "w0", "w1")
    if why == "no more retries":
        later = site.clock() + 600.0
        while site.router._retries.spend(later):
            pass
    for _ in range(2):
        site.down("w0")
        if why == "nowhere else":
            site.down("w1")
        if why == "up again":
            over(site, DOWN_GRACE_S - 1.0)
            site.up("w0")
        over(site)
    assert len(site.served()) == 20
    assert not any(task.done() for task in asking)
    for task in asking:
        task.cancel()


async def test_an_answer_that_has_begun_is_waited_for(start: Start) -> None:
    site = await start(Fake("w0"), Fake("w1"))
    site.always(scripts.stream(1, end="stall"))
    client = await site.send(chat(stream=True))
    await client.head()
    for name in site.fakes:
        site.down(name)
    site.up("w1" if site.fakes["w0"].served else "w0")
    over(site)
    assert len(site.served()) == len(site.wire.exchanges) == 1
    client.close()


async def test_a_prefill_needs_no_retry_to_be_done_elsewhere(start: Start) -> None:
    await goes_elsewhere(await pairs(start, retry_budget=0.0), Role.PREFILL)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_either_leg_of_a_hand_over(start: Start, role: Role) -> None:
    await goes_elsewhere(await pairs(start), role)


async def goes_elsewhere(here: Pairs, role: Role) -> None:
    """Let the worker of one leg hang and go down; the answer is another's, and whole."""
    body = chat_body()
    hung = here.victim(role, body)
    hung.then(scripts.stall)
    asking = asyncio.create_task(here.site.ask(request(body), within=20.0))
    await hung.got(1)
    here.site.down(hung.name)
    over(here.site)
    assert words(await asking) == expected(body)
    await here.settled()

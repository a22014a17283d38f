"""A decode worker that is no longer what it was when the prefill is done.

It was chosen before the prefill, which may have taken half a minute. What the prefill left behind
was not used yet, and is there for any decode worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from proxy.core.model.role import Role
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call, Script
from tests.proxy.wire.pairs import Pairs, chat_body, expected, pairs, words
from tests.proxy.wire.raw_client import Answer
from tests.proxy.wire.site import Fake, Site

Change = Callable[[Site, str], object]


def breaks(site: Site, name: str) -> None:
    for _ in range(3):
        site.fleet.health.failed(site.worker(name), site.clock())


CHANGES: dict[str, Change] = {
    "down": lambda site, name: site.down(name),
    "broken": breaks,
    "draining": lambda site, name: site.fleet.roster.drain(name),
    "gone": lambda site, name: site.fleet.roster.remove(name),
}


async def meanwhile(here: Pairs, body: bytes, change: Change) -> tuple[Answer, str]:
    """Ask, and let something happen to the decode worker while the prefill runs."""
    fake = here.site.fakes["p0"]
    victim, rest = here.victim(Role.DECODE, body).name, asyncio.Event()

    async def prefill(call: Call) -> None:
        await rest.wait()
        await usual(call)

    usual: Script = here.kv.worker(fake, "prefill")
    fake.then(prefill)
    client = await here.send(body)
    await fake.got(1)
    change(here.site, victim)
    rest.set()
    return await client.answer(), victim


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", CHANGES)
async def test_another_decode_worker_takes_over(start: Start, how: str, stream: bool) -> None:
    here = await pairs(start, prefills=1, decodes=2, max_attempts=1)  # it costs no retry
    body = chat_body(stream=stream)
    answer, victim = await meanwhile(here, body, CHANGES[how])
    assert words(answer) == expected(body)
    await here.settled()
    other = "d1" if victim == "d0" else "d0"
    assert here.legs() == ["prefill p0", f"decode {other}"]
    assert here.kv.ends() == ["read"]
    assert here.site.metrics.handovers.ends == {"prefilled": 1, "transferred": 1}
    [told] = here.site.metrics.recent.newest(1)
    assert (told.prefill_worker, told.worker) == ("p0", other)


@pytest.mark.parametrize("how", ["down", "broken"])
async def test_without_another_decode_worker_it_begins_anew(start: Start, how: str) -> None:
    here = await pairs(start, Fake("s0", Role.SHORT, up=False), prefills=1, decodes=1)

    def change(site: Site, name: str) -> None:
        site.up("s0")
        site.fleet.roster.set_served("s0", ("tiny",), 16384)
        CHANGES[how](site, name)

    body = chat_body()
    answer, _ = await meanwhile(here, body, change)
    assert words(answer) == expected(body)
    await here.settled(left=1)  # nobody is there who could give them back
    assert here.legs() == ["prefill p0", "whole s0"]
    ends = here.site.metrics.handovers.ends
    assert ends == {"prefilled": 1, "given_up": 1, "left_to_expire": 1}


@pytest.mark.parametrize("how", ["down", "draining", "gone"])
async def test_where_there_is_nobody_else_it_goes_where_it_was_to(start: Start, how: str) -> None:
    """Its probes may be wrong; and a worker that drains finishes what it was given."""
    here = await pairs(start, prefills=1, decodes=1)
    body = chat_body()
    answer, _ = await meanwhile(here, body, CHANGES[how])
    assert words(answer) == expected(body)
    await here.settled()
    assert here.legs() == ["prefill p0", "decode d0"]


async def test_one_that_would_fetch_it_too_late_is_spared(start: Start) -> None:
    """What it has been given meanwhile comes first."""
    here = await pairs(start, prefills=1, decodes=1, transfer_within_s=24.0)

    def change(site: Site, name: str) -> None:
        site.worker(name).foreign_tokens = 1e9

    body = chat_body()
    answer, _ = await meanwhile(here, body, change)
    assert words(answer) == expected(body)
    await here.settled()
    assert sorted(here.legs()) == ["prefill p0", "release d0", "whole d0"]
    ends = here.site.metrics.handovers.ends
    assert ends == {"prefilled": 1, "given_up": 1, "released": 1}


async def test_where_a_prefill_is_told_who_comes_nobody_else_does(start: Start) -> None:
    here = await pairs(start, prefills=1, decodes=2)
    connector = here.site.wire.connector
    assert connector is not None
    connector.names_decode = True  # type: ignore[misc]
    body = chat_body()
    answer, victim = await meanwhile(here, body, CHANGES["down"])
    assert words(answer) == expected(body)
    await here.settled()
    other = "d1" if victim == "d0" else "d0"
    assert here.legs()[0] == "prefill p0"
    assert f"decode {victim}" not in here.legs()
    assert f"release {other}" in here.legs()

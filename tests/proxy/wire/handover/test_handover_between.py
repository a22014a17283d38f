"""Decode workers that change between the two legs.

The transfer parameters are unused then, and any decode worker may use them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proxy.core.model.role import Role
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.pairs import Pairs, chat_body, expected, pairs, words
from tests.proxy.wire.site import Fake, Site

Change = Callable[[Site, str], object]


def break_worker(site: Site, name: str) -> None:
    for _ in range(3):
        site.fleet.health.record_failure(site.worker(name), site.clock())


CHANGES: dict[str, Change] = {
    "down": lambda site, name: site.down(name),
    "broken": break_worker,
    "draining": lambda site, name: site.fleet.roster.drain(name),
    "gone": lambda site, name: site.fleet.roster.remove(name),
}


async def send_with_change(here: Pairs, body: bytes, change: Change) -> str:
    """Have a request served whose decode worker changes while the prefill runs."""
    victim, rest = here.victim(Role.DECODE, body).name, here.hold("p0")
    client = await here.send(body)
    await here.site.fakes["p0"].got(1)
    change(here.site, victim)
    rest.set()
    assert words(await client.answer()) == expected(body)
    return victim


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("change", CHANGES)
async def test_another_decode_worker_takes_the_leg(start: Start, change: str, stream: bool) -> None:
    here = await pairs(start, prefills=1, decodes=2, max_attempts=1)  # no retry is spent
    body = chat_body(stream=stream)
    victim = await send_with_change(here, body, CHANGES[change])
    await here.settled()
    other = "d1" if victim == "d0" else "d0"
    assert here.legs() == ["prefill p0", f"decode {other}"]
    assert here.kv.ends() == ["read"]
    assert here.site.metrics.handovers.ends == {"prefilled": 1, "transferred": 1}
    [record] = here.site.metrics.recent.newest(1)
    assert (record.prefill_worker, record.worker) == ("p0", other)


@pytest.mark.parametrize("change", ["down", "broken"])
async def test_request_is_served_whole_without_another_decode_worker(
    start: Start, change: str
) -> None:
    here = await pairs(start, Fake("s0", Role.SHORT, up=False), prefills=1, decodes=1)

    def with_short_worker(site: Site, name: str) -> None:
        site.up("s0")
        site.fleet.roster.set_served("s0", ("tiny",), 16384)
        CHANGES[change](site, name)

    body = chat_body()
    await send_with_change(here, body, with_short_worker)
    await here.settled(left=1)  # no worker can release them
    assert here.legs() == ["prefill p0", "whole s0"]
    ends = here.site.metrics.handovers.ends
    assert ends == {"prefilled": 1, "given_up": 1, "left_to_expire": 1}


@pytest.mark.parametrize("change", ["down", "draining", "gone"])
async def test_only_decode_worker_gets_the_leg_in_any_state(here: Pairs, change: str) -> None:
    """Its probes may be wrong, and a draining worker finishes its requests."""
    body = chat_body()
    await send_with_change(here, body, CHANGES[change])
    await here.settled()
    assert here.legs() == ["prefill p0", "decode d0"]


async def test_transfer_that_would_be_too_late_is_given_up(start: Start) -> None:
    """The decode worker got much other work during the prefill."""
    here = await pairs(start, prefills=1, decodes=1, transfer_within_s=24.0)

    def change(site: Site, name: str) -> None:
        site.worker(name).foreign_tokens = 1e9

    body = chat_body()
    await send_with_change(here, body, change)
    await here.settled()
    assert sorted(here.legs()) == ["prefill p0", "release d0", "whole d0"]
    ends = here.site.metrics.handovers.ends
    assert ends == {"prefilled": 1, "given_up": 1, "released": 1}


async def test_prefill_bound_to_a_decode_worker_is_not_moved(start: Start) -> None:
    here = await pairs(start, prefills=1, decodes=2)
    connector = here.site.wire.connector
    assert connector is not None
    connector.names_decode = True  # type: ignore[misc]
    body = chat_body()
    victim = await send_with_change(here, body, CHANGES["down"])
    await here.settled()
    other = "d1" if victim == "d0" else "d0"
    assert here.legs()[0] == "prefill p0"
    assert f"decode {victim}" not in here.legs()
    assert f"release {other}" in here.legs()

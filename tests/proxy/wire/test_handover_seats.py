"""Decode workers whose seats are taken: hand-overs wait, and those that come too late cost nobody.

A decode worker's engine has as many seats as it was started with. What waits there for one may wait
for longer than the prefill worker keeps its blocks.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.core.records import Gauges
from proxy.core.retries import AT_REST
from tests.proxy.wire import scripts
from tests.proxy.wire.client import request
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.kv import Faults
from tests.proxy.wire.pairs import Pairs, chat_body, expected, pairs, words
from tests.proxy.wire.site import eventually

if TYPE_CHECKING:
    from tests.proxy.wire.fake_worker import Call

TOO_LATE_S = 26.5  # of NIXL's 30 s
SEATS = 2


async def test_any_number_may_be_late_for_nobody_has_failed(start: Start) -> None:
    """With a failure each, more than the retry budget bears would end with a 504."""
    here = await pairs(start, prefills=1, decodes=1, retry_budget=0.01)
    count = int(AT_REST) + 5
    here.kv.wrong("d0", *[Faults(before=scripts.stall)] * count)
    bodies = [chat_body(stream=True) for _ in range(count)]
    clients = [await here.site.client() for _ in bodies]
    for client, body in zip(clients, bodies, strict=True):
        await client.send(request(body))
    await here.site.fakes["d0"].got(count)
    here.site.skip(TOO_LATE_S)
    for client, body in zip(clients, bodies, strict=True):
        assert words(await client.answer()) == expected(body)
    await here.settled(left=count)
    assert here.site.metrics.handovers.ends["late_failed"] == count


def tell(here: Pairs, seated: int, standing: int) -> None:
    """Let the decode worker's page say so."""
    here.site.router.fleet.set_gauges(
        "d0", Gauges(here.site.clock(), seated, standing, kv_capacity_tokens=1_000_000)
    )


async def test_no_prefill_starts_for_who_would_stand_there(start: Start) -> None:
    here = await pairs(start, prefills=1, decodes=1)
    fake = here.site.fakes["d0"]
    usual = here.kv.worker(fake, "decode")
    seats, ends = asyncio.Semaphore(SEATS), asyncio.Semaphore(0)

    async def seated(call: Call) -> None:
        async with seats:
            await ends.acquire()
            await usual(call)

    fake.always(seated)
    bodies = [chat_body(stream=True) for _ in range(SEATS + 4)]
    clients = [await here.site.client() for _ in bodies]
    first, rest = SEATS + 1, len(bodies) - SEATS - 1
    for client, body in zip(clients[:first], bodies, strict=False):
        await client.send(request(body))
    await fake.got(first)
    for _ in range(2):
        tell(here, SEATS, first - SEATS)
    for client, body in zip(clients[first:], bodies[first:], strict=True):
        await client.send(request(body))
    await eventually(lambda: here.site.router.queue.length == rest)
    assert here.kinds().count("prefill") == first
    for _ in bodies:
        ends.release()
        tell(here, 1, 0)
    for client, body in zip(clients, bodies, strict=True):
        assert words(await client.answer()) == expected(body)
    await here.settled()
    assert {leg.split()[0] for leg in here.legs()} == {"prefill", "decode"}

"""A decode leg that shows nothing while the prefill worker's blocks are surely kept: begun anew.

What a decode worker reads after that may be another prompt's, with status 200.
"""

from __future__ import annotations

import asyncio
from math import inf

import pytest

from proxy.core.fleet.kv_links import FAILURES_TO_BAR
from proxy.core.lifecycle.retries import MIN_RESERVE
from proxy.core.model.role import Role
from proxy.transfer.types import LEASE_USED
from proxy.wire.handover.prefill_leg import MAX_BODY_S
from proxy.wire.timeouts import (
    SLOW_STEP_S,
    decode_timeout_s,
    extra_timeout_s,
    response_timeout_s,
)
from tests.proxy.core.making import ask as ask_of
from tests.proxy.core.making import placed, router_of, spec, worker_of
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.kv import CHAT, OPENINGS, Faults
from tests.proxy.wire.pairs import Pairs, chat_body, expected, pairs, words
from tests.proxy.wire.raw_client import Answer, Client, request
from tests.proxy.wire.site import eventually

# Of NIXL's 30 s; with the time that four tokens may take.
SURELY_S, TOO_LATE_S = 15.0, 26.5


async def late(here: Pairs, body: bytes) -> Answer:
    """Ask, and let the decode worker that has the blocks' names hang for too long."""
    victim = here.victim(Role.DECODE, body)
    here.kv.wrong(victim.name, Faults(before=scripts.stall))
    calls = len(victim.served)
    client = await here.send(body)
    await victim.got(calls + 1)
    here.site.skip(TOO_LATE_S)
    return await client.answer()


@pytest.mark.parametrize("stream", [True, False])
async def test_somebody_else_computes_it_whole(start: Start, stream: bool) -> None:
    here = await pairs(start)
    body = chat_body(stream=stream)
    victim = here.victim(Role.DECODE, body).name
    assert words(await late(here, body)) == expected(body)
    await here.settled()
    other = "d1" if victim == "d0" else "d0"
    assert {*here.legs()[1:]} == {f"decode {victim}", f"release {other}", f"whole {other}"}
    assert here.kv.ends() == ["released"]
    assert here.site.metrics.handovers.ends["late_failed"] == 1
    assert "decode_failed" not in here.site.metrics.handovers.ends
    assert here.site.worker(victim).breaker.has_no_failures  # it may have been the transfer


async def test_any_number_may_be_late(start: Start) -> None:
    """With a failure each, more than the retry budget bears would end with a 504."""
    here = await pairs(start, prefills=1, decodes=1, retry_budget=0.01)
    count = int(MIN_RESERVE) + 5
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


async def half(here: Pairs, body: bytes, rest: asyncio.Event) -> Client:
    """Ask, and let half of the prefill's answer come; the rest when it is said.

    No time passes for the router from here on but what is skipped.
    """
    here.site.stand_still()
    fake = here.victim(Role.PREFILL, body)
    usual = fake.script_for

    async def in_two(call: Call) -> None:
        send = call.send

        async def sends(data: bytes) -> None:
            await send(data[: len(data) // 2])
            await rest.wait()
            await send(data[len(data) // 2 :])

        call.send = sends  # type: ignore[method-assign]
        await usual(call)(call)

    fake.then(in_two)
    client = await here.send(body)
    await eventually(here.has_begun)
    return client


async def test_half_an_answer_of_a_prefill_is_not_waited_for(start: Start) -> None:
    here = await pairs(start)
    body = chat_body(stream=True)
    client = await half(here, body, asyncio.Event())
    here.site.skip(MAX_BODY_S + 1.0)
    assert words(await client.answer()) == expected(body)
    await here.settled(left=1)


async def test_the_time_it_took_to_come_is_not_left_for_the_transfer(start: Start) -> None:
    here = await pairs(start)
    body, rest = chat_body(stream=True), asyncio.Event()
    victim = here.victim(Role.DECODE, body)
    here.kv.wrong(victim.name, Faults(before=scripts.stall))
    client = await half(here, body, rest)
    here.site.skip(MAX_BODY_S - 1.0)
    rest.set()
    await victim.got(1)
    here.site.skip(TOO_LATE_S - MAX_BODY_S)
    assert words(await client.answer()) == expected(body)
    await here.settled()
    assert here.kv.ends() == ["released"]
    assert here.site.metrics.handovers.ends["late_failed"] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_fetch_that_would_be_too_late_is_left_out(start: Start, stream: bool) -> None:
    """Where blocks are kept for little longer than the rest of an answer may take."""
    lease_s = MAX_BODY_S
    here = await pairs(start, transfer_within_s=LEASE_USED * lease_s)
    connector = here.site.wire.connector
    assert connector is not None
    connector.lease_s = lease_s
    body, rest = chat_body(stream=stream), asyncio.Event()
    client = await half(here, body, rest)
    here.site.skip(MAX_BODY_S - 1.0)
    rest.set()
    assert words(await client.answer()) == expected(body)
    await here.settled()
    assert sorted(leg.split()[0] for leg in here.legs()) == ["prefill", "release", "whole"]
    assert here.kv.ends() == ["released"]


async def test_before_that_it_is_left_alone(start: Start) -> None:
    here = await pairs(start, prefills=1, decodes=1)
    waits = asyncio.Event()
    fake = here.site.fakes["d0"]
    usual = fake.script_for

    async def slowly(call: object) -> None:
        await waits.wait()
        await usual(call)(call)  # type: ignore[arg-type]

    fake.then(slowly)
    body = chat_body(stream=True)
    client = await here.send(body)
    await fake.got(1)
    here.site.skip(SURELY_S)
    await here.site.swept()
    waits.set()
    assert words(await client.answer()) == expected(body)
    await here.settled()
    assert here.legs() == ["prefill p0", "decode d0"]


async def test_a_client_that_takes_nothing_makes_no_transfer_late(start: Start) -> None:
    """It did not before the decode worker was asked, whose stream begins with what says nothing."""
    here = await pairs(start, prefills=1, decodes=1, wire={"idle_s": 1000.0})
    fake = here.site.fakes["p0"]
    prefill, gate, rest = fake.script_for, asyncio.Event(), asyncio.Event()

    async def gated(call: Call) -> None:
        await gate.wait()
        await prefill(call)(call)

    async def in_two(call: Call) -> None:
        head = (b"content-type", scripts.SSE), (b"transfer-encoding", b"chunked")
        await call.send(scripts.head(200, *head) + scripts.chunk(OPENINGS[CHAT]))
        await rest.wait()
        await call.send(scripts.chunk(scripts.token("word ") + scripts.DONE) + scripts.LAST_CHUNK)

    fake.then(gated)
    here.kv.wrong("d0", Faults(during=in_two))
    client = await here.site.send(request(chat_body(stream=True)), limit=1024, rcvbuf=8192)
    await fake.got(1)
    [exchange] = here.site.wire.exchanges
    before = b"." * (16 << 20)
    exchange.client.write(before)
    await eventually(lambda: not exchange.client.writable)
    gate.set()
    handover = exchange._attempt.handover
    await eventually(lambda: handover._early)
    rest.set()
    await eventually(lambda: not handover.waits)
    here.site.skip(TOO_LATE_S)
    client.read_on()
    async with asyncio.timeout(10):
        assert await client.reader.readexactly(len(before)) == before
    assert words(await client.answer()) == ["", "word "]
    await here.settled()
    assert here.legs() == ["prefill p0", "decode d0"]


async def test_where_there_is_nobody_else_the_same_worker_computes_it(start: Start) -> None:
    here = await pairs(start, prefills=1, decodes=1)
    body = chat_body(stream=True)
    assert words(await late(here, body)) == expected(body)
    await here.settled(left=1)
    assert here.legs() == ["prefill p0", "decode d0", "whole d0"]


async def test_a_link_that_is_late_time_and_again_is_left_alone(start: Start) -> None:
    here = await pairs(start, prefills=1, decodes=1)
    for _ in range(FAILURES_TO_BAR):
        body = chat_body(stream=True)
        assert words(await late(here, body)) == expected(body)
    assert words(await here.site.ask(request(chat_body()))) != []
    assert here.legs()[-1] == "whole d0"
    await here.settled(left=FAILURES_TO_BAR)


def test_how_long_an_answer_may_take_is_a_matter_of_its_length() -> None:
    here = router_of(
        spec("p0", Role.PREFILL), spec("d0", Role.DECODE), transfer=True, disaggregate_above=1
    )
    one = placed(here.submit(ask_of(5000, 100, stream=False), 0.0))
    assert decode_timeout_s(one, inf) == inf
    assert decode_timeout_s(one, 24.0) == 24.0 + 100 * SLOW_STEP_S  # nothing is known yet
    pace = worker_of(here, "d0").pace
    pace.steps, pace.base_s, pace.each_s = 1.0, 0.01, 0.0
    assert decode_timeout_s(one, 24.0) == pytest.approx(24.0 + 4 * 1.0)
    streamed = placed(here.submit(ask_of(5000, 100), 0.0))
    assert decode_timeout_s(streamed, 24.0) == 24.0
    endless = placed(here.submit(ask_of(5000, None, stream=False), 0.0))
    assert decode_timeout_s(endless, 24.0) > 1e9
    # The usual ten minutes are for a hang: longer answers than that are asked for.
    assert response_timeout_s(one, 600.0) == pytest.approx(600.0 + 4 * 1.0)
    assert response_timeout_s(streamed, 600.0) == 600.0
    assert response_timeout_s(endless, 600.0) == 600.0
    assert response_timeout_s(one, 3.0) == 6.0  # a hang is noticed all the same
    pace.steps = 0.0
    assert response_timeout_s(one, 600.0) == 600.0


def test_once_its_time_is_up_one_that_computes_has_more() -> None:
    here = router_of(spec("d0"))
    endless, streamed = (
        placed(here.submit(ask_of(5000, None, stream=stream), 10.0)) for stream in (False, True)
    )
    assert extra_timeout_s(endless, 610.0, 600.0) == 0.0
    worker_of(here, "d0").worked_at = 609.0
    assert extra_timeout_s(endless, 610.0, 600.0) == 600.0
    assert extra_timeout_s(endless, 610.0, 600.0, late_at=700.0) == 90.0
    assert extra_timeout_s(endless, 611.0, 300.0) == 0.0
    assert extra_timeout_s(streamed, 610.0, 600.0) == 0.0

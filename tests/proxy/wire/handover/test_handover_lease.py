"""Decode legs that show no token while the prefill worker surely keeps the blocks are retried."""

from __future__ import annotations

import asyncio
from math import inf

import pytest

from proxy.core.fleet.kv_links import FAILURES_TO_BAR
from proxy.core.lifecycle.retries import MIN_RESERVE
from proxy.core.model.role import Role
from proxy.transfer.types import LEASE_USED
from proxy.wire.handover.prefill_leg import MAX_BODY_S
from proxy.wire.timeouts import SLOW_STEP_S, decode_timeout_s, extra_timeout_s, response_timeout_s
from tests.proxy.core.making import make_info as info_of
from tests.proxy.core.making import placed, router_of, spec, worker_of
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.kv import CHAT, OPENINGS, Faults
from tests.proxy.wire.pairs import Pairs, chat_body, expected, pairs, words
from tests.proxy.wire.raw_client import Answer, Client, request
from tests.proxy.wire.site import eventually

# Within NIXL's 30 s, and beyond it with the time of four tokens.
SURELY_S, TOO_LATE_S = 15.0, 26.5


async def send_late(here: Pairs, body: bytes) -> Answer:
    """Send a request, and let the decode worker with the parameters hang for too long."""
    victim = here.victim(Role.DECODE, body)
    here.kv.inject(victim.name, Faults(before=scripts.stall))
    calls = len(victim.served)
    client = await here.send(body)
    await victim.got(calls + 1)
    here.site.skip(TOO_LATE_S)
    return await client.answer()


@pytest.mark.parametrize("stream", [True, False])
async def test_late_decode_leg_is_served_whole_elsewhere(start: Start, stream: bool) -> None:
    here = await pairs(start)
    body = chat_body(stream=stream)
    victim = here.victim(Role.DECODE, body).name
    assert words(await send_late(here, body)) == expected(body)
    await here.settled()
    other = "d1" if victim == "d0" else "d0"
    assert {*here.legs()[1:]} == {f"decode {victim}", f"release {other}", f"whole {other}"}
    assert here.kv.ends() == ["released"]
    assert here.site.metrics.handovers.ends["late_failed"] == 1
    assert "decode_failed" not in here.site.metrics.handovers.ends
    assert here.site.worker(victim).breaker.has_no_failures  # the transfer may be the cause


async def test_late_decode_legs_spend_no_retry_budget(start: Start) -> None:
    here = await pairs(start, prefills=1, decodes=1, retry_budget=0.01)
    count = int(MIN_RESERVE) + 5
    here.kv.inject("d0", *[Faults(before=scripts.stall)] * count)
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


async def send_half(here: Pairs, body: bytes) -> tuple[Client, asyncio.Event]:
    """Send a request, let half of the prefill's response come, and stop the clock.

    The event lets the other half come.
    """
    here.site.stand_still()
    rest = here.halve(here.victim(Role.PREFILL, body).name)
    client = await here.send(body)
    await eventually(here.prefill_has_begun)
    return client, rest


async def test_half_a_prefill_response_times_out(start: Start) -> None:
    here = await pairs(start)
    body = chat_body(stream=True)
    client, _ = await send_half(here, body)
    here.site.skip(MAX_BODY_S + 1.0)
    assert words(await client.answer()) == expected(body)
    await here.settled(left=1)


async def test_time_of_the_prefill_response_shortens_the_transfer_timeout(start: Start) -> None:
    here = await pairs(start)
    body = chat_body(stream=True)
    victim = here.victim(Role.DECODE, body)
    here.kv.inject(victim.name, Faults(before=scripts.stall))
    client, rest = await send_half(here, body)
    here.site.skip(MAX_BODY_S - 1.0)
    rest.set()
    await victim.got(1)
    here.site.skip(TOO_LATE_S - MAX_BODY_S)
    assert words(await client.answer()) == expected(body)
    await here.settled()
    assert here.kv.ends() == ["released"]
    assert here.site.metrics.handovers.ends["late_failed"] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_transfer_is_left_out_when_the_lease_is_nearly_over(
    start: Start, stream: bool
) -> None:
    lease_s = MAX_BODY_S
    here = await pairs(start, transfer_within_s=LEASE_USED * lease_s)
    connector = here.site.wire.connector
    assert connector is not None
    connector.lease_s = lease_s
    body = chat_body(stream=stream)
    client, rest = await send_half(here, body)
    here.site.skip(MAX_BODY_S - 1.0)
    rest.set()
    assert words(await client.answer()) == expected(body)
    await here.settled()
    assert sorted(leg.split()[0] for leg in here.legs()) == ["prefill", "release", "whole"]
    assert here.kv.ends() == ["released"]


async def test_decode_leg_within_the_lease_is_kept(here: Pairs) -> None:
    rest, body = here.hold("d0"), chat_body(stream=True)
    client = await here.send(body)
    await here.site.fakes["d0"].got(1)
    await here.site.pass_time(SURELY_S)
    rest.set()
    assert words(await client.answer()) == expected(body)
    await here.settled()
    assert here.legs() == ["prefill p0", "decode d0"]


async def test_client_that_does_not_read_makes_no_transfer_late(start: Start) -> None:
    """The client's socket is full before the decode leg, whose stream begins with an opening."""
    here = await pairs(start, prefills=1, decodes=1, wire={"idle_s": 1000.0})
    gate, rest = here.hold("p0"), asyncio.Event()

    async def respond_in_two(call: Call) -> None:
        await call.send(scripts.STREAM_HEAD + scripts.chunk(OPENINGS[CHAT]))
        await rest.wait()
        await call.send(scripts.chunk(scripts.token("word ") + scripts.DONE) + scripts.LAST_CHUNK)

    here.kv.inject("d0", Faults(during=respond_in_two))
    client = await here.site.send(request(chat_body(stream=True)), limit=1024, rcvbuf=8192)
    await here.site.fakes["p0"].got(1)
    [exchange] = here.site.wire.exchanges
    before = b"." * (16 << 20)
    exchange.client.write(before)
    await eventually(lambda: not exchange.client.writable)
    gate.set()
    handover = exchange._attempt.handover
    await eventually(lambda: handover._opening)
    rest.set()
    await eventually(lambda: not handover.is_fetch_pending)
    here.site.skip(TOO_LATE_S)
    client.read_on()
    async with asyncio.timeout(10):
        assert await client.reader.readexactly(len(before)) == before
    assert words(await client.answer()) == ["", "word "]
    await here.settled()
    assert here.legs() == ["prefill p0", "decode d0"]


async def test_repeatedly_late_link_is_barred(here: Pairs) -> None:
    for _ in range(FAILURES_TO_BAR):
        body = chat_body(stream=True)
        assert words(await send_late(here, body)) == expected(body)
        assert here.legs()[-3:] == ["prefill p0", "decode d0", "whole d0"]
    assert words(await here.site.ask(request(chat_body()))) != []
    assert here.legs()[-1] == "whole d0"
    await here.settled(left=FAILURES_TO_BAR)


def test_response_timeout_depends_on_expected_tokens() -> None:
    here = router_of(
        spec("p0", Role.PREFILL), spec("d0", Role.DECODE), transfer=True, disaggregate_above=1
    )
    bounded = placed(here.submit(info_of(5000, 100, stream=False), 0.0))
    assert decode_timeout_s(bounded, inf) == inf
    assert decode_timeout_s(bounded, 24.0) == 24.0 + 100 * SLOW_STEP_S  # before any measurement
    pace = worker_of(here, "d0").pace
    pace.steps, pace.base_s, pace.sequence_s = 1.0, 0.01, 0.0
    assert decode_timeout_s(bounded, 24.0) == pytest.approx(24.0 + 4 * 1.0)
    streamed = placed(here.submit(info_of(5000, 100), 0.0))
    assert decode_timeout_s(streamed, 24.0) == 24.0
    endless = placed(here.submit(info_of(5000, None, stream=False), 0.0))
    assert decode_timeout_s(endless, 24.0) > 1e9
    # The usual ten minutes detect a hang; long responses get more.
    assert response_timeout_s(bounded, 600.0) == pytest.approx(600.0 + 4 * 1.0)
    assert response_timeout_s(streamed, 600.0) == 600.0
    assert response_timeout_s(endless, 600.0) == 600.0
    assert response_timeout_s(bounded, 3.0) == 6.0  # a hang is still detected
    pace.steps = 0.0
    assert response_timeout_s(bounded, 600.0) == 600.0


def test_computing_worker_gets_extra_time() -> None:
    here = router_of(spec("d0"))
    endless, streamed = (
        placed(here.submit(info_of(5000, None, stream=stream), 10.0)) for stream in (False, True)
    )
    assert extra_timeout_s(endless, 610.0, 600.0) == 0.0
    worker_of(here, "d0").worked_at = 609.0
    assert extra_timeout_s(endless, 610.0, 600.0) == 600.0
    assert extra_timeout_s(endless, 610.0, 600.0, late_at=700.0) == 90.0
    assert extra_timeout_s(endless, 611.0, 300.0) == 0.0
    assert extra_timeout_s(streamed, 610.0, 600.0) == 0.0

"""The time limit of a whole request (`request_s`)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.tenants.tenants import Rank, TenantSpec
from proxy.wire.handover.release import ABANDONED_GRACE_S
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.kv import Faults
from tests.proxy.wire.pairs import Pairs, chat_body, pairs, start_between_legs
from tests.proxy.wire.raw_client import KEY, BrokenError, bearer, chat
from tests.proxy.wire.site import Fake, Site, eventually

LIMIT_S = 50.0
WIRE = {"request_s": LIMIT_S}
# The kind of an error, in the format of each API.
PATHS = {"/v1/chat/completions": ("code", "time_limit"), "/v1/messages": ("type", "timeout_error")}


async def start_with_limit(start: Start, *fakes: Fake, **more: Any) -> Site:
    """Start a router with the time limit whose clock stands still."""
    site = await start(*fakes, wire=WIRE | more)
    site.stand_still()
    return site


def counted_requests(site: Site) -> list[tuple[int, str]]:
    """Return the status and reason of each counted request."""
    return [
        (key[5], key[4])
        for key, series in site.metrics.requests.items()
        for _ in range(series.count)
    ]


async def exceed_limit(site: Site) -> None:
    """Check that the request survives 0.9 of its limit, then exceed the limit."""
    await site.pass_time(0.9 * LIMIT_S)
    assert len(site.wire.exchanges) == 1
    site.skip(0.2 * LIMIT_S)


@pytest.mark.parametrize("path", PATHS)
async def test_time_limit_before_a_response_gets_504(start: Start, path: str) -> None:
    site = await start_with_limit(start)
    site.fake.always(scripts.stall)
    client = await site.client()
    await client.send(chat().replace(b"/v1/chat/completions", path.encode()))
    call = await site.fake.got()
    await exceed_limit(site)
    answer = await client.answer()
    key, kind = PATHS[path]
    assert (answer.status, answer.json()["error"][key]) == (504, kind)
    await call.was_lost()
    await site.settled()
    assert counted_requests(site) == [(504, "time_limit")]
    site.fake.always(scripts.answer())
    assert (await client.ask(chat())).status == 200, "the connection stays open"
    assert len(site.served()) == 2, "and no other worker was asked"


async def test_time_limit_ends_a_stream_with_an_error_event(start: Start) -> None:
    site = await start_with_limit(start)
    site.fake.always(scripts.stream(3, end="stall"))
    client = await site.send(chat(stream=True))
    await client.head()
    assert await client.piece()
    call = site.fake.served[0]
    await exceed_limit(site)
    events = b""
    while piece := await client.piece():
        events += piece
    *_, last = events.split(b"\n\n")[:-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "time_limit"
    assert b"[DONE]" not in events
    await call.was_lost()
    await site.settled()
    assert counted_requests(site) == [(504, "time_limit")]


@pytest.mark.parametrize("how", ["expire", "cut"])
async def test_time_limit_after_the_last_event_is_no_error(start: Start, how: str) -> None:
    site = await start_with_limit(start)
    site.set_tenants(TenantSpec("a"), a=KEY)
    shown = scripts.STREAM_HEAD
    events = scripts.token("a"), scripts.usage_event(777, 88), scripts.DONE
    site.fake.always(scripts.raw(shown, *map(scripts.chunk, events), gap_s=0.01, end="stall"))
    client = await site.send(chat("hi", bearer(), stream=True))
    await client.head()
    while b"[DONE]" not in await client.piece():
        pass
    if how == "expire":
        await exceed_limit(site)
    else:
        [exchange] = site.wire.exchanges
        exchange.end_for_shutdown(site.clock())
    while piece := await client.piece():
        assert b"error" not in piece
    await site.settled()
    [tenant] = site.router.tenants
    totals = tenant.totals
    assert (totals.prompt_tokens, totals.output_tokens) == (777, 88)
    assert tenant.unsettled == [0.0] * len(Rank)
    assert tenant.ledger.running == 0
    assert [status for status, _ in counted_requests(site)] == [200]


async def test_time_limit_breaks_off_other_responses(start: Start) -> None:
    site = await start_with_limit(start)
    part = scripts.head(200, (b"content-type", b"application/json"), (b"content-length", b"100"))
    site.fake.always(scripts.raw(part, b'{"half":', gap_s=0.01, end="stall"))
    client = await site.send(chat())
    head = await client.head()
    await exceed_limit(site)
    with pytest.raises((BrokenError, ConnectionError)):
        await client.body(head)
    await site.settled()
    assert counted_requests(site) == [(504, "time_limit")]


async def test_time_limit_ends_a_queued_request(start: Start) -> None:
    site = await start(Fake(max_requests=1), wire=WIRE, router={"queue_wait_s": 10 * LIMIT_S})
    site.stand_still()
    gate = site.fake.hold()
    client = await site.client()
    first = asyncio.create_task(client.ask(chat()))
    await site.fake.got(1)
    [exchange] = site.wire.exchanges
    exchange.deadline += 100 * LIMIT_S
    second = asyncio.create_task(site.ask(chat()))
    await eventually(lambda: site.wire.queued)
    site.skip(1.1 * LIMIT_S)
    answer = await second
    assert (answer.status, answer.error()["code"]) == (504, "time_limit")
    assert not site.wire.queued
    gate.set()
    assert (await first).status == 200


async def test_time_limit_starts_at_the_first_byte_of_the_head(start: Start) -> None:
    site = await start_with_limit(start, client_header_s=LIMIT_S)
    site.fake.always(scripts.stall)
    client, data = await site.client(), chat()
    await client.send(data[:30])
    [connection] = site.wire.clients
    await eventually(lambda: connection._upload._came_at == site.clock())
    site.skip(0.6 * LIMIT_S)
    await client.send(data[30:])
    await site.fake.got(1)
    site.skip(0.6 * LIMIT_S)
    assert (await client.answer()).status == 504


async def test_time_limit_restarts_for_the_next_request(start: Start) -> None:
    site = await start_with_limit(start)
    client = await site.client()
    for _ in range(4):  # the first heads are parsed, later ones are cached
        assert (await client.ask(chat())).status == 200
        site.skip(0.6 * LIMIT_S)
        assert (await client.ask(chat("x" * 20_000))).status == 200
    assert counted_requests(site) == [(200, "only_choice")] * 8


async def test_time_limit_before_the_whole_body_gets_408(start: Start) -> None:
    site = await start_with_limit(start, client_idle_s=10 * LIMIT_S)
    client, data = await site.client(), chat("x" * 1000)
    await client.send(data[:-10])
    [connection] = site.wire.clients
    await eventually(lambda: connection.deadline == site.clock() + LIMIT_S)
    site.skip(0.9 * LIMIT_S)
    await client.send(data[-10:-5])
    await site.swept()
    site.skip(0.2 * LIMIT_S)
    answer = await client.answer()
    assert (answer.status, answer.error()["code"]) == (408, "time_limit")
    assert counted_requests(site) == [(408, "time_limit")]


async def test_reload_keeps_the_time_limit_of_running_requests(start: Start) -> None:
    site = await start_with_limit(start)
    gate = site.fake.hold()
    asking = asyncio.create_task(site.ask(chat()))
    await site.fake.got(1)

    site.wire.reconfigure(replace(site.wire.settings, request_s=None))
    site.skip(1.1 * LIMIT_S)
    answer = await asking
    assert answer.status == 504
    assert f"{LIMIT_S:g} s" in answer.error()["message"]
    gate.set()


async def test_time_limit_holds_for_a_client_that_does_not_read(start: Start) -> None:
    site = await start_with_limit(start, idle_s=100 * LIMIT_S)
    site.fake.always(scripts.stream(50_000, text="x" * 1000))
    client = await site.send(chat(stream=True), rcvbuf=4096, limit=1 << 12)
    await eventually(lambda: any(not client.writable for client in site.wire.clients))
    await exceed_limit(site)
    await site.settled()
    assert counted_requests(site) == [(504, "time_limit")]
    client.close()


# Hand-overs


@pytest.fixture
async def here(start: Start) -> Pairs:
    """Start prefill and decode workers with the time limit."""
    here = await pairs(start, prefills=1, decodes=1, wire=WIRE)
    here.site.stand_still()
    return here


async def exceed_limit_of_handover(here: Pairs) -> int:
    """Exceed the time limit of the request; return the status of its response."""
    [client] = here.site.clients
    here.site.skip(1.1 * LIMIT_S)
    answer = await client.answer()
    here.site.stands_at = None
    here.site.skip(ABANDONED_GRACE_S)
    await here.settled()
    assert counted_requests(here.site) == [(504, "time_limit")]
    return answer.status


async def test_time_limit_in_the_prefill_leg_ends_the_handover(here: Pairs) -> None:
    here.kv.inject("p0", Faults(before=scripts.stall))
    await here.send(chat_body())
    call = await here.site.fakes["p0"].got(1)
    assert await exceed_limit_of_handover(here) == 504
    await call.was_lost()
    assert here.legs() == ["prefill p0"]


async def test_time_limit_before_the_decode_leg_connects_releases_blocks(start: Start) -> None:
    wire = WIRE | {"connect_s": 10 * LIMIT_S}
    here, _, victim = await start_between_legs(start, wire=wire)
    assert await exceed_limit_of_handover(here) == 504
    assert here.kv.ends() == ["released"]
    await victim.wake()

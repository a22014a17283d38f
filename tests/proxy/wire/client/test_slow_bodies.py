"""Request bodies that arrive too slowly."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest

from proxy.http.request_parser import ParserState
from proxy.net.tls import server_context
from proxy.wire.client.connection import MAX_AHEAD_BYTES, ClientConnection
from tests.proxy.certificates import Authority
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Client, chat, request
from tests.proxy.wire.site import Fake, Site, eventually

RATE, GRACE_S = 1024, 75.0
BODY = chat("x" * 200_000)


async def begin_body(
    start: Start, data: bytes, authority: Authority | None = None, **wire: Any
) -> tuple[Site, Client]:
    """Start a router whose clock stands still, and send the start of a request."""
    tls = None if authority is None else server_context(authority.port("router"))
    site = await start(wire={"linger_s": 0.1} | wire, tls=tls)
    site.stand_still()
    client = await site.send(data, tls=authority and authority.client())
    await wait_for_body(site)
    return site, client


async def wait_for_body(site: Site) -> None:
    """Wait until the router has the start of a body."""
    await eventually(
        lambda: any(
            client._reader.state is ParserState.BODY and client.deadline == site.clock() + GRACE_S
            for client in site.wire.clients
        )
    )


def connection(site: Site) -> ClientConnection:
    """Return the only client connection."""
    [only] = site.wire.clients
    return only


async def send(site: Site, client: Client, data: bytes) -> None:
    """Send data, and wait until the router has it."""
    before = connection(site)._upload._body_bytes
    await client.send(data)
    await eventually(lambda: connection(site)._upload._body_bytes == before + len(data))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files"])
async def test_byte_a_minute_gets_408_in_the_format_of_the_api(start: Start, path: str) -> None:
    whole = request(b"x" * 100_000, path=path)
    site, client = await begin_body(start, whole[:500])
    for _ in range(2):
        site.skip(60)
        if not site.wire.clients:
            break
        await client.send(b"x")
        await site.swept()
    answer = await client.answer()
    assert answer.status == 408
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f"{RATE} bytes per second" in error["message"]
    assert answer.one(b"connection") == b"close"
    status_and_reason = [(key[5], key[4]) for key in site.metrics.requests]
    assert status_and_reason == [(408, "slow_body")]
    assert site.wire.body_budget.held == 0


async def test_body_at_twice_the_minimum_rate_is_served(start: Start) -> None:
    """The body has 200 kB and comes in bursts of 10 s."""
    site, client = await begin_body(start, BODY[:1000])
    for at in range(1000, len(BODY) - 1, 10 * 2 * RATE):
        await send(site, client, BODY[at : min(at + 10 * 2 * RATE, len(BODY) - 1)])
        await site.pass_time(10)
        assert not connection(site)._leaving
    await client.send(BODY[-1:])
    assert (await client.answer()).status == 200


async def test_body_below_the_minimum_rate_is_refused_after_the_grace_period(start: Start) -> None:
    site, client = await begin_body(start, BODY[:1000])
    at = 1000
    seconds = 0
    while not connection(site)._leaving:
        await send(site, client, BODY[at : at + 10 * RATE // 2])
        at += 10 * RATE // 2
        seconds += 10
        await site.pass_time(10)
    # At half of the rate, the 75 s of grace are used up after 150 s.
    assert seconds == 160
    assert (await client.answer()).error()["code"] == "slow_body"


@pytest.mark.parametrize("encrypted", [False, True])
async def test_minimum_rate_holds_for_chunked_bodies(
    start: Start, tmp_path: Path, encrypted: bool
) -> None:
    data = request(b"x" * 100, chunks=(1,))[: -6 * 80 - 5]
    site, client = await begin_body(start, data, Authority(tmp_path) if encrypted else None)
    for _ in range(2):
        await client.send(b"1\r\nx\r\n")
        await site.pass_time(60)
    assert (await client.answer()).error()["code"] == "slow_body"


async def test_each_body_of_a_connection_has_its_own_grace_period(start: Start) -> None:
    site, client = await begin_body(start, BODY[:1000])
    site.skip(70)
    await client.send(BODY[1000:])
    assert (await client.answer()).status == 200
    for part in (BODY[:150_000], BODY):  # parsed, then with a head from the cache
        await client.send(part[:100_000])
        await wait_for_body(site)
        await site.pass_time(70)
        await client.send(BODY[100_000:])
        assert (await client.answer()).status == 200


async def test_minimum_rate_of_zero_accepts_any_rate(start: Start) -> None:
    site, client = await begin_body(start, BODY[:1000], body_min_bytes_per_s=0)
    for at in range(1000, 1010):
        await site.pass_time(70)
        await send(site, client, BODY[at : at + 1])
    await client.send(BODY[1010:])
    assert (await client.answer()).status == 200


@pytest.mark.parametrize("ahead", [1000, 2 * MAX_AHEAD_BYTES], ids=["read ahead", "not read"])
@pytest.mark.parametrize("limits", [{}, {"request_s": GRACE_S}], ids=["rate", "rate and time"])
async def test_time_of_the_previous_response_does_not_count(
    start: Start, ahead: int, limits: dict[str, float]
) -> None:
    site = await start(Fake(max_model_len=1 << 20), wire=limits)
    site.stand_still()
    gate = site.fake.hold_next()
    large = chat("x" * 4 * MAX_AHEAD_BYTES)
    client = await site.send(chat())
    await site.fake.got(1)
    client.writer.write(large[:ahead])
    await eventually(lambda: connection(site)._ahead_bytes >= min(ahead, MAX_AHEAD_BYTES))
    for exchange in site.wire.exchanges:
        exchange.deadline = inf
    await site.pass_time(5 * GRACE_S)
    gate.set()
    assert (await client.answer()).status == 200
    await wait_for_body(site)
    await site.pass_time(0.9 * GRACE_S)
    client.writer.write(large[ahead:])
    assert (await client.answer()).status == 200


async def test_grace_period_of_a_body_starts_at_100_continue(site: Site) -> None:
    site.stand_still()
    gate = site.fake.hold_next()
    client = await site.send(chat())
    await site.fake.got(1)
    head, body = chat("x" * 1000, b"Expect: 100-continue").split(b"\r\n\r\n", 1)
    await client.send(head + b"\r\n\r\n")
    await site.pass_time(5 * GRACE_S)
    gate.set()
    assert (await client.answer()).status == 200
    await wait_for_body(site)
    assert (await client.answer()).status == 100
    await site.pass_time(0.9 * GRACE_S)
    await client.send(body)
    assert (await client.answer()).status == 200

"""Whose batches are whose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from proxy.core.limits import Limits
from proxy.core.tenants import Rank, TenantSpec
from tests.proxy.batches.office import Office, line, lines
from tests.proxy.wire import scripts
from tests.proxy.wire.client import chat
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.site import eventually

KEYS = {name: f"key-of-{name}-0123456789" for name in ("ann", "bob")}


def take(office: Office, *specs: TenantSpec) -> None:
    """Have tenants, with their keys."""
    keys = {sha256(KEYS[spec.name].encode()).digest(): spec.name for spec in specs}
    office.site.router.tenants.replace(specs, keys)


@pytest.fixture
async def office(start: Start, tmp_path: Path) -> AsyncIterator[Office]:
    """Start a router with two tenants, whose client is the first."""
    office = Office(await start(), tmp_path / "batches")
    take(office, TenantSpec("ann", models=frozenset(["tiny"])), TenantSpec("bob"))
    await office.open()
    office.client.api_key = KEYS["ann"]
    yield office
    await office.close()


def client_of(office: Office, name: str) -> AsyncOpenAI:
    """Return another tenant's client."""
    return office.client.with_options(api_key=KEYS.get(name, name))


async def test_a_batch_is_its_tenants_alone(office: Office) -> None:
    done = await office.until(await office.begin(lines(2)))
    assert done.status == "completed"
    bob = client_of(office, "bob")
    for asked in (
        bob.batches.retrieve(done.id),
        bob.batches.cancel(done.id),
        bob.files.content(done.output_file_id or ""),
        bob.files.delete(done.input_file_id),
        bob.batches.create(
            input_file_id=done.input_file_id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            await asked
    assert [each.id async for each in bob.batches.list()] == []
    with pytest.raises(openai.AuthenticationError):
        await client_of(office, "nobody").batches.retrieve(done.id)


async def test_lines_are_the_tenants_and_of_the_batch_class(office: Office) -> None:
    seen: list[Any] = []

    async def look(call: Any) -> None:
        [exchange] = office.site.wire.exchanges
        ask = exchange._ask
        assert ask is not None
        seen.append((ask.tenant and ask.tenant.name, ask.rank))
        await scripts.obey("w0")(call)

    office.site.fake.always(look)
    await office.until(await office.begin(lines(1)))
    assert seen == [("ann", Rank.BATCH)]
    [call] = office.site.fake.served
    assert call.all(b"authorization") == []  # no key is kept, and none is sent


async def test_what_a_tenant_may_not_use_its_lines_may_not(office: Office) -> None:
    other = line("x")
    other["body"]["model"] = "another"
    office.site.fleet.set_served("w0", ("tiny", "another"), 16384)
    done = await office.until(await office.begin([other]))
    [failed] = await office.lines_of(done.error_file_id)
    assert failed["response"]["status_code"] in (403, 404)


async def test_half_of_a_minutes_limit_is_left_to_people(office: Office) -> None:
    take(office, TenantSpec("ann", limits=Limits(requests_per_minute=8)), TenantSpec("bob"))
    batch = await office.begin(lines(8))
    await eventually(lambda: len(office.site.served()) == 4)
    await office.batches.lane.turn()
    key = b"Authorization: Bearer " + KEYS["ann"].encode()
    assert [(await office.site.ask(chat("hi", key))).status for _ in range(4)] == [200] * 4
    office.skip(60)
    done = await office.until(batch)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (8, 0)
    assert office.batches.lane.counts.lines["sent_again"] == 0


async def test_half_of_its_places_are_left_to_people(office: Office) -> None:
    take(office, TenantSpec("ann", limits=Limits(concurrency=4)), TenantSpec("bob"))
    opening = asyncio.Event()
    office.site.fake.always(scripts.gated(opening, scripts.obey("w0")))
    batch = await office.begin(lines(6))
    await office.site.fake.got(2)
    await office.batches.lane.turn()
    assert office.batches.lane.in_flight == 2
    key = b"Authorization: Bearer " + KEYS["ann"].encode()
    people = [asyncio.create_task(office.site.ask(chat("hi", key), within=30)) for _ in range(2)]
    await office.site.fake.got(4)
    opening.set()
    assert [answer.status for answer in await asyncio.gather(*people)] == [200, 200]
    assert (await office.until(batch)).status == "completed"


async def test_a_line_beyond_a_limit_is_sent_again_when_it_may(office: Office) -> None:
    take(office, TenantSpec("ann", limits=Limits(tokens_per_minute=500)), TenantSpec("bob"))
    long = [line(f"r{n}", "word " * 280) for n in range(2)]  # each fits a minute's worth
    batch = await office.begin(long)
    await eventually(lambda: len(office.site.served()) >= 1)
    for _ in range(20):
        office.skip(60)
        await office.batches.lane.turn()
        await eventually(lambda: office.batches.lane.in_flight == 0)
    done = await office.until(batch)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 0)


async def test_lines_of_a_tenant_that_is_gone_are_not_run(office: Office) -> None:
    office.site.fake.always(scripts.stall)
    batch = await office.begin(lines(2))
    await office.site.fake.got(2)
    await office.close()
    take(office, TenantSpec("bob"))
    await office.open()
    for _ in range(200):
        found = await office.batches.keeper(lambda store: store.batch("ann", batch.id))
        assert found is not None
        if not found.active:
            break
        office.batches.lane.tell()
        await office.batches.lane.turn()
    assert (found.status, found.completed, found.failed) == ("completed", 0, 2)

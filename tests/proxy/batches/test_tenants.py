"""Whose batches are whose."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from openai import AsyncOpenAI

from proxy.batches import api
from proxy.batches.storage.schema import ROW_BYTES
from proxy.batches.storage.store import Store
from proxy.batches.types import Batch, Status
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, TenantSpec
from tests.present import present
from tests.proxy.batches.office import CHAT, Office, line, lines
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import eventually

KEYS = {name: f"key-of-{name}-0123456789" for name in ("ann", "bob")}


def take(office: Office, *specs: TenantSpec) -> None:
    """Have tenants, with their keys."""
    keys = {sha256(KEYS[spec.name].encode()).digest(): spec.name for spec in specs}
    office.site.router.tenants.replace(specs, keys)


async def opened(
    start: Start, tmp_path: Path, script: scripts.Script | None = None, **bounds: int
) -> Office:
    """Start a router with two tenants and bounds, whose client is the first."""
    office = Office(await start(), tmp_path, **bounds)
    take(office, TenantSpec("ann"), TenantSpec("bob"))
    if script is not None:
        office.site.fake.always(script)
    await office.open()
    office.client.api_key = KEYS["ann"]
    return office


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
        ask = present(exchange.ask)
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
    office.site.fleet.roster.set_served("w0", ("tiny", "another"), 16384)
    done = await office.until(await office.begin([other]))
    [failed] = await office.lines_of(done.error_file_id)
    assert failed["response"]["status_code"] in (403, 404)


async def test_half_of_a_minutes_limit_is_left_to_people(office: Office) -> None:
    take(office, TenantSpec("ann", limits=Limits(requests_per_minute=8)), TenantSpec("bob"))
    batch = await office.begin(lines(8))
    await eventually(lambda: len(office.site.served()) == 2)  # it was uploaded, and begun
    await office.batches.lane.turn()
    key = b"Authorization: Bearer " + KEYS["ann"].encode()
    assert [(await office.site.ask(chat("hi", key))).status for _ in range(4)] == [200] * 4
    for _ in range(2):
        office.skip(60)
        await office.batches.lane.turn()
        await eventually(lambda: office.batches.lane.in_flight == 0)
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


async def test_batches_of_a_tenant_that_is_gone_are_held_until_it_is_back(office: Office) -> None:
    office.site.fake.always(scripts.stall)
    batch = await office.begin(lines(2))
    await office.site.fake.got(2)
    await office.close()
    take(office, TenantSpec("bob"))
    await office.open()
    served = len(office.site.served())
    for _ in range(5):
        office.batches.lane.wake()
        await office.batches.lane.turn()
    found = present(await office.batches.keeper(lambda store: store.batch("ann", batch.id)))
    assert (found.status, found.completed, found.failed) == ("in_progress", 0, 0)
    assert len(office.site.served()) == served
    # It comes back: a deploy that left it out was taken back.
    office.site.fake.always(scripts.obey("w0"))
    take(office, TenantSpec("ann"), TenantSpec("bob"))
    office.client.api_key = KEYS["ann"]
    done = await office.until(batch)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 0)


async def test_what_changes_something_is_one_of_a_minutes_requests(office: Office) -> None:
    take(office, TenantSpec("ann", limits=Limits(requests_per_minute=3)), TenantSpec("bob"))
    for _ in range(3):
        await office.upload(["{}"])
    with pytest.raises(openai.RateLimitError, match=r"\(RPM\): Limit 3"):
        await office.upload(["{}"])
    assert len([each async for each in office.client.files.list()]) == 3
    ann = present(office.site.router.tenants.get("ann"))
    assert ann.ledger.running == 0
    assert ann.totals.limited == {"requests_per_minute": 1}


async def test_a_tenants_files_have_a_bound_of_their_own(start: Start, tmp_path: Path) -> None:
    row = ROW_BYTES + len("in.jsonl")  # each file takes that as well
    bounds = {"max_bytes_per_tenant": 1000 + row, "max_bytes": 1500 + 2 * row}
    office = await opened(start, tmp_path, max_file_bytes=1000, **bounds)
    first = await office.upload(["x" * 900])
    with pytest.raises(openai.APIStatusError, match=f"limit is {1000 + row}") as caught:
        await office.upload(["x" * 200])
    assert caught.value.status_code == 413
    bob = client_of(office, "bob")
    with pytest.raises(openai.InternalServerError) as full:
        await bob.files.create(file=("in.jsonl", b"x" * 700), purpose="batch")
    assert full.value.status_code == 507
    await bob.files.create(file=("in.jsonl", b"x" * 500), purpose="batch")
    await office.client.files.delete(first)
    await office.upload(["x" * 200])
    await office.close()


async def test_results_beyond_a_tenants_bound_hold_its_batches_and_nobody_elses(
    start: Start, tmp_path: Path
) -> None:
    most = 30_000
    script = scripts.answer(body=orjson.dumps("x" * 8000))
    office = await opened(start, tmp_path, script, max_bytes_per_tenant=most, concurrency=1)
    lane, keep = office.batches.lane, office.batches.keeper
    spare = await office.upload(["x" * 2000])
    batch = await office.begin(lines(8))
    await eventually(lambda: any(each.held for each in lane._running.values()))
    for _ in range(3):
        await lane.turn()
    used = await keep(Store._used)
    assert most <= used["ann"] < most + 9000, "no more than what was in flight"
    assert not lane.paused
    with pytest.raises(openai.APIStatusError, match="files and results have") as caught:
        await office.upload(["x"])
    assert caught.value.status_code == 413
    office.client.api_key = KEYS["bob"]
    done = await office.until(await office.begin(lines(2)))
    assert done.status == "completed"
    office.client.api_key = KEYS["ann"]
    assert (await office.client.batches.retrieve(batch.id)).status == "in_progress"
    await office.client.files.delete(spare)
    office.batches.reconfigure(
        office.settings.model_copy(update={"max_bytes_per_tenant": 10 * most})
    )
    done = await office.until(batch)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (8, 0)
    await office.close()


async def test_what_has_no_room_is_not_taken_on(start: Start, tmp_path: Path) -> None:
    office = await opened(start, tmp_path, scripts.stall, max_bytes_per_tenant=5000)
    file = await office.upload(lines(10))
    now = office.wall()
    both = [
        Batch(name, "ann", CHAT, file, "24h", Status.VALIDATING, now, now + 86_400)
        for name in ("batch_1", "batch_2")
    ]
    await office.batches.keeper(lambda store: [store.add_batch(each) for each in both])
    for _ in range(3):
        office.batches.lane.wake()
        await office.batches.lane.turn()
    # The first one's lines, which are kept beside its file, left no room for the second's.
    seen = [await office.client.batches.retrieve(each.id) for each in both]
    assert [each.status for each in seen] == ["in_progress", "validating"]
    await office.client.batches.cancel("batch_2")
    assert (await office.until(seen[1])).status == "cancelled"
    await office.close()


async def test_a_tenant_has_so_many_batches_at_a_time(start: Start, tmp_path: Path) -> None:
    office = await opened(start, tmp_path, scripts.stall, max_active_per_tenant=2)
    batches = [await office.begin(lines(1)) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="2 active batches"):
        await office.begin(lines(1))
    await office.client.batches.cancel(batches[0].id)
    await office.until(batches[0])
    await office.begin(lines(1))
    await office.close()


async def test_requests_for_files_are_so_many_at_once(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MAX_REQUESTS_PER_TENANT", 1)
    busy = threading.Event()  # the store is, until the others were refused
    desk_of = present(office.site.wire.extension)
    desk_of.store._thread.submit(busy.wait, 60)
    asks = {asyncio.ensure_future(office.client.files.list()) for _ in range(4)}
    try:
        for _ in range(3):
            done, asks = await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED)
            assert all(isinstance(each.exception(), openai.RateLimitError) for each in done)
            if len(asks) == 1:
                break
        assert len(asks) == 1
    finally:
        busy.set()
    await asks.pop()
    assert desk_of.in_progress.total() == 0

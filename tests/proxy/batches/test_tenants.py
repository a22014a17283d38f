"""Batches of tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
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
from tests.proxy.batches.conftest import OpenHarness
from tests.proxy.batches.harness import CHAT, BatchHarness, busy, line, lines
from tests.proxy.wire import scripts
from tests.proxy.wire.raw_client import Answer, bearer, chat
from tests.proxy.wire.site import eventually

StartHarness = Callable[..., Awaitable[BatchHarness]]
KEYS = {name: f"key-of-{name}-0123456789" for name in ("ann", "bob")}


def set_tenants(harness: BatchHarness, *specs: TenantSpec) -> None:
    harness.site.set_tenants(*specs, **{spec.name: KEYS[spec.name] for spec in specs})


@pytest.fixture
async def start_harness(open_harness: OpenHarness) -> StartHarness:
    """Start routers with two tenants and limits; the client is the first tenant's."""

    async def start(script: scripts.Script | None = None, **limits: int) -> BatchHarness:
        harness = await open_harness(**limits)
        set_tenants(harness, TenantSpec("ann", models=frozenset(["tiny"])), TenantSpec("bob"))
        if script is not None:
            harness.site.fake.always(script)
        harness.client.api_key = KEYS["ann"]
        return harness

    return start


@pytest.fixture
async def harness(start_harness: StartHarness) -> BatchHarness:
    return await start_harness()


def limit_ann(harness: BatchHarness, **limits: int) -> None:
    set_tenants(harness, TenantSpec("ann", limits=Limits(**limits)), TenantSpec("bob"))


def ask_as_ann(harness: BatchHarness) -> Awaitable[Answer]:
    return harness.site.ask(chat("hi", bearer(KEYS["ann"])), within=30)


async def check_counts(harness: BatchHarness, batch: openai.types.Batch, completed: int) -> None:
    """Wait for the end of a batch; check that all of its lines completed."""
    done = present((await harness.until(batch)).request_counts)
    assert (done.completed, done.failed) == (completed, 0)


def client_of(harness: BatchHarness, name: str) -> AsyncOpenAI:
    return harness.client.with_options(api_key=KEYS.get(name, name))


async def test_batch_is_visible_only_to_its_tenant(harness: BatchHarness) -> None:
    done = await harness.until(await harness.begin(lines(2)))
    assert done.status == "completed"
    bob = client_of(harness, "bob")
    for request in (
        bob.batches.retrieve(done.id),
        bob.batches.cancel(done.id),
        bob.files.content(done.output_file_id or ""),
        bob.files.delete(done.input_file_id),
        bob.batches.create(
            input_file_id=done.input_file_id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            await request
    assert [batch.id async for batch in bob.batches.list()] == []
    assert [file.id async for file in bob.files.list()] == []
    with pytest.raises(openai.AuthenticationError):
        await client_of(harness, "unknown").batches.retrieve(done.id)


async def test_lines_have_the_tenant_and_the_batch_rank(harness: BatchHarness) -> None:
    seen: list[Any] = []

    async def record_tenant(call: Any) -> None:
        [exchange] = harness.site.wire.exchanges
        info = present(exchange.info)
        seen.append((info.tenant and info.tenant.name, info.rank))
        await scripts.obey("w0")(call)

    harness.site.fake.always(record_tenant)
    await harness.until(await harness.begin(lines(1)))
    assert seen == [("ann", Rank.BATCH)]
    [call] = harness.site.fake.served
    assert call.all(b"authorization") == []  # keys are neither stored nor sent


async def test_lines_for_a_forbidden_model_fail(harness: BatchHarness) -> None:
    other = line("x")
    other["body"]["model"] = "another"
    harness.site.fleet.roster.set_served("w0", ("tiny", "another"), 16384)
    done = await harness.until(await harness.begin([other]))
    [failed] = await harness.lines_of(done.error_file_id)
    assert failed["response"]["status_code"] in (403, 404)


async def test_lines_use_at_most_half_of_requests_per_minute(harness: BatchHarness) -> None:
    limit_ann(harness, requests_per_minute=8)
    batch = await harness.begin(lines(8))
    await eventually(
        lambda: len(harness.site.served()) == 2
    )  # upload and creation count as requests
    await harness.batches.scheduler.turn()
    assert [(await ask_as_ann(harness)).status for _ in range(4)] == [200] * 4
    for _ in range(2):
        harness.skip(60)
        await harness.batches.scheduler.turn()
        await eventually(lambda: harness.batches.scheduler.in_flight == 0)
    await check_counts(harness, batch, 8)
    assert harness.batches.scheduler.counts.lines["sent_again"] == 0


async def test_lines_use_at_most_half_of_the_concurrency(harness: BatchHarness) -> None:
    limit_ann(harness, concurrency=4)
    opening = harness.site.fake.hold(scripts.obey("w0"))
    batch = await harness.begin(lines(6))
    await harness.site.fake.got(2)
    await harness.batches.scheduler.turn()
    assert harness.batches.scheduler.in_flight == 2
    interactive = [asyncio.ensure_future(ask_as_ann(harness)) for _ in range(2)]
    await harness.site.fake.got(4)
    opening.set()
    assert [answer.status for answer in await asyncio.gather(*interactive)] == [200, 200]
    assert (await harness.until(batch)).status == "completed"


async def test_line_above_a_limit_is_sent_again_later(harness: BatchHarness) -> None:
    limit_ann(harness, tokens_per_minute=500)
    long = [line(f"r{n}", "word " * 280) for n in range(2)]  # each fits into the limit alone
    batch = await harness.begin(long)
    await eventually(lambda: len(harness.site.served()) >= 1)
    for _ in range(20):
        harness.skip(60)
        await harness.batches.scheduler.turn()
        await eventually(lambda: harness.batches.scheduler.in_flight == 0)
    await check_counts(harness, batch, 2)


async def test_batches_of_a_removed_tenant_wait_for_its_return(harness: BatchHarness) -> None:
    harness.site.fake.always(scripts.stall)
    batch = await harness.begin(lines(2))
    await harness.site.fake.got(2)
    await harness.close()
    set_tenants(harness, TenantSpec("bob"))
    await harness.open()
    served = len(harness.site.served())
    for _ in range(5):
        harness.batches.scheduler.wake()
        await harness.batches.scheduler.turn()
    found = present(await harness.batches.store(lambda store: store.batch("ann", batch.id)))
    assert (found.status, found.completed, found.failed) == ("in_progress", 0, 0)
    assert len(harness.site.served()) == served
    # A reload restores the tenant.
    harness.site.fake.always(scripts.obey("w0"))
    set_tenants(harness, TenantSpec("ann"), TenantSpec("bob"))
    harness.client.api_key = KEYS["ann"]
    await check_counts(harness, batch, 2)


async def test_uploads_count_as_requests_per_minute(harness: BatchHarness) -> None:
    limit_ann(harness, requests_per_minute=3)
    for _ in range(3):
        await harness.upload(["{}"])
    with pytest.raises(openai.RateLimitError, match=r"\(RPM\): Limit 3"):
        await harness.upload(["{}"])
    assert len([file async for file in harness.client.files.list()]) == 3
    ann = harness.site.tenant("ann")
    assert ann.ledger.running == 0
    assert ann.totals.limited == {"requests_per_minute": 1}


async def test_max_bytes_per_tenant_limits_files(start_harness: StartHarness) -> None:
    row = ROW_BYTES + len("in.jsonl")  # of each file
    limits = {"max_bytes_per_tenant": 1000 + row, "max_bytes": 1500 + 2 * row}
    harness = await start_harness(max_file_bytes=1000, **limits)
    first = await harness.upload(["x" * 900])
    with pytest.raises(openai.APIStatusError, match=f"limit is {1000 + row}") as caught:
        await harness.upload(["x" * 200])
    assert caught.value.status_code == 413
    bob = client_of(harness, "bob")
    with pytest.raises(openai.InternalServerError) as full:
        await bob.files.create(file=("in.jsonl", b"x" * 700), purpose="batch")
    assert full.value.status_code == 507
    await bob.files.create(file=("in.jsonl", b"x" * 500), purpose="batch")
    await harness.client.files.delete(first)
    await harness.upload(["x" * 200])


async def test_results_above_max_bytes_hold_only_the_tenants_batches(
    start_harness: StartHarness,
) -> None:
    max_bytes = 30_000
    script = scripts.answer(body=orjson.dumps("x" * 8000))
    harness = await start_harness(script, max_bytes_per_tenant=max_bytes, concurrency=1)
    scheduler, keep = harness.batches.scheduler, harness.batches.store
    spare = await harness.upload(["x" * 2000])
    batch = await harness.begin(lines(8))
    await eventually(lambda: any(progress.why_held for progress in scheduler._running.values()))
    for _ in range(3):
        await scheduler.turn()
    used = await keep(Store._used_bytes)
    assert max_bytes <= used["ann"] < max_bytes + 9000, "exceeded only by running lines"
    assert not scheduler.paused
    with pytest.raises(openai.APIStatusError, match="files and results have") as caught:
        await harness.upload(["x"])
    assert caught.value.status_code == 413
    harness.client.api_key = KEYS["bob"]
    done = await harness.until(await harness.begin(lines(2)))
    assert done.status == "completed"
    harness.client.api_key = KEYS["ann"]
    assert (await harness.client.batches.retrieve(batch.id)).status == "in_progress"
    await harness.client.files.delete(spare)
    harness.batches.reconfigure(
        harness.settings.model_copy(update={"max_bytes_per_tenant": 10 * max_bytes})
    )
    await check_counts(harness, batch, 8)


async def test_batch_without_space_stays_validating(start_harness: StartHarness) -> None:
    harness = await start_harness(scripts.stall, max_bytes_per_tenant=5000)
    file = await harness.upload(lines(10))
    now = harness.wall()
    batches = [
        Batch(name, "ann", CHAT, file, "24h", Status.VALIDATING, now, now + 86_400)
        for name in ("batch_1", "batch_2")
    ]
    await harness.batches.store(lambda store: [store.add_batch(batch) for batch in batches])
    for _ in range(3):
        harness.batches.scheduler.wake()
        await harness.batches.scheduler.turn()
    # The lines of the first batch leave no space for those of the second.
    seen = [await harness.client.batches.retrieve(batch.id) for batch in batches]
    assert [batch.status for batch in seen] == ["in_progress", "validating"]
    await harness.client.batches.cancel("batch_2")
    assert (await harness.until(seen[1])).status == "cancelled"


async def test_max_active_per_tenant_limits_batches(start_harness: StartHarness) -> None:
    harness = await start_harness(scripts.stall, max_active_per_tenant=2)
    batches = [await harness.begin(lines(1)) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="2 active batches"):
        await harness.begin(lines(1))
    await harness.client.batches.cancel(batches[0].id)
    await harness.until(batches[0])
    await harness.begin(lines(1))


async def test_requests_for_files_are_limited_per_tenant(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MAX_REQUESTS_PER_TENANT", 1)
    api_of = present(harness.site.wire.extension)
    with busy(api_of.store):
        pending = {asyncio.ensure_future(harness.client.files.list()) for _ in range(4)}
        while len(pending) > 1:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            assert all(isinstance(task.exception(), openai.RateLimitError) for task in done)
    await pending.pop()
    assert api_of.in_progress.total() == 0

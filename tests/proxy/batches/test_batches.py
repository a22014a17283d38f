"""Batches end to end: the official client, a router and fake workers."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import sqlite3
from typing import Any

import openai
import pytest

from proxy.batches import scheduler as lane_module
from proxy.batches.clock_guard import DISTRUST_S
from proxy.batches.service import DAY_S
from proxy.batches.storage import database
from proxy.batches.storage.database import StoreLimits
from proxy.batches.storage.sqlite import SqliteBackend
from proxy.batches.storage.store import Store
from proxy.batches.storage.store_thread import StoreThread
from proxy.batches.types import StoreFullError
from proxy.core.model.specs import Gauges
from tests.present import present
from tests.proxy.batches.conftest import OpenHarness
from tests.proxy.batches.harness import CHAT, BatchHarness, line, lines, texts
from tests.proxy.batches.postgres import BOTH
from tests.proxy.wire import scripts
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, eventually


@BOTH
async def test_batch_with_the_official_client(harness: BatchHarness) -> None:
    client = harness.client

    async def refuse_bad(call: Any) -> None:
        await (scripts.error(400) if texts([call]) == ["bad"] else scripts.obey("w0"))(call)

    harness.site.fake.always(refuse_bad)
    with_numbers = line("b", temperature=None)
    with_numbers["body"] = {**with_numbers["body"], "temperature": 0.7, "seed": 2**70}
    batch = await harness.begin(
        [line("a"), with_numbers, line("x", "bad")], metadata={"night": "1"}
    )
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", CHAT)
    assert batch.metadata == {"night": "1"}
    done = await harness.until(batch)
    assert done.status == "completed"
    assert present(done.request_counts).model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert done.in_progress_at is not None
    assert done.completed_at is not None
    first, second = await harness.lines_of(done.output_file_id)
    assert [first["custom_id"], second["custom_id"]] == ["a", "b"]
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "w0"
    [failed] = await harness.lines_of(done.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("x", 400)
    # The worker gets the line's bytes.
    assert harness.site.fake.served[1].body == json.dumps(with_numbers["body"]).encode()
    assert [item.id async for item in client.batches.list(limit=1)] == [batch.id]
    names = [file.filename async for file in client.files.list(limit=1)]
    assert sorted(names) == [f"{batch.id}_error.jsonl", f"{batch.id}_output.jsonl", "in.jsonl"]
    metrics = (await harness.site.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).body
    assert b'proxy_requests_total{route="chat/completions"' in metrics
    assert b'proxy_batch_lines_total{outcome="completed"} 2' in metrics
    assert b"proxy_batch_lines_in_flight 0" in metrics


async def test_files_are_uploaded_read_and_deleted(harness: BatchHarness) -> None:
    client = harness.client
    file_id = await harness.upload(["{}"] * 3)
    file = await client.files.retrieve(file_id)
    assert (file.bytes, file.purpose, file.filename) == (8, "batch", "in.jsonl")
    assert (await client.files.content(file_id)).content == b"{}\n{}\n{}"
    assert (await client.files.delete(file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file_id)
    assert [item.id async for item in client.files.list()] == []


async def number_of(harness: BatchHarness, query: str) -> int:
    return await harness.batches.store(lambda store: store.backend.execute(query).fetchone()[0])


async def test_deleting_a_large_result_file_deletes_all_results(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "MAX_RESULTS", 3)
    done = await harness.until(await harness.begin(lines(8)))
    assert len(await harness.lines_of(done.output_file_id)) == 8
    assert (await harness.client.files.delete(done.output_file_id or "")).deleted
    assert await number_of(harness, "SELECT count(*) FROM results") == 0


@BOTH
async def test_invalid_input_file_reports_each_line(harness: BatchHarness) -> None:
    wrong_url = line("b", url="/v1/embeddings")
    invalid = ["{nonsense", line("a"), line("a"), wrong_url, {"custom_id": "c"}]
    done = await harness.until(await harness.begin(invalid))
    assert done.status == "failed"
    errors = present(present(done.errors).data)
    assert [(error.line, error.code, error.param) for error in errors] == [
        (1, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_url", "url"),
        (5, "missing_required_parameter", "method"),
    ]
    assert harness.site.served() == []


async def test_lines_for_an_adapter_wait_until_a_worker_lists_it(open_harness: OpenHarness) -> None:
    """After a restart, adapters are unknown until the first probes."""
    harness = await open_harness(Fake(up=False))
    site = harness.site
    body = {**line("")["body"], "model": "adapter"}
    batch = await harness.begin([line("a", body=body)])
    await harness.until(batch, "in_progress")
    await harness.batches.scheduler.turn()
    assert harness.batches.scheduler.in_flight == 0
    site.fleet.roster.set_served("w0", ("tiny", "adapter"), 16384)
    site.up("w0")
    done = await harness.until(batch)
    assert present(done.request_counts).model_dump() == {"total": 1, "completed": 1, "failed": 0}


@BOTH
async def test_cancel_drops_running_lines_and_keeps_results(harness: BatchHarness) -> None:
    fake = harness.site.fake
    fake.then(scripts.obey("w0"))
    fake.always(scripts.stall)
    batch = await harness.begin(lines(20))
    await fake.got(3)
    await eventually(fake.served[0].answered.is_set)
    cancelled = await harness.client.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled")
    done = await harness.until(batch)
    assert done.status == "cancelled"
    assert len(await harness.lines_of(done.output_file_id)) == 1
    left = await harness.lines_of(done.error_file_id)
    assert len(left) == 19
    assert {line["error"]["code"] for line in left} == {"batch_cancelled"}
    await asyncio.gather(*(call.lost.wait() for call in fake.served[1:]))
    await harness.site.settled()
    with pytest.raises(openai.ConflictError, match="Cannot cancel"):
        await harness.client.batches.cancel(batch.id)


@BOTH
async def test_batch_expires_after_its_window(harness: BatchHarness) -> None:
    fake = harness.site.fake
    fake.then(scripts.obey("w0"))
    fake.always(scripts.stall)
    batch = await harness.begin(lines(3), window="2h")
    await fake.got(3)
    await eventually(fake.served[0].answered.is_set)
    harness.skip(2 * 3600 - 60)
    assert (await harness.client.batches.retrieve(batch.id)).status == "in_progress"
    harness.skip(61)
    done = await harness.until(batch)
    assert (done.status, done.expired_at is None) == ("expired", False)
    assert len(await harness.lines_of(done.output_file_id)) == 1
    left = await harness.lines_of(done.error_file_id)
    assert [line["error"]["code"] for line in left] == ["batch_expired"] * 2


async def test_interactive_requests_go_before_lines(open_harness: OpenHarness) -> None:
    harness = await open_harness(Fake(max_requests=2), concurrency=4)
    site = harness.site
    opening = site.fake.hold(scripts.obey("w0"))
    interactive = [asyncio.create_task(site.ask(chat("interactive"), within=30)) for _ in range(6)]
    await eventually(lambda: len(site.router.queue) == 4)
    batch = await harness.begin(lines(3))
    await harness.until(batch, "in_progress")
    await harness.batches.scheduler.turn()
    assert harness.batches.scheduler.in_flight == 0
    opening.set()
    assert [answer.status for answer in await asyncio.gather(*interactive)] == [200] * 6
    assert (await harness.until(batch)).status == "completed"
    assert texts(site.served()) == ["interactive"] * 6 + ["r0", "r1", "r2"]


async def test_batches_take_turns_with_concurrency_one(open_harness: OpenHarness) -> None:
    harness = await open_harness(concurrency=1)
    site = harness.site
    opening = site.fake.hold(scripts.obey("w0"))
    first = await harness.begin(lines(9, "a"))
    await site.fake.got(1)
    second = await harness.begin(lines(3, "b"))
    await harness.until(second, "in_progress")
    opening.set()
    assert (await harness.until(first)).status == "completed"
    order = "".join(text[0] for text in texts(site.served()))
    assert order == "abababaaaaaa"


@pytest.mark.parametrize(
    ("failures", "fault", "outcome"),
    [
        (1, scripts.error(500), 200),
        (3, scripts.error(500), 500),
        (
            3,
            scripts.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", end="reset"),
            "worker_failed",
        ),
    ],
    ids=["once", "always", "always during the response"],
)
async def test_failed_line_is_sent_three_times_at_most(
    open_harness: OpenHarness, failures: int, fault: scripts.Script, outcome: int | str
) -> None:
    harness = await open_harness(router={"max_attempts": 1})
    site = harness.site
    site.fake.then(*[fault] * failures)
    site.fake.always(scripts.obey("w0"))
    batch = await harness.begin(lines(1))
    for tries in range(1, failures + 1):
        await site.fake.got(tries)
        await eventually(lambda: harness.batches.scheduler.in_flight == 0)
        harness.skip(60)  # lets the breaker close
    done = await harness.until(batch)
    [result] = await harness.lines_of(done.output_file_id or done.error_file_id)
    assert outcome in (result["error"] or result["response"]).values()
    assert len(site.served()) == min(failures + 1, 3)


async def test_line_dropped_by_two_workers_is_not_retried(open_harness: OpenHarness) -> None:
    harness = await open_harness(*(Fake(f"w{n}") for n in range(4)))
    site = harness.site
    site.always(scripts.reset)
    done = await harness.until(await harness.begin(lines(1)))
    [failed] = await harness.lines_of(done.error_file_id)
    assert failed["response"]["body"]["error"]["code"] == "request_dropped"
    assert len(site.served()) == 2


async def test_unfinished_line_is_not_retried(harness: BatchHarness) -> None:
    site = harness.site
    site.fake.always(scripts.stall)
    batch = await harness.begin(lines(1))
    await site.fake.got()
    site.fleet.health.set_gauges("w0", Gauges(at=site.clock()))
    harness.skip(2 * site.wire.settings.first_byte_s)
    site.fleet.health.set_gauges("w0", Gauges(at=site.clock(), generation_tokens_total=1.0))
    done = await harness.until(batch)
    [failed] = await harness.lines_of(done.error_file_id)
    assert failed["response"]["body"]["error"]["code"] == "unfinished"
    assert len(site.served()) == 1


async def test_request_time_limit_does_not_hold_for_lines(open_harness: OpenHarness) -> None:
    harness = await open_harness(wire={"request_s": 30.0})
    batch, opening = await harness.begin_held(1)
    harness.skip(60)
    await asyncio.sleep(0.5)  # two sweeps
    opening.set()
    done = await harness.until(batch)
    assert len(await harness.lines_of(done.output_file_id)) == 1
    assert len(harness.site.served()) == 1


async def test_shorter_keep_days_frees_space(harness: BatchHarness) -> None:
    done = await harness.until(await harness.begin(lines(2)))
    harness.skip(3 * 86_400.0)
    await harness.batches.scheduler.turn()
    assert await harness.lines_of(done.output_file_id)
    harness.batches.reconfigure(harness.settings.model_copy(update={"keep_days": 1.0}))
    for _ in range(4):  # the batch, the files, and their space
        await harness.batches.scheduler.turn()
    assert await number_of(harness, "SELECT count(*) FROM results") == 0
    assert [file.id async for file in harness.client.files.list()] == []


async def test_failed_purge_is_retried(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []

    def purge(*_: Any) -> None:
        tried.append(True)
        if len(tried) == 1:
            raise StoreFullError("no room")

    monkeypatch.setattr(Store, "purge", purge)
    harness.batches.scheduler.purge_soon()
    await eventually(
        lambda: harness.batches.scheduler.paused
    )  # the failure has arrived from the thread
    harness.skip(10)
    await eventually(lambda: len(tried) >= 2)


async def results_after_purge(harness: BatchHarness) -> int:
    for _ in range(4):  # a batch, files, and their space
        harness.batches.scheduler.purge_soon()  # as a reload does
        await harness.batches.scheduler.turn()
    return await number_of(harness, "SELECT count(*) FROM results")


async def test_clock_jump_stops_purging_for_a_day(
    harness: BatchHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock may be wrong, and purged results are lost."""
    keep_s = harness.settings.keep_days * DAY_S
    await harness.until(await harness.begin(lines(2)))
    harness.ahead += 2 * keep_s
    assert await results_after_purge(harness) == 2
    assert caplog.text.count("jumped ahead") == 1
    harness.ahead -= 2 * keep_s  # the clock is corrected
    harness.skip(DISTRUST_S)
    assert await results_after_purge(harness) == 2
    harness.skip(2 * keep_s)
    assert await results_after_purge(harness) == 0


async def test_free_pages_are_returned_while_the_clock_is_distrusted(harness: BatchHarness) -> None:
    harness.ahead += DAY_S
    await results_after_purge(harness)
    file = await harness.upload(["x" * 1_000_000])
    await harness.client.files.delete(file)
    assert await number_of(harness, "PRAGMA freelist_count") > 0
    await results_after_purge(harness)
    assert await number_of(harness, "PRAGMA freelist_count") == 0


async def test_only_one_scheduler_holds_the_lock(harness: BatchHarness) -> None:
    second = StoreThread(lambda: SqliteBackend(harness.path), 1.0, StoreLimits())
    await second.open()
    await eventually(lambda: harness.batches.scheduler.is_leader)
    assert not (await second.renew_duties()).sends_lines
    await harness.reopen()
    await eventually(lambda: harness.batches.scheduler.is_leader)
    await harness.close()
    assert (await second.renew_duties()).sends_lines
    await second.close()
    await harness.open()


async def test_folder_without_locks_pauses_batches(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = errno.ENOLCK

    def flock(lock: int, how: int) -> None:  # noqa: ARG001
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as without:
        without.setattr(fcntl, "flock", flock)
        await harness.reopen()
        await eventually(lambda: "lane.lock" in harness.batches.scheduler.paused)
        assert harness.batches.scheduler.counts.paused
        number = errno.EAGAIN  # another router holds the lock
        assert not (await harness.batches.store.renew_duties()).sends_lines
        number = errno.EACCES
        assert not (await harness.batches.store.renew_duties()).sends_lines
    batch = await harness.begin(lines(1))
    harness.skip(10)
    assert (await harness.until(batch)).status == "completed"
    assert harness.batches.scheduler.paused == ""


async def test_failed_turns_pause_batches_and_are_logged_once(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = harness.batches.scheduler
    message = "attempt to write a readonly database"

    async def fail_read() -> None:
        raise sqlite3.OperationalError(message)

    async def fail() -> tuple[int, int]:
        harness.skip(10)
        await scheduler.turn()
        assert message in scheduler.paused
        records = [record for record in caplog.records if record.name == lane_module.__name__]
        return len(records), sum(record.exc_info is not None for record in records)

    with monkeypatch.context() as failing:
        failing.setattr(scheduler, "_read_batches", fail_read)
        assert [await fail() for _ in range(3)] == [(2, 1)] * 3
        message = "disk I/O error"
        assert await fail() == (4, 2)
        batch = await harness.begin(lines(1))
    harness.skip(10)
    assert (await harness.until(batch)).status == "completed"
    assert scheduler.paused == ""


@BOTH
async def test_drain_cuts_running_lines_and_starts_none(harness: BatchHarness) -> None:
    harness.site.fake.always(scripts.stall)
    batch = await harness.begin(lines(5))
    await harness.site.fake.got(5)
    await harness.site.wire.drain(0.0)
    assert harness.batches.scheduler.in_flight == 0
    active = await harness.batches.store(lambda store: store.active_batches())
    assert [(item.id, item.completed, item.failed) for item in active] == [(batch.id, 0, 0)]

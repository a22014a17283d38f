"""Batches end to end: the official client, a router, workers that do as they are told."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.batches import scheduler as lane_module
from proxy.batches.clock_guard import DISTRUST_S
from proxy.batches.scheduler import BatchScheduler
from proxy.batches.service import DAY_S
from proxy.batches.storage import database
from proxy.batches.storage.store import Store
from proxy.batches.types import StoreFullError
from proxy.core.model.specs import Gauges
from tests.present import present
from tests.proxy.batches.office import CHAT, Office, line, lines, texts
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, eventually


async def test_a_batch_as_the_official_client_runs_it(office: Office) -> None:
    client = office.client
    with_numbers = line("b", temperature=None)
    with_numbers["body"] = {**with_numbers["body"], "temperature": 0.7, "seed": 2**70}
    batch = await office.begin([line("a"), with_numbers], metadata={"night": "1"})
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", CHAT)
    assert batch.metadata == {"night": "1"}
    done = await office.until(batch)
    assert done.status == "completed"
    assert present(done.request_counts).model_dump() == {"total": 2, "completed": 2, "failed": 0}
    assert done.error_file_id is None
    assert done.in_progress_at is not None
    assert done.completed_at is not None
    first, second = await office.lines_of(done.output_file_id)
    assert [first["custom_id"], second["custom_id"]] == ["a", "b"]
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "w0"
    # The bytes of the line are the bytes that the worker got.
    assert office.site.fake.served[1].body == json.dumps(with_numbers["body"]).encode()
    assert [each.id async for each in client.batches.list(limit=1)] == [batch.id]
    names = [each.filename async for each in client.files.list(limit=1)]
    assert names == [f"{batch.id}_output.jsonl", "in.jsonl"]
    metrics = (await office.site.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).body
    assert b'proxy_requests_total{route="chat/completions"' in metrics
    assert b'proxy_batch_lines_total{outcome="completed"} 2' in metrics
    assert b"proxy_batch_lines_in_flight 0" in metrics


async def test_files_come_and_go(office: Office) -> None:
    client = office.client
    file_id = await office.upload(["{}"] * 3)
    file = await client.files.retrieve(file_id)
    assert (file.bytes, file.purpose, file.filename) == (8, "batch", "in.jsonl")
    assert (await client.files.content(file_id)).content == b"{}\n{}\n{}"
    assert (await client.files.delete(file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file_id)
    assert [each.id async for each in client.files.list()] == []


async def test_a_file_of_many_results_goes_whole(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "MAX_RESULTS", 3)
    done = await office.until(await office.begin(lines(8)))
    assert len(await office.lines_of(done.output_file_id)) == 8
    assert (await office.client.files.delete(done.output_file_id or "")).deleted
    count = "SELECT count(*) FROM results"
    left = await office.batches.keeper(lambda store: store.connection.execute(count).fetchone()[0])
    assert left == 0


async def test_lines_that_fail_are_in_the_error_file(office: Office) -> None:
    fake = office.site.fake

    async def answer(call: Any) -> None:
        text = call.json()["messages"][0]["content"]
        await (scripts.error(400) if text == "bad" else scripts.obey("w0"))(call)

    fake.always(answer)
    done = await office.until(await office.begin([line("x", "bad"), line("y", "good")]))
    assert done.status == "completed"
    assert present(done.request_counts).model_dump() == {"total": 2, "completed": 1, "failed": 1}
    assert [each["custom_id"] for each in await office.lines_of(done.output_file_id)] == ["y"]
    [failed] = await office.lines_of(done.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("x", 400)


async def test_a_file_with_mistakes_is_refused_line_by_line(office: Office) -> None:
    wrong = ["{nonsense", line("a"), line("a"), line("b", url="/v1/embeddings"), {"custom_id": "c"}]
    done = await office.until(await office.begin(wrong))
    assert done.status == "failed"
    assert done.errors is not None
    assert done.errors.data is not None
    assert [(each.line, each.code, each.param) for each in done.errors.data] == [
        (1, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_url", "url"),
        (5, "missing_required_parameter", "method"),
    ]
    assert office.site.served() == []


async def test_a_restart_in_the_middle_leaves_one_result_for_each_line(office: Office) -> None:
    opening = asyncio.Event()
    fake = office.site.fake
    answered: Counter[str] = Counter()

    async def half(call: Any) -> None:
        text = call.json()["messages"][0]["content"]
        if int(text[1:]) % 2:
            await scripts.gated(opening, scripts.obey("w0"))(call)
        else:
            await scripts.obey("w0")(call)
        answered[text] += 1

    fake.always(half)
    batch = await office.begin(lines(40))
    await fake.got(8)
    await eventually(lambda: len(answered) >= 1, within=20)
    await office.reopen()
    assert (await office.client.batches.retrieve(batch.id)).status == "in_progress"
    opening.set()
    done = await office.until(batch)
    assert done.status == "completed"
    results = await office.lines_of(done.output_file_id)
    assert [each["custom_id"] for each in results] == [f"r{n}" for n in range(40)]
    assert present(done.request_counts).model_dump() == {"total": 40, "completed": 40, "failed": 0}
    # At least once; those that were cut, again.
    assert {text for text, _ in Counter(texts(fake.served)).items()} == {f"r{n}" for n in range(40)}
    await office.site.settled()


async def test_lines_for_an_adapter_wait_until_workers_say_that_they_have_it(
    start: Start, tmp_path: Path
) -> None:
    """As after a restart: a fleet file knows nothing of adapters, and the probes come later."""
    site = await start(Fake(up=False))
    office = Office(site, tmp_path)
    await office.open()
    body = {**line("")["body"], "model": "adapter"}
    batch = await office.begin([line("a", body=body)])
    await office.until(batch, "in_progress")
    await office.batches.lane.turn()
    assert office.batches.lane.in_flight == 0
    site.fleet.roster.set_served("w0", ("tiny", "adapter"), 16384)
    site.up("w0")
    done = await office.until(batch)
    assert present(done.request_counts).model_dump() == {"total": 1, "completed": 1, "failed": 0}
    await office.close()


async def test_cancelling_drops_what_runs_and_keeps_what_is_done(office: Office) -> None:
    fake = office.site.fake
    fake.then(scripts.obey("w0"))
    fake.always(scripts.stall)
    batch = await office.begin(lines(20))
    await fake.got(3)
    await eventually(fake.served[0].answered.is_set)
    asked = await office.client.batches.cancel(batch.id)
    assert asked.status in ("cancelling", "cancelled")
    done = await office.until(batch)
    assert done.status == "cancelled"
    assert len(await office.lines_of(done.output_file_id)) == 1
    left = await office.lines_of(done.error_file_id)
    assert len(left) == 19
    assert {each["error"]["code"] for each in left} == {"batch_cancelled"}
    await asyncio.gather(*(call.lost.wait() for call in fake.served[1:]))
    await office.site.settled()
    with pytest.raises(openai.ConflictError, match="Cannot cancel"):
        await office.client.batches.cancel(batch.id)


async def test_a_batch_expires_with_its_window(office: Office) -> None:
    fake = office.site.fake
    fake.then(scripts.obey("w0"))
    fake.always(scripts.stall)
    batch = await office.begin(lines(3), window="2h")
    await fake.got(3)
    await eventually(fake.served[0].answered.is_set)
    office.skip(2 * 3600 - 60)
    assert (await office.client.batches.retrieve(batch.id)).status == "in_progress"
    office.skip(61)
    done = await office.until(batch)
    assert (done.status, done.expired_at is None) == ("expired", False)
    assert len(await office.lines_of(done.output_file_id)) == 1
    left = await office.lines_of(done.error_file_id)
    assert [each["error"]["code"] for each in left] == ["batch_expired"] * 2


async def test_people_go_first(start: Start, tmp_path: Path) -> None:
    site = await start(Fake(max_requests=2))
    office = Office(site, tmp_path, concurrency=4)
    await office.open()
    opening = asyncio.Event()
    site.fake.always(scripts.gated(opening, scripts.obey("w0")))
    people = [asyncio.create_task(site.ask(chat("people"), within=30)) for _ in range(6)]
    await eventually(lambda: len(site.router.queue) == 4)
    batch = await office.begin(lines(3))
    await office.until(batch, "in_progress")
    await office.batches.lane.turn()
    assert office.batches.lane.in_flight == 0
    opening.set()
    assert [answer.status for answer in await asyncio.gather(*people)] == [200] * 6
    assert (await office.until(batch)).status == "completed"
    assert texts(site.served()) == ["people"] * 6 + ["r0", "r1", "r2"]
    await office.close()


async def test_turns_are_kept_when_there_is_room_for_one_line(start: Start, tmp_path: Path) -> None:
    site = await start()
    office = Office(site, tmp_path, concurrency=1)
    await office.open()
    opening = asyncio.Event()
    site.fake.always(scripts.gated(opening, scripts.obey("w0")))
    one = await office.begin(lines(9, "a"))
    await site.fake.got(1)
    two = await office.begin(lines(3, "b"))
    await office.until(two, "in_progress")
    opening.set()
    assert (await office.until(one)).status == "completed"
    order = "".join(text[0] for text in texts(site.served()))
    assert order == "abababaaaaaa"
    await office.close()


async def test_no_more_at_once_than_may_be(start: Start, tmp_path: Path) -> None:
    site = await start(Fake(max_requests=100))
    office = Office(site, tmp_path, concurrency=3)
    await office.open()
    most = 0

    async def count(call: Any) -> None:
        nonlocal most
        most = max(most, office.batches.lane.in_flight)
        await scripts.obey("w0")(call)

    site.fake.always(count)
    assert (await office.until(await office.begin(lines(30)))).status == "completed"
    assert most == 3
    await office.close()


async def test_a_worker_that_fails_is_asked_again_a_few_times(start: Start, tmp_path: Path) -> None:
    site = await start(router={"max_attempts": 1})
    office = Office(site, tmp_path)
    await office.open()
    site.fake.then(scripts.error(500))
    site.fake.always(scripts.obey("w0"))
    batch = await office.begin(lines(1))
    await site.fake.got(1)
    await eventually(lambda: office.batches.lane.in_flight == 0)
    office.skip(60)
    done = await office.until(batch)
    assert (done.status, present(done.request_counts).completed) == ("completed", 1)
    assert len(site.served()) == 2
    await office.close()


async def test_a_line_that_always_fails_comes_to_an_end(start: Start, tmp_path: Path) -> None:
    site = await start(router={"max_attempts": 1}, wire={"idle_s": 3600.0})
    office = Office(site, tmp_path)
    await office.open()
    site.fake.always(scripts.error(500))
    batch = await office.begin(lines(1))
    for tries in range(1, 4):
        await site.fake.got(tries)
        await eventually(lambda: office.batches.lane.in_flight == 0)
        office.skip(60)  # by then the worker may be tried again
    done = await office.until(batch)
    [failed] = await office.lines_of(done.error_file_id)
    assert failed["response"]["status_code"] == 500
    await office.close()


async def test_a_line_that_two_workers_dropped_is_not_sent_again(
    start: Start, tmp_path: Path
) -> None:
    site = await start(*(Fake(f"w{n}") for n in range(4)))
    office = Office(site, tmp_path)
    await office.open()
    site.always(scripts.reset)
    done = await office.until(await office.begin(lines(1)))
    [failed] = await office.lines_of(done.error_file_id)
    assert failed["response"]["body"]["error"]["code"] == "request_dropped"
    assert len(site.served()) == 2
    await office.close()


async def test_a_line_that_takes_too_long_is_not_begun_anew(office: Office) -> None:
    site = office.site
    site.fake.always(scripts.stall)
    batch = await office.begin(lines(1))
    await site.fake.got()
    site.fleet.health.set_gauges("w0", Gauges(at=site.clock()))
    office.skip(2 * site.wire.settings.first_byte_s)
    site.fleet.health.set_gauges("w0", Gauges(at=site.clock(), generation_tokens_total=1.0))
    done = await office.until(batch)
    [failed] = await office.lines_of(done.error_file_id)
    assert failed["response"]["body"]["error"]["code"] == "unfinished"
    assert len(site.served()) == 1


async def test_a_line_has_its_window_and_no_time_limit(start: Start, tmp_path: Path) -> None:
    office = Office(await start(wire={"request_s": 30.0}), tmp_path)
    await office.open()
    opening = asyncio.Event()
    office.site.fake.always(scripts.gated(opening, scripts.answer(200, b'"well"')))
    batch = await office.begin(lines(1))
    await office.site.fake.got()
    office.skip(60)
    await asyncio.sleep(0.5)  # two sweeps
    opening.set()
    done = await office.until(batch)
    assert len(await office.lines_of(done.output_file_id)) == 1
    assert len(office.site.served()) == 1
    await office.close()


async def test_nobody_there_is_no_verdict_on_a_line(office: Office) -> None:
    office.site.down("w0")
    batch = await office.begin(lines(2))
    await office.until(batch, "in_progress")
    for _ in range(3):
        office.skip(60)
        await office.batches.lane.turn()
    assert (await office.client.batches.retrieve(batch.id)).status == "in_progress"
    office.site.up("w0")
    assert (await office.until(batch)).status == "completed"


async def test_a_full_disk_has_room_again_by_keeping_things_for_less_long(office: Office) -> None:
    done = await office.until(await office.begin(lines(2)))
    office.skip(3 * 86_400.0)
    await office.batches.lane.turn()
    assert await office.lines_of(done.output_file_id)
    office.batches.reconfigure(office.settings.model_copy(update={"keep_days": 1.0}))
    for _ in range(4):  # its batch, the files, and their room
        await office.batches.lane.turn()
    count = await office.batches.keeper(
        lambda store: store.connection.execute("SELECT count(*) FROM results").fetchone()[0]
    )
    assert count == 0
    assert [each.id async for each in office.client.files.list()] == []


async def test_forgetting_that_failed_is_tried_again_at_once(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []

    def purge(*_: Any) -> None:
        tried.append(True)
        if len(tried) == 1:
            raise StoreFullError("no room")

    monkeypatch.setattr(Store, "purge", purge)
    office.batches.lane.purge_soon()
    await eventually(lambda: office.batches.lane.paused)  # it has heard of that, from a thread
    office.skip(10)
    await eventually(lambda: len(tried) >= 2)


async def kept(office: Office) -> int:
    """Let the lane forget what it may; return how many results there are still."""
    for _ in range(4):  # a batch, files, and their room
        office.batches.lane.purge_soon()  # as a reload does
        await office.batches.lane.turn()
    return await office.batches.keeper(
        lambda store: store.connection.execute("SELECT count(*) FROM results").fetchone()[0]
    )


async def test_when_the_clock_jumps_ahead_nothing_is_forgotten_for_a_day(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be set wrong, and results are not to be had again."""
    keep_s = office.settings.keep_days * DAY_S
    await office.until(await office.begin(lines(2)))
    office.ahead += 2 * keep_s
    assert await kept(office) == 2
    assert caplog.text.count("jumped ahead") == 1
    office.ahead -= 2 * keep_s  # it is set right
    office.skip(DISTRUST_S)
    assert await kept(office) == 2
    office.skip(2 * keep_s)
    assert await kept(office) == 0


async def test_a_clock_that_stays_ahead_is_trusted_in_the_end(office: Office) -> None:
    """As that of a machine that slept."""
    await office.until(await office.begin(lines(2)))
    office.ahead += 2 * office.settings.keep_days * DAY_S
    assert await kept(office) == 2
    office.skip(DISTRUST_S)
    assert await kept(office) == 0


async def test_room_is_given_back_to_the_disk_while_the_clock_is_in_doubt(office: Office) -> None:
    office.ahead += DAY_S
    await kept(office)
    file = await office.upload(["x" * 1_000_000])
    await office.client.files.delete(file)

    async def free() -> int:
        found: int = await office.batches.keeper(
            lambda store: store.connection.execute("PRAGMA freelist_count").fetchone()[0]
        )
        return found

    assert await free() > 0
    await kept(office)
    assert await free() == 0


async def test_a_folder_has_one_lane(office: Office) -> None:
    other = Office(office.site, office.path)
    second = BatchScheduler(
        office.site.wire, office.batches.keeper, other.settings, office.path, office.wall
    )
    await eventually(lambda: office.batches.lane._lock.is_held)
    assert not second._take_lock()
    await office.reopen()
    await eventually(lambda: office.batches.lane._lock.is_held)
    office.batches.lane.stop()
    assert second._take_lock()
    second.stop()


async def test_a_folder_without_locks_is_told_of(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = office.batches.lane
    why = errno.ENOLCK

    def flock(lock: int, how: int) -> None:  # noqa: ARG001
        raise OSError(why, os.strerror(why))

    with monkeypatch.context() as without:
        without.setattr(fcntl, "flock", flock)
        lane.stop()
        await lane.turn()
        assert "lane.lock" in lane.paused
        assert lane.counts.paused
        why = errno.EAGAIN  # another one leads
        assert not lane._take_lock()
        why = errno.EACCES
        assert not lane._take_lock()
    batch = await office.begin(lines(1))
    office.skip(10)
    assert (await office.until(batch)).status == "completed"
    assert lane.paused == ""


async def test_turns_that_fail_alike_are_told_of_once(
    office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lane = office.batches.lane
    why = "attempt to write a readonly database"

    async def look() -> None:
        raise sqlite3.OperationalError(why)

    monkeypatch.setattr(lane, "_read_batches", look)

    async def fail() -> tuple[int, int]:
        office.skip(10)
        await lane.turn()
        said = [record for record in caplog.records if record.name == lane_module.__name__]
        return len(said), sum(record.exc_info is not None for record in said)

    assert [await fail() for _ in range(3)] == [(2, 1)] * 3
    why = "disk I/O error"
    assert await fail() == (4, 2)


async def test_a_turn_that_fails_is_not_the_last(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = office.batches.lane
    failing = True

    def send() -> None:
        if failing:
            raise RuntimeError("a mistake of ours")
        BatchScheduler._send(lane)

    monkeypatch.setattr(lane, "_send", send)
    batch = await office.begin(lines(1))
    await eventually(lambda: "a mistake of ours" in lane.paused)
    failing = False
    office.skip(10)
    assert (await office.until(batch)).status == "completed"
    assert lane.paused == ""


async def test_a_drain_cuts_lines_and_begins_none(office: Office) -> None:
    office.site.fake.always(scripts.stall)
    batch = await office.begin(lines(5))
    await office.site.fake.got(5)
    draining = asyncio.create_task(office.site.wire.drain(0.0))
    await draining
    assert office.batches.lane.in_flight == 0
    kept = await office.batches.keeper(lambda store: store.active())
    assert [(each.id, each.completed, each.failed) for each in kept] == [(batch.id, 0, 0)]

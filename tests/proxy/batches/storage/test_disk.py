"""Failing disks: responses, log, deletes on a full disk, and a removed folder."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from proxy.batches.api import DISK_LOG_S
from proxy.batches.storage import disk
from proxy.batches.storage import sqlite as sqlite_module
from proxy.batches.storage.lock import FolderLock
from proxy.batches.storage.sqlite import SqliteBackend
from proxy.batches.storage.store import Store
from proxy.batches.types import DiskError, File, Status, StoreFullError
from tests.present import present
from tests.proxy.batches.conftest import OpenHarness
from tests.proxy.batches.harness import CHAT, BatchHarness, lines
from tests.proxy.batches.storage.test_store import KEEP_S, NOW, batch_of, ended, result
from tests.proxy.batches.test_api import form, post
from tests.proxy.wire import scripts
from tests.proxy.wire.raw_client import get, request
from tests.proxy.wire.site import eventually

pytestmark = pytest.mark.usefixtures("short_pauses")
# SQLite's error (code, message), the status for clients, and the remedy in the log.
FULL = (sqlite3.SQLITE_FULL, "database or disk is full")
ERRORS = {
    "full": (*FULL, 507, "free space"),
    "write": (sqlite3.SQLITE_IOERR_WRITE, "disk I/O error", 507, "quota"),  # EDQUOT, EFBIG, EIO
    "flush": (sqlite3.SQLITE_IOERR_FSYNC, "disk I/O error", 507, "quota"),
    "index": (sqlite3.SQLITE_IOERR_SHMSIZE, "disk I/O error", 507, "quota"),
    "read": (sqlite3.SQLITE_IOERR_READ, "disk I/O error", 503, "kernel's log"),
    "readonly": (
        sqlite3.SQLITE_READONLY, "attempt to write a readonly database", 503, "remount",
    ),
    "cantopen": (sqlite3.SQLITE_CANTOPEN, "unable to open database file", 503, "router's user"),
    "locked": (sqlite3.SQLITE_BUSY, "database is locked", 503, "keeps the database locked"),
    "damaged": (
        sqlite3.SQLITE_CORRUPT, "database disk image is malformed", 503, "from a backup",
    ),
}  # fmt: skip


def sqlite_error(code: int, message: str) -> sqlite3.OperationalError:
    """Return an error as SQLite raises it."""
    error = sqlite3.OperationalError(message)
    error.sqlite_errorcode = code
    return error


class FailingDisk:
    """Fails statements that begin with these words, on every connection."""

    def __init__(self) -> None:
        self.statements: tuple[str, ...] = ()
        self.error: BaseException | None = None
        self.fails = lambda: True

    @contextmanager
    def fail(self, error: BaseException, *statements: str) -> Iterator[None]:
        self.error, self.statements = error, statements
        try:
            yield
        finally:
            self.statements = ()

    def connection(self) -> type[sqlite3.Connection]:
        disk = self

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:  # type: ignore[override]
                if disk.error and sql.startswith(disk.statements or ("never",)) and disk.fails():
                    raise disk.error
                return super().execute(sql, *args)

        return Connection


@pytest.fixture
def failing_disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    """Make stores opened from now on use a failing disk."""
    disk_, connect = FailingDisk(), sqlite3.connect

    def connect_to_disk(*args: Any, **named: Any) -> sqlite3.Connection:
        return connect(*args, **named, factory=disk_.connection())

    monkeypatch.setattr(sqlite_module.sqlite3, "connect", connect_to_disk)
    return disk_


@pytest.fixture
async def failing_harness(failing_disk: FailingDisk, harness: BatchHarness) -> BatchHarness:
    """Start a router on the failing disk."""
    assert failing_disk.statements == ()
    return harness


def lock_of(harness: BatchHarness) -> FolderLock:
    backend = harness.batches.store._opened_store().backend
    assert isinstance(backend, SqliteBackend)
    return backend._lock


def delete(file_id: str) -> bytes:
    return request(b"", path=f"/v1/files/{file_id}", method="DELETE")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [
        record
        for record in caplog.records
        if record.name.startswith("proxy.batches") and record.levelno >= logging.WARNING
    ]


async def test_failed_writes_return_openai_errors_and_are_logged(
    failing_disk: FailingDisk, failing_harness: BatchHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness, site = failing_harness, failing_harness.site
    site.fake.always(scripts.stall)
    spare = await harness.upload(lines(1))
    body = {"input_file_id": spare, "endpoint": CHAT, "completion_window": "24h"}
    for kind, (code, message, status, remedy) in ERRORS.items():
        batch = await harness.begin(lines(1))
        for data in (
            form(content=b"{}"),
            post("/v1/batches", body),
            post(f"/v1/batches/{batch.id}/cancel", {}),
            delete(await harness.upload(lines(1))),
        ):
            for word in ("BEGIN", "COMMIT", "INSERT", "UPDATE", "DELETE"):
                caplog.clear()
                site.skip(DISK_LOG_S)
                with failing_disk.fail(sqlite_error(code, message), word):
                    answer = await site.ask(data)
                if answer.status == 200:  # the request has no such statement
                    assert word not in {"BEGIN", "COMMIT"}
                    break
                assert answer.status == status, (kind, data, word)
                named = "insufficient_storage" if status == 507 else "storage_unavailable"
                assert answer.error()["code"] == named
                assert len(answer.all(b"retry-after")) == (status == 503)
                [record] = [r for r in warnings_of(caplog) if "refused" in r.getMessage()]
                assert record.exc_info is None
                for part in (str(harness.path), "router.batches.path", remedy):
                    assert part in record.getMessage()
    assert (await site.ask(get("/v1/files"))).status == 200
    assert not [record for record in warnings_of(caplog) if record.exc_info]


async def test_repeated_request_on_a_full_disk_is_logged_once_a_minute(
    failing_disk: FailingDisk, failing_harness: BatchHarness, caplog: pytest.LogCaptureFixture
) -> None:
    site = failing_harness.site

    async def refuse() -> int:
        assert (await site.ask(form(content=b"{}"))).status == 507
        return sum("refused" in record.getMessage() for record in warnings_of(caplog))

    with failing_disk.fail(sqlite_error(*FULL), "BEGIN"):
        assert [await refuse() for _ in range(3)] == [1] * 3
        site.skip(DISK_LOG_S)
        assert await refuse() == 2


async def test_failed_reads_return_the_same_errors(
    failing_disk: FailingDisk, failing_harness: BatchHarness, caplog: pytest.LogCaptureFixture
) -> None:
    code, message, status, _ = ERRORS["read"]
    file = await failing_harness.upload(lines(1))
    with failing_disk.fail(sqlite_error(code, message), "SELECT"):
        for path in ("/v1/files", "/v1/batches", f"/v1/files/{file}", f"/v1/files/{file}/content"):
            answer = await failing_harness.site.ask(get(path))
            assert answer.status == status
            assert answer.error()["message"]
    assert not [record for record in warnings_of(caplog) if record.exc_info]


@pytest.mark.parametrize(
    ("kind", "word"),
    [("full", "COMMIT"), ("locked", "COMMIT")]
    + [("write", word) for word in ("BEGIN", "INSERT", "UPDATE", "DELETE", "SELECT", "COMMIT")],
)
async def test_batches_pause_while_the_disk_fails(
    failing_disk: FailingDisk,
    failing_harness: BatchHarness,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    word: str,
) -> None:
    """Covers results, the result files, and the end of the batch."""
    code, message, _, remedy = ERRORS[kind]
    batch, opening = await failing_harness.begin_held(2)
    scheduler = failing_harness.batches.scheduler
    with failing_disk.fail(sqlite_error(code, message), word):
        opening.set()
        await eventually(lambda: scheduler.counts.paused)
        await asyncio.sleep(0.2)
    done = await failing_harness.until(batch)
    assert done.status == "completed"
    assert len(await failing_harness.lines_of(done.output_file_id)) == 2
    assert not scheduler.counts.paused
    [record] = warnings_of(caplog)
    assert record.exc_info is None
    assert str(failing_harness.path) in record.getMessage()
    assert remedy in record.getMessage()


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Limit the size of files that this process writes (EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_file_size_limit_refuses_uploads_and_allows_deletes(
    harness: BatchHarness, caplog: pytest.LogCaptureFixture
) -> None:
    site = harness.site
    kept = [await harness.upload(["x" * 100_000]) for _ in range(3)]
    largest = max(path.stat().st_size for path in harness.path.iterdir() if path.name != "reserve")
    with limit_file_size(largest + 500_000):
        statuses = [(await site.ask(form(content=b"x" * 90_000))).status for _ in range(20)]
        assert set(statuses) == {200, 507}
        assert statuses[-1] == 507
        for file in kept:
            assert (await site.ask(delete(file))).json()["deleted"]
        assert (await site.ask(form(content=b"x" * 90_000))).status == 200
    assert not [record for record in warnings_of(caplog) if record.exc_info]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 64 MiB if this process may."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root mounts")
    command = [mount, "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mount is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(folder).free == 0


@pytest.mark.parametrize("size", [20_000, 3_000_000, 12_000_000])
def test_files_on_a_full_disk_can_be_deleted_and_free_space(small_disk: Path, size: int) -> None:
    store = Store(SqliteBackend(small_disk / "batches"), KEEP_S)
    files: list[File] = []
    with suppress(StoreFullError):
        while True:
            files.append(store.add_file("t", "in", "batch", os.urandom(size), NOW))
    fill(small_disk)
    files = files[::7] if len(files) > 7 else files
    for file in files:
        assert store.delete_file("t", file.id)
    freed = len(files) * size
    assert shutil.disk_usage(small_disk).free > 0.4 * freed - (4 << 20)
    assert store.add_file("t", "in", "batch", os.urandom(min(size, freed // 4)), NOW)
    assert store.backend.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert store.backend.execute("PRAGMA wal_autocheckpoint").fetchone()[0] == 1000
    store.close()


def test_results_on_a_full_disk_can_be_deleted(small_disk: Path) -> None:
    store = Store(SqliteBackend(small_disk / "batches"), KEEP_S)
    batch = batch_of(store, 200)
    body = b'"%b"' % (b"x" * 50_000)
    store.save_results([result(batch, number, body=body) for number in range(1, 201)])
    output = ended(store, batch).output
    fill(small_disk)
    with pytest.raises(StoreFullError):
        store.add_file("t", "in", "batch", bytes(100_000), NOW)
    file = present(store.file("t", output or ""))
    last: int | None = 0
    while last is not None:
        last = store.delete_results_after(file, last)
    assert store.delete_file("t", file.id)
    assert shutil.disk_usage(small_disk).free > 4 << 20
    store.close()


def test_batch_on_a_full_disk_can_be_cancelled(small_disk: Path) -> None:
    store = Store(SqliteBackend(small_disk / "batches"), KEEP_S)
    batch = batch_of(store, 2)
    store.backend.room._empty_log()
    fill(small_disk)
    with pytest.raises(StoreFullError):
        store.save_results([result(batch, 1)])
    cancelled = present(store.cancel_batch("t", batch.id, NOW))
    assert cancelled.status is Status.CANCELLING
    store.close()


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE])
def test_reserve_is_used_by_deletes_and_restored(
    failing_disk: FailingDisk,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    monkeypatch.setattr(disk, "SHORT_BYTES", 0)
    reserve = tmp_path / "reserve"
    file = store.add_file("t", "in", "batch", b"{}", NOW)
    assert reserve.stat().st_size == disk.RESERVE_BYTES
    failing_disk.fails = lambda: reserve.stat().st_size > 0
    with failing_disk.fail(sqlite_error(code, "no room"), "COMMIT"):
        with pytest.raises(StoreFullError):
            store.add_file("t", "in", "batch", b"{}", NOW)
        assert reserve.stat().st_size == disk.RESERVE_BYTES
        assert store.delete_file("t", file.id)
    assert store.file("t", file.id) is None
    assert reserve.stat().st_size == disk.RESERVE_BYTES


def test_upload_needs_space_for_log_and_database(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk, "disk_usage", lambda _: free._replace(free=1_999_999))
    with pytest.raises(StoreFullError, match="is full"):
        store.add_file("t", "in", "batch", bytes(1_000_000), NOW)
    assert store.add_file("t", "in", "batch", bytes(999_999), NOW)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((full, StoreFullError) for full in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
        *((other, DiskError) for other in (errno.EIO, errno.EROFS)),
    ],
)
def test_system_errors_become_disk_errors(
    tmp_path: Path, number: int, kind: type[DiskError]
) -> None:
    with (
        pytest.raises(DiskError, match=r"router\.batches\.path") as caught,
        disk.disk_errors(tmp_path),
    ):
        raise OSError(number, os.strerror(number), "file")
    assert type(caught.value) is kind
    assert str(tmp_path) in str(caught.value)


# A folder removed at run time


async def wait_for_pause(harness: BatchHarness) -> None:
    await eventually(lambda: harness.batches.scheduler.counts.paused)
    assert "removed or replaced" in harness.batches.scheduler.paused
    assert str(harness.path) in harness.batches.scheduler.paused


async def check_unavailable(harness: BatchHarness) -> None:
    """Check that requests that need the folder get 503."""
    for data in (
        form(content=b"{}"),
        get("/v1/files"),
        get("/v1/batches"),
        delete("file-1"),
        post("/v1/batches/batch_1/cancel", {}),
    ):
        answer = await harness.site.ask(data)
        assert (answer.status, answer.error()["code"]) == (503, "storage_unavailable")
        assert answer.one(b"retry-after") == b"5"


async def test_removed_folder_pauses_batches_until_it_is_back(
    harness: BatchHarness, caplog: pytest.LogCaptureFixture
) -> None:
    lost_file = await harness.upload(lines(1))
    shutil.rmtree(harness.path)
    await check_unavailable(harness)
    await wait_for_pause(harness)
    assert not harness.path.exists(), "a missing mount must not be replaced by a folder"
    await asyncio.sleep(0.2)
    harness.path.mkdir()
    await eventually(lambda: not harness.batches.scheduler.counts.paused)
    assert (await harness.site.ask(get(f"/v1/files/{lost_file}"))).status == 404
    done = await harness.until(await harness.begin(lines(2)))
    assert len(await harness.lines_of(done.output_file_id)) == 2
    records = [r.getMessage() for r in warnings_of(caplog) if "refused" not in r.getMessage()]
    assert len(records) == 2
    assert "was replaced" in records[1]
    assert not [record for record in warnings_of(caplog) if record.exc_info]


async def test_folder_moved_away_and_back_loses_nothing(harness: BatchHarness) -> None:
    batch, opening = await harness.begin_held(2)
    away = harness.path.rename(harness.path.with_name("away"))
    await wait_for_pause(harness)
    opening.set()  # the results come while the folder is away
    await check_unavailable(harness)
    away.rename(harness.path)
    done = await harness.until(batch)
    assert len(await harness.lines_of(done.output_file_id)) == 2
    assert len(harness.site.fake.served) == 2, "no line is repeated"
    await eventually(lambda: not harness.batches.scheduler.counts.paused)


async def test_folder_restored_from_a_copy_is_reopened(harness: BatchHarness) -> None:
    """Running lines are repeated, and their earlier results are dropped."""
    batch, opening = await harness.begin_held(2)
    copy = shutil.copytree(harness.path, harness.path.with_name("copy"))
    harness.path.rename(harness.path.with_name("away"))
    copy.rename(harness.path)
    await harness.site.fake.got(4)
    opening.set()
    done = await harness.until(batch)
    assert len(await harness.lines_of(done.output_file_id)) == 2
    assert harness.batches.scheduler.is_leader
    assert not lock_of(harness).is_lost


async def test_write_during_removal_of_the_folder_gets_503(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_file = Store.add_file

    def add_then_remove(self: Store, *args: Any) -> Any:
        added = add_file(self, *args)
        shutil.rmtree(harness.path)
        return added

    monkeypatch.setattr(Store, "add_file", add_then_remove)
    answer = await harness.site.ask(form(content=b"{}"))
    assert (answer.status, answer.error()["code"]) == (503, "storage_unavailable")


async def test_removed_lock_is_taken_again(harness: BatchHarness) -> None:
    """Otherwise another router would take a new lock, and both would run lines."""
    scheduler = harness.batches.scheduler
    await eventually(lambda: scheduler.is_leader)
    (harness.path / "lane.lock").unlink()
    await scheduler.turn()
    assert scheduler.is_leader
    assert not lock_of(harness).is_lost


async def test_router_without_the_lock_also_notices_a_removed_folder(
    open_harness: OpenHarness, tmp_path: Path
) -> None:
    first = await open_harness()
    await eventually(lambda: first.batches.scheduler.is_leader)
    second = await open_harness()
    away = first.path.rename(tmp_path / "away")
    for harness in (first, second):
        await wait_for_pause(harness)
        await check_unavailable(harness)
    away.rename(first.path)
    for harness in (first, second):
        await eventually(lambda harness=harness: not harness.batches.scheduler.counts.paused)
    assert not second.batches.scheduler.is_leader

"""A disk that fails: the answers, the log, deletes on a full disk, and a folder that is removed."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import shutil
import sqlite3
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from proxy.batches import scheduler
from proxy.batches.storage import disk
from proxy.batches.storage import schema as schema_module
from proxy.batches.storage.store import Store
from proxy.batches.types import DiskError, File, Status, StoreFullError
from tests.present import present
from tests.proxy.batches.office import CHAT, Office, lines
from tests.proxy.batches.storage.test_store import KEEP_S, NOW, batch_of, result
from tests.proxy.batches.test_api import form, post
from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Answer, get, request
from tests.proxy.wire.site import eventually

Ask = Callable[[], Awaitable[Answer]]
# What SQLite raises: (code, message), the status that clients get, and what the log advises.
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


def raised(code: int, message: str) -> sqlite3.OperationalError:
    """Return an error as SQLite raises it."""
    error = sqlite3.OperationalError(message)
    error.sqlite_errorcode = code
    return error


class Disk:
    """Fails the statements that begin with these words, of every connection."""

    def __init__(self) -> None:
        self.words: tuple[str, ...] = ()
        self.error: BaseException | None = None
        self.fails = lambda: True

    @contextmanager
    def failing(self, error: BaseException, *words: str) -> Iterator[None]:
        """Fail these statements for a while."""
        self.error, self.words = error, words
        try:
            yield
        finally:
            self.words = ()

    def connection(self) -> type[sqlite3.Connection]:
        """Make connections that ask this disk first."""
        disk = self

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:  # type: ignore[override]
                if disk.error and sql.startswith(disk.words or ("never",)) and disk.fails():
                    raise disk.error
                return super().execute(sql, *args)

        return Connection


@pytest.fixture
def bad_disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Have all stores that are opened from now on stand on one."""
    bad, connect = Disk(), sqlite3.connect

    def connected(*args: Any, **named: Any) -> sqlite3.Connection:
        return connect(*args, **named, factory=bad.connection())

    monkeypatch.setattr(schema_module.sqlite3, "connect", connected)
    return bad


@pytest.fixture
async def bad_office(bad_disk: Disk, office: Office) -> Office:
    """Start a router on that disk."""
    assert bad_disk.words == ()
    return office


def delete(file_id: str) -> bytes:
    """Return the bytes of a request that deletes a file."""
    return request(b"", path=f"/v1/files/{file_id}", method="DELETE")


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what batches logged of trouble."""
    return [
        each
        for each in caplog.records
        if each.name.startswith("proxy.batches") and each.levelno >= logging.WARNING
    ]


@pytest.mark.parametrize("kind", ERRORS)
async def test_each_write_that_fails_is_an_error_in_openais_shape_and_a_line_in_the_log(
    bad_disk: Disk, bad_office: Office, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    office, site = bad_office, bad_office.site
    code, message, status, remedy = ERRORS[kind]
    site.fake.always(scripts.stall)
    batch = await office.begin(lines(1))
    spare, other = [await office.upload(lines(1)) for _ in range(2)]
    asked = {"input_file_id": spare, "endpoint": CHAT, "completion_window": "24h"}
    await site.fake.got(1)
    for data in (
        form(content=b"{}"),
        post("/v1/batches", asked),
        post(f"/v1/batches/{batch.id}/cancel", {}),
        delete(other),
    ):
        for word in ("BEGIN", "COMMIT", "INSERT", "UPDATE", "DELETE"):
            caplog.clear()
            with bad_disk.failing(raised(code, message), word):
                answer = await site.ask(data)
            if answer.status == 200:  # it has no such statement
                assert word not in {"BEGIN", "COMMIT"}
                break
            assert answer.status == status, (data, word)
            named = "insufficient_storage" if status == 507 else "storage_unavailable"
            assert answer.error()["code"] == named
            assert len(answer.all(b"retry-after")) == (status == 503)
            told = [each for each in said(caplog) if "refused" in each.getMessage()]
            assert len(told) == 1
            assert told[0].exc_info is None
            for part in (str(office.path), "router.batches.path", remedy):
                assert part in told[0].getMessage()
    assert {each.status for each in [await site.ask(get("/v1/files"))]} == {200}
    assert not [each for each in said(caplog) if each.exc_info]


@pytest.mark.parametrize("kind", ["read", "cantopen", "locked", "damaged"])
async def test_reads_that_fail_are_told_alike(
    bad_disk: Disk, bad_office: Office, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    code, message, status, _ = ERRORS[kind]
    file = await bad_office.upload(lines(1))
    with bad_disk.failing(raised(code, message), "SELECT"):
        for path in ("/v1/files", "/v1/batches", f"/v1/files/{file}", f"/v1/files/{file}/content"):
            answer = await bad_office.site.ask(get(path))
            assert answer.status == status
            assert answer.error()["message"]
    assert not [each for each in said(caplog) if each.exc_info]


@pytest.mark.parametrize(
    ("kind", "word"),
    [(kind, "COMMIT") for kind in ERRORS]
    + [("write", word) for word in ("BEGIN", "INSERT", "UPDATE", "DELETE", "SELECT")],
)
async def test_batches_pause_for_a_disk_that_fails_and_go_on_when_it_is_well(
    bad_disk: Disk,
    bad_office: Office,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    word: str,
) -> None:
    """Results, the two files that show them, and the end of the batch."""
    code, message, _, remedy = ERRORS[kind]
    monkeypatch.setattr(scheduler, "ERROR_PAUSE_S", 0.05)
    opening = asyncio.Event()
    bad_office.site.fake.always(scripts.gated(opening, scripts.answer(200, b'"well"')))
    batch = await bad_office.begin(lines(2))
    await bad_office.site.fake.got(2)
    with bad_disk.failing(raised(code, message), word):
        opening.set()
        await eventually(lambda: bad_office.batches.lane.counts.paused)
        await asyncio.sleep(0.2)
    done = await bad_office.until(batch)
    assert done.status == "completed"
    assert len(await bad_office.lines_of(done.output_file_id)) == 2
    assert not bad_office.batches.lane.counts.paused
    told = said(caplog)
    assert len(told) == 1
    assert told[0].exc_info is None
    assert str(bad_office.path) in told[0].getMessage()
    assert remedy in told[0].getMessage()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let this process write no file beyond a size: EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_limit_on_file_sizes_refuses_uploads_and_lets_files_be_deleted(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    site = office.site
    kept = [await office.upload(["x" * 100_000]) for _ in range(3)]
    largest = max(each.stat().st_size for each in office.path.iterdir() if each.name != "reserve")
    with files_of_at_most(largest + 500_000):
        statuses = [(await site.ask(form(content=b"x" * 90_000))).status for _ in range(20)]
        assert set(statuses) == {200, 507}
        assert statuses[-1] == 507
        for file in kept:
            assert (await site.ask(delete(file))).json()["deleted"]
        assert (await site.ask(form(content=b"x" * 90_000))).status == 200
    assert not [each for each in said(caplog) if each.exc_info]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 64 MiB, where this process may."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root mounts")
    asked = [mount, "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if subprocess.run(asked, check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nothing be mounted")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no byte free on a disk."""
    with (folder / "filler").open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(folder).free == 0


@pytest.mark.parametrize("size", [20_000, 3_000_000, 12_000_000])
def test_files_are_deleted_on_a_disk_that_is_full_and_their_room_is_there_again(
    small_disk: Path, size: int
) -> None:
    store = Store(small_disk / "batches", KEEP_S)
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
    assert store.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert store.connection.execute("PRAGMA wal_autocheckpoint").fetchone()[0] == 1000
    store.close()


def test_results_are_deleted_on_a_disk_that_is_full(small_disk: Path) -> None:
    store = Store(small_disk / "batches", KEEP_S)
    batch = batch_of(store, 200)
    body = b'"%b"' % (b"x" * 50_000)
    store.save([result(batch, number, body=body) for number in range(1, 201)])
    store.end(batch.id, Status.COMPLETED, NOW)
    ended = present(store.batch("t", batch.id))
    fill(small_disk)
    with pytest.raises(StoreFullError):
        store.add_file("t", "in", "batch", bytes(100_000), NOW)
    file = present(store.file("t", ended.output or ""))
    last: int | None = 0
    while last is not None:
        last = store.empty_file(file, last)
    assert store.delete_file("t", file.id)
    assert shutil.disk_usage(small_disk).free > 4 << 20
    store.close()


def test_a_batch_is_cancelled_on_a_disk_that_is_full(small_disk: Path) -> None:
    store = Store(small_disk / "batches", KEEP_S)
    batch = batch_of(store, 2)
    store.room._empty_log()
    fill(small_disk)
    with pytest.raises(StoreFullError):
        store.save([result(batch, 1)])
    asked = present(store.cancel("t", batch.id, NOW))
    assert asked.status is Status.CANCELLING
    store.close()


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE])
def test_the_reserve_is_for_deletes_and_is_there_again_after_them(
    bad_disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(disk, "SHORT_BYTES", 0)
    store, reserve = Store(tmp_path, KEEP_S), tmp_path / "reserve"
    file = store.add_file("t", "in", "batch", b"{}", NOW)
    assert reserve.stat().st_size == disk.RESERVE_BYTES
    bad_disk.fails = lambda: reserve.stat().st_size > 0
    with bad_disk.failing(raised(code, "no room"), "COMMIT"):
        with pytest.raises(StoreFullError):
            store.add_file("t", "in", "batch", b"{}", NOW)
        assert reserve.stat().st_size == disk.RESERVE_BYTES
        assert store.delete_file("t", file.id)
    assert store.file("t", file.id) is None
    assert reserve.stat().st_size == disk.RESERVE_BYTES
    store.close()


def test_an_upload_needs_room_in_the_log_and_in_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, KEEP_S)
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk, "disk_usage", lambda _: free._replace(free=1_999_999))
    with pytest.raises(StoreFullError, match="is full"):
        store.add_file("t", "in", "batch", bytes(1_000_000), NOW)
    assert store.add_file("t", "in", "batch", bytes(999_999), NOW)
    store.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EFBIG, StoreFullError),
        (errno.EIO, DiskError),
        (errno.EROFS, DiskError),
    ],
)
def test_the_systems_errors_are_named(tmp_path: Path, number: int, kind: type[DiskError]) -> None:
    with (
        pytest.raises(DiskError, match=r"router\.batches\.path") as caught,
        disk.disk_errors(tmp_path),
    ):
        raise OSError(number, os.strerror(number), "file")
    assert type(caught.value) is kind
    assert str(tmp_path) in str(caught.value)


# A folder that is removed while the router runs


async def paused(office: Office) -> None:
    """Wait until the folder is missed."""
    await eventually(lambda: office.batches.lane.counts.paused)
    assert "removed or replaced" in office.batches.lane.paused
    assert str(office.path) in office.batches.lane.paused


async def goes_on(office: Office) -> None:
    """Wait until the folder is used again."""
    await eventually(lambda: not office.batches.lane.counts.paused)


async def unavailable(office: Office) -> None:
    """Have everything that needs the folder refused."""
    for data in (
        form(content=b"{}"),
        get("/v1/files"),
        get("/v1/batches"),
        delete("file-1"),
        post("/v1/batches/batch_1/cancel", {}),
    ):
        answer = await office.site.ask(data)
        assert (answer.status, answer.error()["code"]) == (503, "storage_unavailable")
        assert answer.one(b"retry-after") == b"5"


async def test_a_folder_that_is_removed_is_missed_and_used_again_when_it_is_back(
    office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler, "ERROR_PAUSE_S", 0.05)
    lost = await office.upload(lines(1))
    shutil.rmtree(office.path)
    await unavailable(office)
    await paused(office)
    assert not office.path.exists(), "as at a mount that is missing, none is made"
    await asyncio.sleep(0.2)
    office.path.mkdir()
    await goes_on(office)
    assert (await office.site.ask(get(f"/v1/files/{lost}"))).status == 404
    done = await office.until(await office.begin(lines(2)))
    assert len(await office.lines_of(done.output_file_id)) == 2
    told = [each.getMessage() for each in said(caplog) if "refused" not in each.getMessage()]
    assert len(told) == 2
    assert "was replaced" in told[1]
    assert not [each for each in said(caplog) if each.exc_info]


async def test_a_folder_that_is_moved_away_and_back_has_lost_nothing(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "ERROR_PAUSE_S", 0.05)
    opening = asyncio.Event()
    office.site.fake.always(scripts.gated(opening, scripts.answer(200, b'"well"')))
    batch = await office.begin(lines(2))
    await office.site.fake.got(2)
    away = office.path.rename(office.path.with_name("away"))
    await paused(office)
    opening.set()  # the results come while it is away
    await unavailable(office)
    away.rename(office.path)
    done = await office.until(batch)
    assert len(await office.lines_of(done.output_file_id)) == 2
    assert len(office.site.fake.served) == 2, "no line was run again"
    await goes_on(office)


async def test_a_folder_that_is_restored_from_a_copy_is_opened_anew(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was in flight is run again, and its results of before are of no batch."""
    monkeypatch.setattr(scheduler, "ERROR_PAUSE_S", 0.05)
    opening = asyncio.Event()
    office.site.fake.always(scripts.gated(opening, scripts.answer(200, b'"well"')))
    batch = await office.begin(lines(2))
    await office.site.fake.got(2)
    copy = shutil.copytree(office.path, office.path.with_name("copy"))
    office.path.rename(office.path.with_name("away"))
    copy.rename(office.path)
    await office.site.fake.got(4)
    opening.set()
    done = await office.until(batch)
    assert len(await office.lines_of(done.output_file_id)) == 2
    assert office.batches.lane._lock.is_held
    assert not office.batches.lane._lock.is_lost


async def test_a_write_that_is_under_way_while_the_folder_is_removed_is_not_taken_for_kept(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_file = Store.add_file

    def removed_meanwhile(self: Store, *args: Any) -> Any:
        added = add_file(self, *args)
        shutil.rmtree(office.path)
        return added

    monkeypatch.setattr(Store, "add_file", removed_meanwhile)
    answer = await office.site.ask(form(content=b"{}"))
    assert (answer.status, answer.error()["code"]) == (503, "storage_unavailable")


async def test_a_lock_that_is_removed_is_taken_anew(office: Office) -> None:
    """Or another router would take the new one, and both would run the lines."""
    batches = office.batches.lane
    await eventually(lambda: batches._lock.is_held)
    (office.path / "lane.lock").unlink()
    await batches.turn()
    assert batches._lock.is_held
    assert not batches._lock.is_lost


async def test_a_router_that_does_not_run_the_lines_says_so_too_and_then_goes_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "ERROR_PAUSE_S", 0.05)
    first = Office(await start(), tmp_path / "batches")
    await first.open()
    await eventually(lambda: first.batches.lane._lock.is_held)
    second = Office(await start(), tmp_path / "batches")
    await second.open()
    away = first.path.rename(tmp_path / "away")
    for each in (first, second):
        await paused(each)
        await unavailable(each)
    away.rename(first.path)
    for each in (first, second):
        await goes_on(each)
    assert not second.batches.lane._lock.is_held
    await second.close()
    await first.close()

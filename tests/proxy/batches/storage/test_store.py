"""The store of files, batches and results."""

from __future__ import annotations

import itertools
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest

from proxy.batches.maintenance import end_batch
from proxy.batches.storage import database as database_module
from proxy.batches.storage import files as file_store
from proxy.batches.storage import sqlite as sqlite_module
from proxy.batches.storage.database import StoreLimits
from proxy.batches.storage.files import PIECE_BYTES
from proxy.batches.storage.rows import ListPage
from proxy.batches.storage.schema import ROW_BYTES
from proxy.batches.storage.sqlite import SqliteBackend
from proxy.batches.storage.store import Store
from proxy.batches.types import (
    Batch,
    File,
    InputLine,
    InUseError,
    LineResult,
    Status,
    StoreFullError,
    TenantLimitError,
)
from proxy.errors import ProxyError
from tests.present import present
from tests.proxy.batches.conftest import new_database
from tests.proxy.batches.harness import CHAT, KEEP_S, NOW
from tests.proxy.batches.postgres import SQLITE


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str | None:
    """Run tests with both databases, except those of `SQLITE`."""
    return new_database(request)


def purge(store: Store, now: float) -> None:
    while store.purge(now):
        pass


def rows(store: Store) -> dict[str, int]:
    tables = ("files", "batches", "lines", "results")
    count = "SELECT count(*) FROM {}"
    return {name: store.backend.execute(count.format(name)).fetchone()[0] for name in tables}


def batch_of(store: Store, count: int, tenant: str = "t", expires: float = NOW + 60) -> Batch:
    """Add a batch of lines of three bytes, and begin it."""
    content = b"{1}" * count
    file = store.add_file(tenant, "in", "batch", content, NOW)
    batch = Batch(
        f"batch_{file.id}", tenant, CHAT, file.id, "1m", Status.VALIDATING, NOW, expires
    )  # fmt: skip
    store.add_batch(batch)
    lines = [InputLine(n + 1, f"c{n + 1}", "tiny", 3 * n, 3) for n in range(count)]
    store.add_lines(batch, lines)
    assert store.start_batch(batch, count, NOW)
    [active] = [active for active in store.active_batches() if active.id == batch.id]
    return active


def result(batch: Batch, number: int, status: int = 200, body: bytes = b"{}") -> LineResult:
    return LineResult(batch.id, number, f"c{number}", f"q{number}", status, body)


def ended(store: Store, batch: Batch, status: Status = Status.COMPLETED, now: float = NOW) -> Batch:
    list(end_batch(store, batch, status, lambda: now))
    return present(store.batch(batch.tenant, batch.id))


def ended_batch(store: Store, count: int, body: bytes = b"{}", fail_every: int = 0) -> Batch:
    """Return a batch that ended with results, of which some are failures."""
    batch = batch_of(store, count)
    store.save_results(
        [
            result(batch, n, 500 if fail_every and n % fail_every == 0 else 200, body)
            for n in range(1, count + 1)
        ]
    )
    return ended(store, batch)


def left_after_each_purge(store: Store, table: str) -> list[int]:
    """Purge everything; return the rows of a table before, and after each slice."""
    left = [rows(store)[table]]
    while store.purge(NOW + 3 * KEEP_S):
        left.append(rows(store)[table])
    assert rows(store)[table] == 0
    return left


def empty(store: Store, file: File) -> list[int]:
    """Empty a result file; return the numbers of results before, and after each slice."""
    left, last = [rows(store)["results"]], 0
    while (after := store.delete_results_after(file, last)) is not None:
        last = after
        left.append(rows(store)["results"])
    return left


def content(store: Store, file_id: str | None) -> list[dict[str, object]]:
    """Return the lines of a result file."""
    file = store.file("t", file_id or "")
    assert isinstance(file, File)
    text, at = b"", 0
    while len(text) < file.bytes:
        piece, at = store.read_piece(file, at)
        assert piece
        text += piece
    assert len(text) == file.bytes
    return [orjson.loads(line) for line in text.splitlines()]


def test_second_result_of_a_line_is_ignored(store: Store) -> None:
    batch = batch_of(store, 2)
    store.save_results([result(batch, 1), result(batch, 1, 400), result(batch, 2, 400)])
    store.save_results([result(batch, 2)])
    batch = ended(store, batch)
    assert (batch.completed, batch.failed) == (1, 1)
    assert [row["id"] for row in content(store, batch.output)] == ["q1"]
    assert [row["id"] for row in content(store, batch.error)] == ["q2"]


def test_jobs_have_bodies_and_exclude_done_lines(store: Store) -> None:
    batch = batch_of(store, 5)
    store.save_results([result(batch, 2)])
    jobs = store.next_jobs(batch, 0, 3)
    assert [(job.number, job.body) for job in jobs] == [(n, b"{1}") for n in (1, 3, 4)]
    assert [job.number for job in store.next_jobs(batch, 4, 3)] == [5]


@SQLITE
def test_file_is_opened_once_for_many_lines(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening takes a step per page before the position."""
    batch = batch_of(store, 64)
    opened: list[str] = []

    class CountingConnection:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self.execute = connection.execute
            self._connection = connection

        def blobopen(self, *args: Any, **named: Any) -> Any:
            opened.append(args[0])
            return self._connection.blobopen(*args, **named)

    monkeypatch.setattr(store.backend, "connection", CountingConnection(store.backend.connection))
    assert [job.body for job in store.next_jobs(batch, 0, 64)] == [b"{1}"] * 64
    assert opened == ["files"]


def test_lists_are_paged(store: Store) -> None:
    ids = [store.add_file("t", f"{n}", "batch", b"x", NOW).id for n in range(5)]
    # One more than the limit shows that more follow.
    assert [f.name for f in store.files("t", ListPage(2))] == ["4", "3", "2"]
    assert [f.name for f in store.files("t", ListPage(2, ids[3]))] == ["2", "1", "0"]
    assert [f.name for f in store.files("t", ListPage(2, ids[3], oldest_first=True))] == ["4"]
    assert store.files("t", ListPage(2, "file-unknown")) == []
    assert store.files("t", ListPage(2), "batch_output") == []


def test_input_of_an_active_batch_cannot_be_deleted(store: Store) -> None:
    batch = batch_of(store, 1)
    with pytest.raises(InUseError):
        store.delete_file("t", batch.input)
    ended(store, batch, Status.CANCELLED)
    assert store.delete_file("t", batch.input)


def test_cancel_changes_only_active_batches(store: Store) -> None:
    batch = batch_of(store, 1)
    cancelled = present(store.cancel_batch("t", batch.id, NOW))
    assert cancelled.status is Status.CANCELLING
    assert not store.start_batch(batch, 1, NOW)  # a validation that ends later has no effect
    ended(store, batch, Status.CANCELLED)
    again = present(store.cancel_batch("t", batch.id, NOW + 1))
    assert (again.status, again.at["cancelled"]) == (Status.CANCELLED, NOW)


@SQLITE
def test_full_disk_rolls_back(store: Store) -> None:
    batch = batch_of(store, 2)
    (pages,) = store.backend.execute("PRAGMA page_count").fetchone()
    store.backend.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFullError, match=r"router\.batches\.path"):
        store.add_file("t", "big", "batch", b"x" * 1_000_000, NOW)
    with pytest.raises(StoreFullError):
        store.save_results([result(batch, 1), result(batch, 2, body=orjson.dumps("x" * 1_000_000))])
    assert [batch.completed for batch in store.active_batches()] == [0]
    assert len(store.next_jobs(batch, 0, 9)) == 2
    store.backend.execute("PRAGMA max_page_count = 1000000")
    store.save_results([result(batch, 1)])
    assert [batch.completed for batch in store.active_batches()] == [1]


def test_large_results_are_read_in_pieces(store: Store) -> None:
    batch = ended_batch(store, 4, body=orjson.dumps("x" * (PIECE_BYTES * 2 // 3)))
    assert [row["id"] for row in content(store, batch.output)] == ["q1", "q2", "q3", "q4"]


def test_response_body_is_kept_on_one_line(store: Store) -> None:
    batch = batch_of(store, 2)
    store.save_results(
        [result(batch, 1, body=b'{\r\n "a": 1.10,\n "b": 0.700000000000000000001}\n')]
    )
    store.save_results([result(batch, 2, body=b"no\njson \xff")])
    row = store.backend.execute("SELECT content FROM results WHERE number = 1").fetchone()
    assert b'"body":{ "a": 1.10, "b": 0.700000000000000000001}' in row[0]
    row = store.backend.execute("SELECT content FROM results WHERE number = 2").fetchone()
    assert orjson.loads(row[0])["response"]["body"] == "no\njson \ufffd"


def test_ended_batches_are_purged_after_keep_s(store: Store) -> None:
    expired, running = batch_of(store, 1), batch_of(store, 1, expires=NOW + 2 * KEEP_S)
    store.save_results([result(expired, 1)])
    ended(store, expired, now=NOW + 50)
    purge(store, NOW + KEEP_S)
    assert store.batch("t", expired.id) is not None
    purge(store, NOW + KEEP_S + 61)
    assert store.batch("t", expired.id) is None
    assert store.file("t", expired.input) is None
    assert store.file("t", running.input) is not None  # input of an active batch
    assert rows(store) == {"files": 1, "batches": 1, "lines": 1, "results": 0}
    assert [batch.id for batch in store.active_batches()] == [running.id]


def test_file_is_purged_after_its_own_time(store: Store) -> None:
    file = store.add_file("t", "in", "batch", b"x", NOW, KEEP_S / 2)
    purge(store, NOW + KEEP_S / 2)
    assert store.file("t", file.id) is not None
    purge(store, NOW + KEEP_S / 2 + 1)
    assert store.file("t", file.id) is None


def test_purge_works_in_slices(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "MAX_RESULTS", 10)
    for size in (25, 10):
        ended_batch(store, size)
    # Files one by one are in between.
    assert [n for n, _ in itertools.groupby(left_after_each_purge(store, "results"))] == [
        35, 25, 15, 10, 0,
    ]  # fmt: skip
    assert rows(store) == {"files": 0, "batches": 0, "lines": 0, "results": 0}


@pytest.mark.parametrize("limit", ["MAX_FILES", "LARGE_BYTES"])
def test_files_are_purged_one_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A large file takes the disk about a second."""
    if limit == "MAX_FILES":
        monkeypatch.setattr(file_store, "MAX_FILES", 1)
    else:
        monkeypatch.setattr(database_module, "LARGE_BYTES", 100)
    for size in (10, 10, 90, 500, 10):
        store.add_file("t", "in", "batch", b"x" * size, NOW)
    expected = [5, 4, 3, 2, 1, 0] if limit == "MAX_FILES" else [5, 3, 2, 1, 0]
    assert left_after_each_purge(store, "files")[: len(expected)] == expected


@SQLITE
def test_free_pages_are_returned_to_the_disk_in_slices(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def size() -> int:
        store.backend.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return (tmp_path / "batches.sqlite").stat().st_size

    monkeypatch.setattr(sqlite_module, "MAX_PAGES", 100)
    before = size()
    file = store.add_file("t", "in", "batch", b"x" * (1 << 20), NOW)
    full = size()
    assert store.delete_file("t", file.id)
    sizes = [full]
    while store.purge(NOW):
        sizes.append(size())
    assert max(a - b for a, b in itertools.pairwise(sizes)) <= 101 * 4096
    assert size() <= before + 2 * 4096
    assert full >= before + (1 << 20)


def test_result_file_is_emptied_in_slices(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "MAX_RESULTS", 10)
    batch = ended_batch(store, 40, fail_every=4)
    file = present(store.file("t", batch.output or ""))
    assert empty(store, file) == [40, 30, 20, 10]
    assert store.delete_file("t", file.id)
    assert len(content(store, batch.error)) == 10
    own = present(store.file("t", batch.input))
    assert store.delete_results_after(own, 0) is None


def test_deleted_result_file_leaves_no_results(store: Store) -> None:
    batch = ended_batch(store, 4, fail_every=4)
    assert not store.delete_file("another", batch.output or "")
    assert store.delete_file("t", batch.output or "")
    assert rows(store)["results"] == len(content(store, batch.error)) == 1


def test_large_results_are_deleted_one_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "LARGE_BYTES", 1000)
    for _ in range(2):
        batch = ended_batch(store, 4, body=b'"%b"' % (b"x" * 800))
    file = present(store.file("t", batch.output or ""))
    assert empty(store, file) == [8, 7, 6, 5]
    assert store.delete_file("t", file.id)
    assert left_after_each_purge(store, "results")[:5] == [4, 3, 2, 1, 0]


def test_unusable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ProxyError, match=r"router\.batches\.path: .*name a writable folder"):
        Store(SqliteBackend(tmp_path / "file"), KEEP_S)
    store = Store(SqliteBackend(tmp_path), KEEP_S)
    store.backend.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(ProxyError, match="schema 99"):
        Store(SqliteBackend(tmp_path), KEEP_S)


@SQLITE
def test_stored_files_are_private(store: Store, tmp_path: Path) -> None:
    batch_of(store, 1)
    files = [path for path in tmp_path.iterdir() if path.name.startswith("batches")]
    assert len(files) == 3  # the database, its log and its index
    assert {path.stat().st_mode & 0o077 for path in files} == {0}
    Store(SqliteBackend(tmp_path / "new" / "folder"), KEEP_S).close()
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o077 == 0


def test_line_numbers_and_custom_ids_are_unique(store: Store) -> None:
    batch = batch_of(store, 1)
    for line in (InputLine(1, "other", "", 0, 1), InputLine(2, "c1", "", 0, 1)):
        with pytest.raises((sqlite3.IntegrityError, psycopg.IntegrityError)):
            store.add_lines(batch, [line])
    store.add_lines(replace(batch, id="another"), [InputLine(1, "c1", "", 0, 1)])


def test_used_bytes_of_a_tenant_follow_its_rows(store: Store) -> None:
    batch, body = batch_of(store, 3), orjson.dumps("x" * 5000)
    begun = store._used_bytes()["t"]
    assert begun == 5 * ROW_BYTES + len("in") + 9 + len("[]") + 3 * (2 * len("c1") + len("tiny"))
    store.save_results([result(batch, 1, body=body), result(batch, 2, 500, body)])
    saved = store._used_bytes()["t"]
    assert 0 < saved - begun - 2 * (ROW_BYTES + len(body)) < 500
    store.save_results([result(batch, 1, body=body)])  # ignored, as a second result
    assert store._used_bytes()["t"] == saved
    batch_of(store, 1, "other")
    batch = ended(store, batch, Status.CANCELLED)
    assert saved < store._used_bytes()["t"] < saved + 1500
    assert store.delete_file("t", batch.output or "")
    assert store._used_bytes()["t"] < saved - len(body)
    assert store._used_bytes()["other"] == 3 * ROW_BYTES + 3 + len("in[]") + 2 * len("c1") + len(
        "tiny"
    )
    purge(store, NOW + 3 * KEEP_S)
    assert store._used_bytes()["t"] == 0
    assert [batch.tenant for batch in store.active_batches()] == ["other"]


def test_results_count_towards_the_tenants_limit(store: Store) -> None:
    store.limits = StoreLimits(bytes=60_000, bytes_per_tenant=20_000)
    batch, other = batch_of(store, 9), batch_of(store, 1, "other")
    assert store.full_tenants() == set()
    body = orjson.dumps("x" * 10_000)
    store.save_results([result(batch, 1, body=body), result(batch, 2, body=body)])
    assert store.full_tenants() == {"t"}
    with pytest.raises(TenantLimitError, match="limit is 20000"):
        store.add_file("t", "in", "batch", b"x", NOW)
    store.add_file("other", "in", "batch", b"x", NOW)
    store.save_results([result(batch, number, body=body) for number in range(3, 7)])
    assert store.full_tenants() == {"t", "other"}, "the total limit is exceeded"
    with pytest.raises(StoreFullError, match=r"router\.batches\.max_bytes"):
        store.add_file("other", "in", "batch", b"x", NOW)
    assert len(store.next_jobs(other, 0, 9)) == 1


def test_text_with_nul_counts_all_bytes(store: Store, database: str | None) -> None:
    batch = batch_of(store, 1)
    before = store._used_bytes()["t"]
    store.add_lines(batch, [InputLine(9, "\0" + "x" * 99, "\0" + "ä" * 1000, 0, 1)])
    escapes = 3 if database else 0  # PostgreSQL's text cannot have NUL
    assert store._used_bytes()["t"] - before == ROW_BYTES + 2 * 100 + 2001 + escapes
    assert [job.custom_id for job in store.next_jobs(batch, 1, 9)][-1] == "\0" + "x" * 99
    store.add_file("u", "\0ä", "batch", b"x", NOW)
    assert store._used_bytes()["u"] == ROW_BYTES + 3 + 1 + escapes // 3


@SQLITE
def test_used_bytes_are_added_to_an_old_folder(store: Store, tmp_path: Path) -> None:
    batch = batch_of(store, 3)
    store.save_results([result(batch, 1, body=orjson.dumps("x" * 5000))])
    store.add_file("other", "in", "batch", b"x", NOW)
    used, run = store._used_bytes(), store.backend.execute
    schema = run(
        "SELECT type, name FROM sqlite_master WHERE type = 'trigger' OR name LIKE '%tenant'"
    )
    for kind, name in schema.fetchall():
        run(f"DROP {kind} {name}")
    run("DROP TABLE used")
    store.close()
    again = Store(SqliteBackend(tmp_path), KEEP_S)
    assert again._used_bytes() == used
    again.add_file("other", "in", "batch", b"x", NOW)
    assert again._used_bytes()["other"] == 2 * used["other"]
    again.close()


@SQLITE
def test_queries_by_tenant_use_an_index(store: Store) -> None:
    for table in ("files", "batches"):
        query = f"EXPLAIN QUERY PLAN SELECT * FROM {table} WHERE tenant = 't' ORDER BY rowid"  # noqa: S608
        [step] = store.backend.execute(query).fetchall()
        assert f"{table}_by_tenant" in step[-1]

"""What is kept, and what is so whatever happens in between."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.batches.storage import database
from proxy.batches.storage import files as file_store
from proxy.batches.storage.database import StoreLimits
from proxy.batches.storage.files import PIECE_BYTES
from proxy.batches.storage.rows import ListPage
from proxy.batches.storage.schema import ROW_BYTES
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
from tests.proxy.batches.office import CHAT

NOW = 1_000_000.0
KEEP_S = 1000.0


def test_a_file_of_results_that_is_deleted_leaves_nothing(store: Store) -> None:
    batch = batch_of(store, 2)
    store.save([result(batch, 1), result(batch, 2, status=500)])
    store.end(batch.id, Status.COMPLETED, NOW)
    over = present(store.batch("t", batch.id))
    assert not store.delete_file("another", over.output or "")
    assert store.delete_file("t", over.output or "")
    (left,) = store.connection.execute("SELECT count(*) FROM results WHERE ok").fetchone()
    assert left == 0
    assert len(content(store, over.error)) == 1


def test_a_full_disk_is_told_wherever_something_is_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = store.add_file("t", "in", "batch", b"{}", NOW)

    def full(_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(database, "transaction", contextmanager(full))
    with pytest.raises(StoreFullError):
        store.delete_file("t", file.id)
    with pytest.raises(StoreFullError):
        store.purge(NOW)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Open one."""
    store = Store(tmp_path, KEEP_S)
    yield store
    store.close()


def purge(store: Store, now: float) -> None:
    """Forget all that there is to forget."""
    while store.purge(now):
        pass


def rows(store: Store) -> dict[str, int]:
    """Count what is kept."""
    tables = ("files", "batches", "lines", "results")
    count = "SELECT count(*) FROM {}"
    return {each: store.connection.execute(count.format(each)).fetchone()[0] for each in tables}


def batch_of(store: Store, count: int, tenant: str = "t", expires: float = NOW + 60) -> Batch:
    """Keep a batch of so many lines of three bytes, and begin it."""
    content = b"{1}" * count
    file = store.add_file(tenant, "in", "batch", content, NOW)
    batch = Batch(
        f"batch_{file.id}", tenant, CHAT, file.id, "1m", Status.VALIDATING, NOW, expires
    )  # fmt: skip
    store.add_batch(batch)
    lines = [InputLine(n + 1, f"c{n + 1}", "tiny", 3 * n, 3) for n in range(count)]
    store.add_lines(batch, lines)
    assert store.begin(batch, count, NOW)
    [kept] = [each for each in store.active() if each.id == batch.id]
    return kept


def result(batch: Batch, number: int, status: int = 200, body: bytes = b"{}") -> LineResult:
    """Make a line's result."""
    return LineResult(batch.id, number, f"c{number}", f"q{number}", status, body)


def content(store: Store, file_id: str | None) -> list[dict[str, object]]:
    """Read a file of results."""
    file = store.file("t", file_id or "")
    assert isinstance(file, File)
    text, at = b"", 0
    while len(text) < file.bytes:
        piece, at = store.piece(file, at)
        assert piece
        text += piece
    assert len(text) == file.bytes
    return [orjson.loads(line) for line in text.splitlines()]


def test_of_two_results_of_a_line_the_first_stays(store: Store) -> None:
    batch = batch_of(store, 2)
    store.save([result(batch, 1), result(batch, 1, 400), result(batch, 2, 400)])
    store.save([result(batch, 2)])
    store.end(batch.id, Status.COMPLETED, NOW)
    ended = present(store.batch("t", batch.id))
    assert (ended.completed, ended.failed) == (1, 1)
    assert [each["id"] for each in content(store, ended.output)] == ["q1"]
    assert [each["id"] for each in content(store, ended.error)] == ["q2"]


def test_lines_are_read_with_their_bodies_and_without_those_that_are_done(store: Store) -> None:
    batch = batch_of(store, 5)
    store.save([result(batch, 2)])
    jobs = store.jobs(batch, 0, 3)
    assert [(job.number, job.body) for job in jobs] == [(n, b"{1}") for n in (1, 3, 4)]
    assert [job.number for job in store.jobs(batch, 4, 3)] == [5]


def test_a_place_far_into_a_file_is_looked_for_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a step for each page before it: for each line that would be minutes in all."""
    batch = batch_of(store, 64)
    opened: list[str] = []

    class Counting:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self.execute = connection.execute
            self._connection = connection

        def blobopen(self, *args: Any, **named: Any) -> Any:
            opened.append(args[0])
            return self._connection.blobopen(*args, **named)

    monkeypatch.setattr(store, "connection", Counting(store.connection))
    assert [job.body for job in store.jobs(batch, 0, 64)] == [b"{1}"] * 64
    assert opened == ["files"]


def test_large_files_are_forgotten_one_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes the disk a second, and whoever else wants it waits."""
    monkeypatch.setattr(database, "LARGE_BYTES", 100)
    for size in (10, 10, 90, 500, 10):
        store.add_file("t", "in", "batch", b"x" * size, NOW)
    left: list[int] = []
    while store.purge(NOW + 2 * KEEP_S):
        left.append(rows(store)["files"])
    assert left[:4] == [3, 2, 1, 0]


def test_what_was_kept_is_there_after_a_kill(store: Store, tmp_path: Path) -> None:
    batch = batch_of(store, 3)
    store.save([result(batch, 1)])
    another = Store(tmp_path, KEEP_S)  # the first is still open: nobody closed it
    assert [job.number for job in another.jobs(batch, 0, 9)] == [2, 3]
    assert [each.completed for each in another.active()] == [1]
    another.close()


def test_a_tenant_sees_its_own(store: Store) -> None:
    batch, file = batch_of(store, 1), store.add_file("other", "x", "batch", b"x", NOW)
    assert store.batch("other", batch.id) is None
    assert store.cancel("other", batch.id, NOW) is None
    assert store.file("t", file.id) is None
    assert not store.delete_file("t", file.id)
    assert [each.id for each in store.files("other", ListPage())] == [file.id]
    assert store.batches("other", ListPage()) == []


def test_pages(store: Store) -> None:
    ids = [store.add_file("t", f"{n}", "batch", b"x", NOW).id for n in range(5)]
    assert [f.name for f in store.files("t", ListPage(2))] == [
        "4",
        "3",
        "2",
    ]  # one more: there is more
    assert [f.name for f in store.files("t", ListPage(2, ids[3]))] == ["2", "1", "0"]
    assert [f.name for f in store.files("t", ListPage(2, ids[3], oldest_first=True))] == ["4"]
    assert store.files("t", ListPage(2, "file-nobody")) == []
    assert store.files("t", ListPage(2), "batch_output") == []


def test_a_file_that_is_read_from_stays(store: Store) -> None:
    batch = batch_of(store, 1)
    with pytest.raises(InUseError):
        store.delete_file("t", batch.input)
    store.end(batch.id, Status.CANCELLED, NOW)
    assert store.delete_file("t", batch.input)


def test_cancelling_is_for_what_runs(store: Store) -> None:
    batch = batch_of(store, 1)
    asked = present(store.cancel("t", batch.id, NOW))
    assert asked.status is Status.CANCELLING
    assert not store.begin(batch, 1, NOW)  # a check that ends later changes nothing
    store.end(batch.id, Status.CANCELLED, NOW)
    again = present(store.cancel("t", batch.id, NOW + 1))
    assert (again.status, again.at["cancelled"]) == (Status.CANCELLED, NOW)


def test_a_full_disk_changes_nothing(store: Store) -> None:
    batch = batch_of(store, 2)
    (pages,) = store.connection.execute("PRAGMA page_count").fetchone()
    store.connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFullError, match=r"router\.batches\.path"):
        store.add_file("t", "big", "batch", b"x" * 1_000_000, NOW)
    with pytest.raises(StoreFullError):
        store.save([result(batch, 1), result(batch, 2, body=orjson.dumps("x" * 1_000_000))])
    assert [each.completed for each in store.active()] == [0]
    assert len(store.jobs(batch, 0, 9)) == 2
    store.connection.execute("PRAGMA max_page_count = 1000000")
    store.save([result(batch, 1)])
    assert [each.completed for each in store.active()] == [1]


def test_large_results_are_read_in_pieces(store: Store) -> None:
    batch = batch_of(store, 4)
    body = orjson.dumps("x" * (PIECE_BYTES * 2 // 3))
    store.save([result(batch, n, body=body) for n in range(1, 5)])
    store.end(batch.id, Status.COMPLETED, NOW)
    ended = present(store.batch("t", batch.id))
    assert [each["id"] for each in content(store, ended.output)] == ["q1", "q2", "q3", "q4"]


def test_an_answer_stays_as_it_was_but_on_one_line(store: Store) -> None:
    batch = batch_of(store, 2)
    store.save([result(batch, 1, body=b'{\r\n "a": 1.10,\n "b": 0.700000000000000000001}\n')])
    store.save([result(batch, 2, body=b"no\njson \xff")])
    row = store.connection.execute("SELECT content FROM results WHERE number = 1").fetchone()
    assert b'"body":{ "a": 1.10, "b": 0.700000000000000000001}' in row[0]
    row = store.connection.execute("SELECT content FROM results WHERE number = 2").fetchone()
    assert orjson.loads(row[0])["response"]["body"] == "no\njson \ufffd"


def test_what_is_over_is_forgotten_in_time(store: Store) -> None:
    old, running = batch_of(store, 1), batch_of(store, 1, expires=NOW + 2 * KEEP_S)
    store.save([result(old, 1)])
    store.end(old.id, Status.COMPLETED, NOW + 50)
    purge(store, NOW + KEEP_S)
    assert store.batch("t", old.id) is not None
    purge(store, NOW + KEEP_S + 61)
    assert store.batch("t", old.id) is None
    assert store.file("t", old.input) is None
    assert store.file("t", running.input) is not None  # it is still read
    assert rows(store) == {"files": 1, "batches": 1, "lines": 1, "results": 0}
    assert [each.id for each in store.active()] == [running.id]


def test_it_is_forgotten_a_slice_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MAX_RESULTS", 10)
    monkeypatch.setattr(file_store, "MAX_FILES", 1)
    for size in (25, 10):
        batch = batch_of(store, size)
        store.save([result(batch, number) for number in range(1, size + 1)])
        store.end(batch.id, Status.COMPLETED, NOW)
    left = [rows(store)["results"]]
    files = [rows(store)["files"]]
    while store.purge(NOW + 3 * KEEP_S):
        left.append(rows(store)["results"])
        files.append(rows(store)["files"])
    # An eleventh would be in the next, which is asked in vain.
    assert left[:6] == [35, 25, 15, 10, 0, 0]
    assert rows(store) == {"files": 0, "batches": 0, "lines": 0, "results": 0}
    assert max(a - b for a, b in itertools.pairwise(files)) == 1


def test_room_is_given_back_to_the_disk_a_slice_at_a_time(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def size() -> int:
        store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return (tmp_path / "batches.sqlite").stat().st_size

    monkeypatch.setattr(database, "MAX_PAGES", 100)
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


def test_a_file_of_many_results_is_emptied_a_slice_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "MAX_RESULTS", 10)
    batch = batch_of(store, 40)
    store.save([result(batch, n, status=500 if n % 4 == 0 else 200) for n in range(1, 41)])
    store.end(batch.id, Status.COMPLETED, NOW)
    over = present(store.batch("t", batch.id))
    file = present(store.file("t", over.output or ""))
    left, last = [rows(store)["results"]], 0
    while (after := store.empty_file(file, last)) is not None:
        last = after
        left.append(rows(store)["results"])
    assert left == [40, 30, 20, 10]
    assert store.delete_file("t", file.id)
    assert len(content(store, over.error)) == 10
    own = present(store.file("t", batch.input))
    assert store.empty_file(own, 0) is None


def test_large_results_are_forgotten_one_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LARGE_BYTES", 1000)
    for _ in range(2):
        batch = batch_of(store, 4)
        body = b'"%b"' % (b"x" * 800)
        store.save([result(batch, n, body=body) for n in range(1, 5)])
        store.end(batch.id, Status.COMPLETED, NOW)
    over = present(store.batch("t", batch.id))
    file = present(store.file("t", over.output or ""))
    left, last = [8], 0
    while (after := store.empty_file(file, last)) is not None:
        last = after
        left.append(rows(store)["results"])
    assert store.delete_file("t", file.id)
    left.append(rows(store)["results"])
    assert left == [8, 7, 6, 5, 4]
    while store.purge(NOW + 3 * KEEP_S):
        left.append(rows(store)["results"])
    assert left[4:9] == [4, 3, 2, 1, 0]


def test_another_releases_folder_is_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path, KEEP_S)
    store.connection.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(ProxyError, match="schema 99"):
        Store(tmp_path, KEEP_S)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ProxyError, match=r"router\.batches\.path: .*name a writable folder"):
        Store(tmp_path / "file", KEEP_S)


def test_what_is_kept_is_nobody_elses_to_read(store: Store, tmp_path: Path) -> None:
    batch_of(store, 1)
    files = [each for each in tmp_path.iterdir() if each.name.startswith("batches")]
    assert len(files) == 3  # with its log, and that one's index
    assert {each.stat().st_mode & 0o077 for each in files} == {0}
    Store(tmp_path / "new" / "folder", KEEP_S).close()
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o077 == 0


def test_its_tables_keep_lines_apart(store: Store) -> None:
    batch = batch_of(store, 1)
    for line in (InputLine(1, "other", "", 0, 1), InputLine(2, "c1", "", 0, 1)):
        with pytest.raises(sqlite3.IntegrityError):
            store.add_lines(batch, [line])
    store.add_lines(replace(batch, id="another"), [InputLine(1, "c1", "", 0, 1)])


def test_what_a_tenant_has_is_counted_as_it_comes_and_goes(store: Store) -> None:
    batch, body = batch_of(store, 3), orjson.dumps("x" * 5000)
    begun = store._used()["t"]
    assert begun == 5 * ROW_BYTES + len("in") + 9 + len("[]") + 3 * (2 * len("c1") + len("tiny"))
    store.save([result(batch, 1, body=body), result(batch, 2, 500, body)])
    saved = store._used()["t"]
    assert 0 < saved - begun - 2 * (ROW_BYTES + len(body)) < 500
    store.save([result(batch, 1, body=body)])  # once more: the first stays
    assert store._used()["t"] == saved
    batch_of(store, 1, "other")
    store.end(batch.id, Status.CANCELLED, NOW)
    over = present(store.batch("t", batch.id))
    assert saved < store._used()["t"] < saved + 1500
    assert store.delete_file("t", over.output or "")
    assert store._used()["t"] < saved - len(body)
    assert store._used()["other"] == 3 * ROW_BYTES + 3 + len("in[]") + 2 * len("c1") + len("tiny")
    purge(store, NOW + 3 * KEEP_S)
    assert store._used()["t"] == 0
    assert [each.tenant for each in store.active()] == ["other"]


def test_results_of_what_runs_are_of_its_tenants_room(store: Store) -> None:
    store.bounds = StoreLimits(bytes=60_000, bytes_each=20_000)
    batch, other = batch_of(store, 9), batch_of(store, 1, "other")
    assert store.full() == set()
    body = orjson.dumps("x" * 10_000)
    store.save([result(batch, 1, body=body), result(batch, 2, body=body)])
    assert store.full() == {"t"}
    with pytest.raises(TenantLimitError, match="limit is 20000"):
        store.add_file("t", "in", "batch", b"x", NOW)
    store.add_file("other", "in", "batch", b"x", NOW)
    store.save([result(batch, number, body=body) for number in range(3, 7)])
    assert store.full() == {"t", "other"}, "all together have too much"
    with pytest.raises(StoreFullError, match=r"router\.batches\.max_bytes"):
        store.add_file("other", "in", "batch", b"x", NOW)
    assert len(store.jobs(other, 0, 9)) == 1


def test_a_row_takes_room_however_little_is_in_it(store: Store) -> None:
    store.bounds = StoreLimits(bytes_each=10 * (ROW_BYTES + 2))
    for _ in range(10):
        store.add_file("t", "a", "batch", b"x", NOW)
    assert store._used()["t"] == store.bounds.bytes_each
    with pytest.raises(TenantLimitError):
        store.add_file("t", "a", "batch", b"x", NOW)


def test_no_text_is_taken_for_shorter_than_it_is(store: Store) -> None:
    batch = batch_of(store, 1)
    before = store._used()["t"]
    store.add_lines(batch, [InputLine(9, "\0" + "x" * 99, "\0" + "ä" * 1000, 0, 1)])
    assert store._used()["t"] - before == ROW_BYTES + 2 * 100 + 2001
    store.add_file("u", "\0ä", "batch", b"x", NOW)
    assert store._used()["u"] == ROW_BYTES + 3 + 1


def test_a_folder_that_was_written_without_a_count_gets_one(store: Store, tmp_path: Path) -> None:
    batch = batch_of(store, 3)
    store.save([result(batch, 1, body=orjson.dumps("x" * 5000))])
    store.add_file("other", "in", "batch", b"x", NOW)
    counted, run = store._used(), store.connection.execute
    ours = run("SELECT type, name FROM sqlite_master WHERE type = 'trigger' OR name LIKE '%tenant'")
    for kind, name in ours.fetchall():
        run(f"DROP {kind} {name}")
    run("DROP TABLE used")
    store.close()
    again = Store(tmp_path, KEEP_S)
    assert again._used() == counted
    again.add_file("other", "in", "batch", b"x", NOW)
    assert again._used()["other"] == 2 * counted["other"]
    again.close()


def test_what_is_a_tenants_is_found_by_its_name(store: Store) -> None:
    for table in ("files", "batches"):
        asked = f"EXPLAIN QUERY PLAN SELECT * FROM {table} WHERE tenant = 't' ORDER BY rowid"  # noqa: S608
        [step] = store.connection.execute(asked).fetchall()
        assert f"{table}_by_tenant" in step["detail"]

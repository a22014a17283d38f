"""What outlives a restart: files, batches, and one result for each line.

SQLite, for one thread at a time. A line without a result is to be run; a restart in between runs it
again, and of two results the first stays.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from proxy.batches.storage.disk import DiskRoom, disk_errors, place_of
from proxy.batches.storage.rows import (
    ListPage,
    batch_of,
    file_of,
    marks,
    new_id,
    replaced,
    row_of,
    written,
)
from proxy.batches.storage.schema import ROW_BYTES, connect, transaction
from proxy.batches.types import (
    ACTIVE,
    OUTPUT,
    Batch,
    File,
    InputLine,
    InputProblem,
    InUseError,
    LineJob,
    LineResult,
    Status,
    StoreFullError,
    TenantLimitError,
)

PIECE_BYTES = 1 << 20  # of a file, read at a time
FETCH_BYTES = 1 << 20  # of lines to run
# That are forgotten, or given up, in one go, so that nobody waits long for the disk. Of results and
# files there are fewer if they are large; pages are given back to the disk.
MOST_LINES, MOST_RESULTS, MOST_FILES, MOST_PAGES = 1000, 200, 10, 1000
LARGE = 4 << 20  # bytes
FILE_COLUMNS = "id, tenant, name, purpose, created, expires, bytes, batch, ok"
# How a batch ends, and what is said of its lines that were not run.
ENDS = {
    Status.COMPLETED: ("", ""),
    Status.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    Status.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was run."),
}


class StoreLimits(NamedTuple):
    """How much is kept at most."""

    bytes: int = sys.maxsize
    bytes_each: int = sys.maxsize  # of one tenant
    active_each: int = sys.maxsize


Given = ParamSpec("Given")
Got = TypeVar("Got")


def frees_room(
    method: Callable[Concatenate[Store, Given], Got],
) -> Callable[Concatenate[Store, Given], Got]:
    """Have a method succeed on a full disk, and give the room that it frees to the disk."""

    @wraps(method)
    def run(store: Store, /, *args: Given.args, **named: Given.kwargs) -> Got:
        def do() -> Got:
            return method(store, *args, **named)

        if not store.room.is_short:
            with suppress(StoreFullError):
                return do()
        with store.room.spared(store.give_back):
            return store.room.insist(do)

    return run


class Store:
    """One folder's files and batches."""

    def __init__(self, path: Path, keep_s: float, bounds: StoreLimits = StoreLimits()) -> None:  # noqa: B008
        self.keep_s = keep_s
        self.bounds = bounds
        self.connection = connect(path)
        self._path = path
        self._place = place_of(path)
        self.room = DiskRoom(path, self.connection)

    @property
    def is_in_place(self) -> bool:
        """Whether the database that is open is still the one that the folder has."""
        return self._place is not None and place_of(self._path) == self._place

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Do all that is inside, or nothing of it; raises `DiskError`."""
        with disk_errors(self._path), transaction(self.connection):
            yield

    def close(self) -> None:
        """Close it."""
        self.connection.close()

    # Files

    def add_file(self, tenant: str, name: str, purpose: str, content: bytes, now: float) -> File:
        """Keep an upload."""
        size = len(content)
        file = File(new_id("file-"), tenant, name, purpose, now, now + self.keep_s, size)
        with self._writing():
            self.room.check(size)
            self._check_bytes(tenant, ROW_BYTES + len(name.encode()) + size)
            self._insert_file(file, content)
        return file

    def _check_bytes(self, tenant: str, more: int) -> None:
        """Refuse what is too much, for a tenant or for all."""
        most_all, most, _ = self.bounds
        used = self._used()
        if (own := used.get(tenant, 0)) + more > most:
            raise TenantLimitError(
                f"Your files and results have {own} bytes, and may have {most}. "
                "Delete some that you don't need any more.",
                later=False,
            )
        if (every := sum(used.values())) + more > most_all:
            raise StoreFullError(
                f"files and results have {every} bytes, and router.batches.max_bytes is "
                f"{most_all}; raise it, or set keep_days lower"
            )

    def _used(self) -> dict[str, int]:
        """Say how much each tenant has: files, results, lines, and what a row of each takes."""
        return dict(self.connection.execute("SELECT tenant, bytes FROM used").fetchall())

    def full(self) -> set[str]:
        """Name the tenants that have as much as they may: of all, where all together have."""
        most_all, most, _ = self.bounds
        used = self._used()
        over = sum(used.values()) >= most_all
        return {tenant for tenant, size in used.items() if over or size >= most}

    def _insert_file(self, file: File, content: bytes | None) -> None:
        row = (*asdict(file).values(), content)
        self.connection.execute(
            f"INSERT INTO files ({FILE_COLUMNS}, content) VALUES ({marks(row)})",  # noqa: S608
            row,
        )

    def file(self, tenant: str, file_id: str) -> File | None:
        """Find one of a tenant's files."""
        row = self.connection.execute(
            f"SELECT {FILE_COLUMNS} FROM files WHERE id = ? AND tenant = ?",  # noqa: S608
            (file_id, tenant),
        ).fetchone()
        return file_of(row) if row else None

    def files(self, tenant: str, page: ListPage, purpose: str | None = None) -> list[File]:
        """List a tenant's files: one more than asked for, if there are more."""
        where, values = "tenant = ?", [tenant]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        rows = self._page("files", FILE_COLUMNS, where, values, page)
        return [file_of(row) for row in rows]

    def _page(
        self, table: str, columns: str, where: str, values: list[str], page: ListPage
    ) -> list[sqlite3.Row]:
        if page.after:
            sign = ">" if page.oldest_first else "<"
            where += f" AND rowid {sign} (SELECT rowid FROM {table} WHERE id = ?)"  # noqa: S608
            values = [*values, page.after]
        order = "ASC" if page.oldest_first else "DESC"
        return self.connection.execute(
            f"SELECT {columns} FROM {table} WHERE {where} ORDER BY rowid {order} LIMIT ?",  # noqa: S608
            (*values, page.limit + 1),
        ).fetchall()

    @frees_room
    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Forget a file; False if there is none of that id."""
        with self._writing():
            if self._reads(file_id):
                raise InUseError(f"A batch still reads {file_id}; cancel that first.")
            file = self.file(tenant, file_id)
            if file is None:
                return False
            self.connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
            if file.batch is not None:  # what it showed lies there
                self.connection.execute(
                    "DELETE FROM results WHERE batch = ? AND ok = ?", (file.batch, file.ok)
                )
        return True

    @frees_room
    def empty_file(self, file: File, after: int) -> int | None:
        """Forget some of the results that a file shows, those behind the line of that number.

        Returns the number of the last; None where few are left, which go with the file.
        """
        if file.batch is None:
            return None
        with self._writing():
            where, values = "batch = ? AND ok = ? AND number > ?", (file.batch, file.ok, after)
            some, more = self._few_results(where, values)
            if not more:
                return None
            self.connection.execute(
                f"DELETE FROM results WHERE {where} AND number <= ?",  # noqa: S608
                (*values, some[-1]),
            )
        return some[-1]

    def _few_results(self, where: str, values: Sequence[Any]) -> tuple[list[int], bool]:
        """Name the lines of the first of these, and say whether there are more."""
        rows = self.connection.execute(
            "SELECT number, length(content) FROM results "  # noqa: S608
            f"WHERE {where} ORDER BY number LIMIT ?",
            (*values, MOST_RESULTS),
        ).fetchall()
        some: list[int] = few(rows)
        return some, len(some) == MOST_RESULTS or len(some) < len(rows)

    def _reads(self, file_id: str) -> bool:
        found = self.connection.execute(
            f"SELECT 1 FROM batches WHERE input = ? AND status IN ({marks(ACTIVE)})",  # noqa: S608
            (file_id, *ACTIVE),
        )
        return found.fetchone() is not None

    def piece(self, file: File, at: int) -> tuple[bytes, int]:
        """Read on in a file; returns what comes at a place and the place after it."""
        if file.batch is None:
            content = self._content(file.id, at, min(PIECE_BYTES, file.bytes - at))
            return content, at + len(content)
        pieces: list[bytes] = []
        size = 0
        for number, content in self.connection.execute(
            "SELECT number, content FROM results WHERE batch = ? AND ok = ? AND number > ? "
            "ORDER BY number",
            (file.batch, file.ok, at),
        ):
            pieces += (content, b"\n")
            size += len(content)
            at = number
            if size >= PIECE_BYTES:
                break
        return b"".join(pieces), at

    def _content(self, file_id: str, start: int, size: int) -> bytes:
        return self._contents(file_id, [(start, size)])[0]

    def _contents(self, file_id: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read some of a file at several places, from which on and how much; nothing of none.

        To find the first takes the longer the further in it is, and the others next to nothing.
        """
        row = self.connection.execute("SELECT rowid FROM files WHERE id = ?", (file_id,)).fetchone()
        if row is None:
            return [b""] * len(places)
        found: list[bytes] = []
        with self.connection.blobopen("files", "content", row[0], readonly=True) as blob:
            for start, size in places:
                blob.seek(start)
                found.append(blob.read(size))
        return found

    # Batches

    def add_batch(self, batch: Batch) -> None:
        """Keep a new batch."""
        row = row_of(batch)
        with self._writing():
            self._check_bytes(batch.tenant, 0)
            (active,) = self.connection.execute(
                f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN ({marks(ACTIVE)})",  # noqa: S608
                (batch.tenant, *ACTIVE),
            ).fetchone()
            if active >= self.bounds.active_each:
                raise TenantLimitError(
                    f"You have {active} batches that are not over, and may have as many. Come "
                    "again when one is, or cancel one.",
                    later=True,
                )
            self.connection.execute(
                f"INSERT INTO batches ({', '.join(row)}) VALUES ({marks(row)})",  # noqa: S608
                tuple(row.values()),
            )

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        """Find one of a tenant's batches."""
        found = self._batches("id = ? AND tenant = ?", (batch_id, tenant))
        return found[0] if found else None

    def batches(self, tenant: str, page: ListPage) -> list[Batch]:
        """List a tenant's batches: one more than asked for, if there are more."""
        return [batch_of(row) for row in self._page("batches", "*", "tenant = ?", [tenant], page)]

    @frees_room
    def cancel(self, tenant: str, batch_id: str, now: float) -> Batch | None:
        """Ask for the end of a batch that runs; others stay as they are."""
        with self._writing():
            batch = self.batch(tenant, batch_id)
            if batch is not None and batch.status in (Status.VALIDATING, Status.IN_PROGRESS):
                self._move(batch, Status.CANCELLING, now)
        return batch

    def active(self) -> list[Batch]:
        """List everybody's batches that are not over, the oldest first."""
        return self._batches(f"status IN ({marks(ACTIVE)}) ORDER BY rowid", ACTIVE)

    def _batches(self, where: str, values: Sequence[Any]) -> list[Batch]:
        rows = self.connection.execute(f"SELECT * FROM batches WHERE {where}", values)  # noqa: S608
        return [batch_of(row) for row in rows]

    def _move(self, batch: Batch, status: Status, now: float) -> None:
        """Write down a batch's next state, with all else that changed of it."""
        batch.status = status
        batch.at[status] = now
        row = row_of(batch)
        # What is counted is counted where results are kept.
        for name in ("id", "completed", "failed"):
            del row[name]
        self.connection.execute(
            f"UPDATE batches SET {', '.join(f'{name} = ?' for name in row)} WHERE id = ?",  # noqa: S608
            (*row.values(), batch.id),
        )

    # Their lines

    def input(self, batch: Batch, at: int, size: int) -> bytes:
        """Read of a batch's input."""
        return self._content(batch.input, at, size)

    def forget_lines(self, batch: Batch) -> bool:
        """Forget some of a batch's lines, the first; whether there are more."""
        with self._writing():
            return self._forget_lines(batch)

    def _forget_lines(self, batch: Batch) -> bool:
        gone = self.connection.execute(
            "DELETE FROM lines WHERE batch = ? AND number IN "
            "(SELECT number FROM lines WHERE batch = ? ORDER BY number LIMIT ?)",
            (batch.id, batch.id, MOST_LINES),
        )
        return gone.rowcount >= MOST_LINES

    def add_lines(self, batch: Batch, lines: Iterable[InputLine]) -> None:
        """Keep where lines are."""
        with self._writing():
            self.connection.executemany(
                "INSERT INTO lines (batch, number, custom_id, model, start, size) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                ((batch.id, x.number, x.custom_id, x.model, x.start, x.size) for x in lines),
            )

    def begin(self, batch: Batch, total: int, now: float) -> bool:
        """Have a batch's lines run; False if it was cancelled meanwhile."""
        return self._settle(batch, Status.IN_PROGRESS, now, total=total)

    def refuse(self, batch: Batch, complaints: list[InputProblem], now: float) -> bool:
        """End a batch whose input can't be run; False if it was cancelled meanwhile."""
        return self._settle(batch, Status.FAILED, now, complaints=complaints)

    def _settle(self, batch: Batch, status: Status, now: float, **changes: Any) -> bool:
        with self._writing():
            found = self._batches("id = ?", (batch.id,))
            if not found or found[0].status is not Status.VALIDATING:
                return False
            for name, value in changes.items():
                setattr(found[0], name, value)
            self._move(found[0], status, now)
            if status is Status.FAILED:
                self.connection.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
        return True

    def jobs(self, batch: Batch, after: int, most: int) -> list[LineJob]:
        """Read the next lines that have no result, behind the line of that number."""
        rows = self.connection.execute(
            "SELECT number, custom_id, model, start, size FROM lines AS l "
            "WHERE batch = ? AND number > ? AND NOT EXISTS "
            "(SELECT 1 FROM results AS r WHERE r.batch = l.batch AND r.number = l.number) "
            "ORDER BY number LIMIT ?",
            (batch.id, after, most),
        )
        lines: list[tuple[int, str, str]] = []
        places: list[tuple[int, int]] = []
        left = FETCH_BYTES
        for number, custom_id, model, start, size in rows:
            if lines and size > left:
                break
            left -= size
            lines.append((number, custom_id, model))
            places.append((start, size))
        bodies = self._contents(batch.input, places)
        return [LineJob(batch.id, *line, body) for line, body in zip(lines, bodies, strict=True)]

    def save(self, results: Sequence[LineResult]) -> None:
        """Keep results; of a line that has one, the first stays."""
        with self._writing():
            for result in results:
                self._save(result)

    def _save(self, result: LineResult) -> None:
        ok = result.ok
        kept = self.connection.execute(
            "INSERT OR IGNORE INTO results (batch, number, ok, content) VALUES (?, ?, ?, ?)",
            (result.batch, result.number, ok, written(result)),
        )
        if kept.rowcount:
            column = "completed" if ok else "failed"
            self.connection.execute(
                f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?",  # noqa: S608
                (result.batch,),
            )

    def give_up(self, batch: Batch, status: Status, after: int) -> int | None:
        """Say of some lines left why they were not run, those behind the line of that number.

        Returns the number of the last; None where there are no more.
        """
        code, message = ENDS[status]
        if not code:
            return None
        with self._writing():
            left = self._left(batch, after, MOST_LINES)
            for job in left:
                self._save(replaced(job, code, message))
        return left[-1].number if len(left) == MOST_LINES else None

    def end(self, batch_id: str, status: Status, now: float) -> None:
        """End a batch: say of each line left why it was not run, and offer the results as files."""
        code, message = ENDS[status]
        with self._writing():
            (batch,) = self._batches("id = ?", (batch_id,))
            for job in self._left(batch) if code else ():
                self._save(replaced(job, code, message))
            (batch,) = self._batches("id = ?", (batch_id,))
            batch.output = self._offer(batch, now, ok=True)
            batch.error = self._offer(batch, now, ok=False)
            if status is Status.COMPLETED:
                batch.at[Status.FINALIZING] = now
            self._move(batch, status, now)
            self.connection.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))

    def _left(self, batch: Batch, after: int = 0, most: int = -1) -> list[LineJob]:
        rows = self.connection.execute(
            "SELECT number, custom_id, model FROM lines AS l "
            "WHERE batch = ? AND number > ? AND NOT EXISTS "
            "(SELECT 1 FROM results AS r WHERE r.batch = l.batch AND r.number = l.number) "
            "ORDER BY number LIMIT ?",
            (batch.id, after, most),
        )
        return [
            LineJob(batch.id, number, custom_id, model, b"") for number, custom_id, model in rows
        ]

    def _offer(self, batch: Batch, now: float, *, ok: bool) -> str | None:
        """Make a file of a batch's results; none of nothing."""
        (size,) = self.connection.execute(
            "SELECT sum(length(content) + 1) FROM results WHERE batch = ? AND ok = ?",
            (batch.id, ok),
        ).fetchone()
        if not size:
            return None
        name = f"{batch.id}_{'output' if ok else 'error'}.jsonl"
        expires = now + self.keep_s
        file = File(
            new_id("file-"), batch.tenant, name, OUTPUT, now, expires, size, batch.id, ok
        )  # fmt: skip
        self._insert_file(file, None)
        return file.id

    @frees_room
    def purge(self, now: float) -> bool:
        """Forget some of what was kept for long enough by what holds now, or give its room back.

        Returns whether there is more to do.
        """
        since = now - self.keep_s
        with self._writing():
            over = self._batches(
                f"status NOT IN ({marks(ACTIVE)}) AND expires < ? LIMIT 1", (*ACTIVE, since)
            )
            if over:
                self._forget(over[0])
                return True
            if files := self._outdated(now, since):
                self.connection.execute(
                    f"DELETE FROM files WHERE id IN ({marks(files)})",  # noqa: S608
                    files,
                )
                return True
        return self.give_back()

    def _outdated(self, now: float, since: float) -> list[str]:
        """Name some files that were kept for long enough: of large ones, one."""
        rows = self.connection.execute(
            "SELECT id, coalesce(length(content), 0) FROM files WHERE "  # noqa: S608
            "(expires < ? OR created < ?) AND id NOT IN "
            f"(SELECT input FROM batches WHERE status IN ({marks(ACTIVE)})) LIMIT ?",
            (now, since, *ACTIVE, MOST_FILES),
        ).fetchall()
        return few(rows)

    def _forget(self, batch: Batch) -> None:
        """Forget a batch, or some of what is kept of it."""
        if self._forget_lines(batch):
            return
        some, more = self._few_results("batch = ?", (batch.id,))
        if some:
            self.connection.execute(
                "DELETE FROM results WHERE batch = ? AND number <= ?", (batch.id, some[-1])
            )
        if not more:
            self.connection.execute("DELETE FROM batches WHERE id = ?", (batch.id,))

    def give_back(self) -> bool:
        """Give some pages that nothing is in back to the disk; whether there are more."""
        before = self._free_pages()
        # As a script: one that is merely executed is stopped after its first page.
        with disk_errors(self._path):
            self.connection.executescript(f"PRAGMA incremental_vacuum({MOST_PAGES})")
        return 0 < self._free_pages() < before

    def _free_pages(self) -> int:
        (free,) = self.connection.execute("PRAGMA freelist_count").fetchone()
        return int(free)


def few(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Name the first of these, each of which has a size: of large ones, one."""
    found: list[Any] = []
    left = LARGE
    for name, size in rows:
        left -= size
        if found and left < 0:
            break
        found.append(name)
    return found

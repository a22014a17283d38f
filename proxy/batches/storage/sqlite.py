"""SQLite: one folder with a database, used by the processes of one machine."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from proxy.batches.storage.backend import Backend, BatchDuties, Row
from proxy.batches.storage.disk import (
    DATABASE,
    SETTING,
    DiskRoom,
    database_identity,
    disk_errors,
    moved_or_removed,
)
from proxy.batches.storage.lock import FolderLock
from proxy.batches.storage.rows import placeholders
from proxy.batches.storage.schema import TABLES, UNSAVED, VERSION, sqlite_usage
from proxy.batches.types import DiskError, StoreFullError

BUSY_S = 30.0  # wait for a lock of another process
MAX_PAGES = 1000  # returned to the disk in one step, so that other operations do not wait
NEXT_LINES = (
    "SELECT number, custom_id, model, start, size FROM lines AS l "  # noqa: S608
    f"WHERE batch = ? AND number > ? AND {UNSAVED} ORDER BY number LIMIT ?"
)
T = TypeVar("T")


class SqliteBackend(Backend):
    """The database of a folder. The process with the folder's lock runs the batches."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FolderLock(path)
        self._session = 0
        self._open()

    def _open(self) -> None:
        self.connection = connect(self._path)
        self._identity = database_identity(self._path)
        self.room = DiskRoom(self._path, self.connection)

    @property
    def is_in_place(self) -> bool:
        return self._identity is not None and database_identity(self._path) == self._identity

    def execute(self, sql: str, values: Row = ()) -> sqlite3.Cursor:
        return self.connection.execute(sql, values)

    def insert(self, table: str, columns: str, rows: Iterable[Row]) -> None:
        marks = placeholders(columns.split(","))
        self.connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)  # noqa: S608

    def insert_new(self, table: str, columns: str, rows: Sequence[Row]) -> list[Row]:
        marks = placeholders(columns.split(","))
        sql = f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({marks})"  # noqa: S608
        return [row[:3] for row in rows if self.execute(sql, row).rowcount]

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self.errors(), transaction(self.connection):
            yield

    def errors(self) -> AbstractContextManager[None]:
        return disk_errors(self._path)

    def check(self) -> None:
        if not self.is_in_place:
            raise moved_or_removed(self._path)

    def _reopen(self) -> bool:
        """Open the database anew if the file was replaced; return True if it was.

        Raises `DiskError` while the folder is missing.
        """
        if self.is_in_place:
            return False
        if not self._path.is_dir():  # a mount may be missing; the folder is created only at startup
            raise moved_or_removed(self._path)
        before = self.connection
        self._open()
        before.close()
        self._lock.release()
        return True

    def renew_duties(self) -> BatchDuties:
        replaced = self._reopen()
        if lost := self._lock.is_lost:
            self._lock.release()
        if not self._lock.is_held:
            self._session += 1
        leads = self._lock.acquire()
        return BatchDuties(leads, leads, self._session, lost, replaced)

    def has_led_since(self, session: int) -> bool:
        return self._lock.is_held and session == self._session

    def lines(self, batch: str, after: int, limit: int, max_bytes: int) -> list[Row]:
        lines: list[Row] = []
        for line in self.execute(NEXT_LINES, (batch, after, limit)):
            max_bytes -= line[-1]
            if lines and max_bytes < 0:
                break
            lines.append(line)
        return lines

    def release_lines(self, batch: str, numbers: Sequence[int]) -> None:
        """Do nothing: there are no claims."""

    def contents(self, file_id: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read parts of a file.

        SQLite walks the file's pages up to the first place; later places cost little.
        """
        row = self.execute("SELECT rowid FROM files WHERE id = ?", (file_id,)).fetchone()
        if row is None:
            return [b""] * len(places)
        contents: list[bytes] = []
        with self.connection.blobopen("files", "content", row[0], readonly=True) as blob:
            for start, size in places:
                blob.seek(start)
                contents.append(blob.read(size))
        return contents

    def check_room(self, size: int) -> None:
        self.room.check(size)

    def free_room(self, operation: Callable[[], T]) -> T:
        if not self.room.is_short:
            with suppress(StoreFullError):
                return operation()
        with self.room.free_pages(self.shrink):
            return self.room.retry_when_full(operation)

    def shrink(self) -> bool:
        before = self._free_pages()
        # `execute` would stop the pragma after its first page.
        with self.errors():
            self.connection.executescript(f"PRAGMA incremental_vacuum({MAX_PAGES})")
        return 0 < self._free_pages() < before

    def _free_pages(self) -> int:
        (free,) = self.execute("PRAGMA freelist_count").fetchone()
        return int(free)

    def close(self) -> None:
        self.connection.close()
        self._lock.release()


def connect(path: Path) -> sqlite3.Connection:
    """Open a folder's database, and create it if it is missing."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = path / DATABASE
        file.touch(mode=0o600)  # contains prompts; SQLite's other files get the same mode
        connection = sqlite3.connect(
            file,
            isolation_level=None,  # transactions begin explicitly
            timeout=BUSY_S,
            check_same_thread=False,  # used by one thread at a time
        )
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        # Acknowledged writes survive a power failure.
        connection.execute("PRAGMA synchronous = FULL")
        with transaction(connection):
            version = _create_tables(connection)
    except (OSError, sqlite3.Error) as error:
        raise DiskError(f"{SETTING}: {path}: {error}; name a writable folder") from None
    if version not in (0, VERSION):
        connection.close()
        raise DiskError(
            f"{SETTING}: {path}: written by another release (schema {version}, not "
            f"{VERSION}); give another folder"
        )
    return connection


def _create_tables(connection: sqlite3.Connection) -> int:
    """Create missing tables; return the version that the database had, 0 if it was empty."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        for statement in TABLES.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
    has_table = "SELECT 1 FROM sqlite_master WHERE name = 'used'"
    if version in (0, VERSION) and connection.execute(has_table).fetchone() is None:
        for statement in sqlite_usage():
            connection.execute(statement)
    return int(version)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit everything in the block, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk may have ended the transaction
            connection.execute("ROLLBACK")
        raise

"""Disk errors with remedies, and a disk reserve for deletes."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from typing import TypeVar

from proxy.batches.types import DiskError, StoreFullError

T = TypeVar("T")

SETTING = "router.batches.path"
DATABASE = "batches.sqlite"
RESERVE = "reserve"
# A delete of a large file writes less than 1 MiB, and giving its pages back 4 MiB at a time.
RESERVE_BYTES = 8 << 20
SHORT_BYTES = 128 << 20  # more than twice the default `max_file_bytes`
# One delete returns up to 64 MiB, in steps of 1000 pages. The scheduler returns the rest.
MAX_VACUUM_STEPS = 16
ERASES = ("OFF", "ON", "FAST")  # what SQLite's number for `secure_delete` means
NO_ROOM = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
PRIMARY = 0xFF  # of an extended result code of SQLite
# SQLite reports EDQUOT, EFBIG and EIO alike.
NOT_WRITTEN = frozenset(
    [
        sqlite3.SQLITE_IOERR_WRITE,
        sqlite3.SQLITE_IOERR_FSYNC,
        sqlite3.SQLITE_IOERR_DIR_FSYNC,
        sqlite3.SQLITE_IOERR_TRUNCATE,
        sqlite3.SQLITE_IOERR_SHMSIZE,
    ]
)
REMEDIES = {
    sqlite3.SQLITE_IOERR: "check the kernel's log for disk errors",
    sqlite3.SQLITE_READONLY: "remount it for writing, or let the router's user write there",
    sqlite3.SQLITE_CANTOPEN: "let the router's user read and write there",
    sqlite3.SQLITE_PERM: "let the router's user read and write there",
    sqlite3.SQLITE_BUSY: "find the process that keeps the database locked",
    sqlite3.SQLITE_CORRUPT: "restore the database from a backup, or give another folder",
    sqlite3.SQLITE_NOTADB: "restore the database from a backup, or give another folder",
}


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise `DiskError` for every disk error; let other errors pass."""
    try:
        yield
    except sqlite3.Error as error:
        if (named := _disk_error_for(folder, error)) is None:
            raise
        raise named from None
    except OSError as error:
        if error.errno in NO_ROOM:
            raise no_room(folder) from None
        raise DiskError(f"{SETTING}: {folder}: {error}; repair or remount that folder") from None


def no_room(folder: Path) -> StoreFullError:
    return StoreFullError(
        f"the disk of {folder} ({SETTING}) is full; free space, or lower router.batches.keep_days"
    )


def moved_or_removed(folder: Path) -> DiskError:
    return DiskError(
        f"{SETTING}: {folder}: the folder or its database was removed or replaced while the router "
        "was running; restore it, or create an empty folder there"
    )


def _disk_error_for(folder: Path, error: sqlite3.Error) -> DiskError | None:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if code & PRIMARY == sqlite3.SQLITE_FULL:
        return no_room(folder)
    if code in NOT_WRITTEN:
        return StoreFullError(
            f"writing to {folder} ({SETTING}) failed: {error}; check the disk's space, inodes and "
            "quota, the limit on file sizes (ulimit -f), and the kernel's log"
        )
    if (remedy := REMEDIES.get(code & PRIMARY)) is None:
        return None
    return DiskError(f"{SETTING}: {folder}: {error}; {remedy}")


class DiskRoom:
    """The disk's free space, and a reserve file that lets deletes work on a full disk.

    A delete first writes to SQLite's log. A checkpoint then moves the log into the database, which
    may grow.
    """

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self._folder = folder
        self._reserve = folder / RESERVE
        self._run = connection.execute
        self._refill_reserve()

    @property
    def is_short(self) -> bool:
        """True if freed pages must be returned to the disk at once."""
        return self._free < SHORT_BYTES

    @property
    def _free(self) -> int:
        with disk_errors(self._folder):
            return disk_usage(self._folder).free

    def check(self, size: int) -> None:
        """Raise `StoreFullError` unless the log and the database have room for this many bytes.

        A larger log would take the room that deletes need.
        """
        if self._free < 2 * size:
            raise no_room(self._folder)

    @contextmanager
    def free_pages(self, shrink: Callable[[], bool]) -> Iterator[None]:
        """Keep the block's writes small, then call `shrink` until no pages are left.

        SQLite may be built to overwrite deleted data. An automatic checkpoint could use up the
        reserve before `shrink` shortens the database.
        """
        (erases,) = self._run("PRAGMA secure_delete").fetchone()
        (pages,) = self._run("PRAGMA wal_autocheckpoint").fetchone()
        self._run("PRAGMA secure_delete = FAST")
        self._run("PRAGMA wal_autocheckpoint = 0")
        try:
            yield
            with suppress(DiskError, sqlite3.Error):  # the block itself has succeeded
                for _ in range(MAX_VACUUM_STEPS):
                    self._empty_log()
                    if not self.retry_when_full(shrink):
                        break
                self._empty_log()
        finally:
            self._run(f"PRAGMA wal_autocheckpoint = {pages}")
            self._run(f"PRAGMA secure_delete = {ERASES[erases]}")
            self._refill_reserve()

    def retry_when_full(self, operation: Callable[[], T]) -> T:
        """Call `operation`; on a full disk retry without the reserve, then with an empty log."""
        for make_room in (self._release_reserve, self._empty_log):
            try:
                return operation()
            except StoreFullError:
                make_room()
        return operation()

    def _empty_log(self) -> None:
        (pages,) = self._run("PRAGMA page_count").fetchone()
        (size,) = self._run("PRAGMA page_size").fetchone()
        with disk_errors(self._folder):
            longer = pages * size - (self._folder / DATABASE).stat().st_size
        if longer <= self._free:
            with suppress(sqlite3.Error):
                self._run("PRAGMA wal_checkpoint(TRUNCATE)")

    def _release_reserve(self) -> None:
        with suppress(OSError):
            os.truncate(self._reserve, 0)

    def _refill_reserve(self) -> None:
        with suppress(OSError), self._reserve.open("ab", buffering=0) as file:
            file.write(bytes(max(RESERVE_BYTES - file.tell(), 0)))


def database_identity(folder: Path) -> tuple[int, int] | None:
    """Return the device and inode of a folder's database; None if it is missing."""
    try:
        status = (folder / DATABASE).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino

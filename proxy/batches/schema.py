"""The tables, and how the database is opened."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.batches.types import StoreFullError
from proxy.errors import ProxyError

VERSION = 1
BUSY_S = 30.0  # that another process may keep it locked
TABLES = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL,
    created REAL NOT NULL, expires REAL NOT NULL, bytes INTEGER NOT NULL,
    batch TEXT, ok INTEGER NOT NULL, content BLOB);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, endpoint TEXT NOT NULL, input TEXT NOT NULL,
    window TEXT NOT NULL, status TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL,
    metadata TEXT, complaints TEXT NOT NULL DEFAULT '[]',
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, output TEXT, error TEXT, at TEXT NOT NULL DEFAULT '{}');
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, model TEXT NOT NULL,
    start INTEGER NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (batch, number), UNIQUE (batch, custom_id)) WITHOUT ROWID;
CREATE TABLE results (
    batch TEXT NOT NULL, number INTEGER NOT NULL, ok INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (batch, number));
"""


def connect(path: Path) -> sqlite3.Connection:
    """Open the database of a folder, and make it where there is none."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = path / "batches.sqlite"
        file.touch(mode=0o600)  # prompts are in it; what SQLite puts beside it is as private
        connection = sqlite3.connect(
            file,
            isolation_level=None,  # transactions begin where they are said to
            timeout=BUSY_S,
            check_same_thread=False,  # it is one thread's at a time
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # what was answered for outlives the power
        with transaction(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in TABLES.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {VERSION}")
    except (OSError, sqlite3.Error) as error:
        raise ProxyError(
            f"router.batches.path: {path}: {error}; give a folder that can be written to"
        ) from None
    if version not in (0, VERSION):
        connection.close()
        raise ProxyError(
            f"router.batches.path: {path}: written by another release (schema {version}, not "
            f"{VERSION}); give another folder"
        )
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Do all that is inside, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk may have ended it
            connection.execute("ROLLBACK")
        raise


@contextmanager
def full_disk_told() -> Iterator[None]:
    """Tell a full disk from all else that can go wrong."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_FULL:
            raise
        raise StoreFullError(
            "there is no room on the disk of router.batches.path; make some, or set keep_days lower"
        ) from None

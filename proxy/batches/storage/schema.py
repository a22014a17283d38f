"""The tables, and how the database is opened."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.batches.storage.disk import DATABASE, SETTING
from proxy.batches.types import DiskError

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
ROW_BYTES = 300  # of any row and its part of the indexes, beside what is the client's to choose
# In bytes: the length of a text ends at its first NUL.
TEXT = "coalesce(length(CAST({{row}}.{} AS BLOB)), 0)"
# What is the client's, in each table; and whose a row is.
CHOSEN = {
    "files": "{row}.bytes * ({row}.batch IS NULL) + " + TEXT.format("name"),
    "batches": " + ".join(map(TEXT.format, ("complaints", "metadata"))),
    "lines": " + ".join(map(TEXT.format, ("custom_id", "custom_id", "model"))),  # one for the index
    "results": "length({row}.content)",
}
OWN, OF_BATCH = "{row}.tenant", "(SELECT tenant FROM batches WHERE id = {row}.batch)"
WHOSE = {"files": OWN, "batches": OWN, "lines": OF_BATCH, "results": OF_BATCH}


def connect(path: Path) -> sqlite3.Connection:
    """Open the database of a folder, and make it where there is none."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = path / DATABASE
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
            known = "SELECT 1 FROM sqlite_master WHERE name = 'used'"
            if version in (0, VERSION) and connection.execute(known).fetchone() is None:
                for statement in counting():
                    connection.execute(statement)
    except (OSError, sqlite3.Error) as error:
        raise DiskError(
            f"{SETTING}: {path}: {error}; give a folder that can be written to"
        ) from None
    if version not in (0, VERSION):
        connection.close()
        raise DiskError(
            f"{SETTING}: {path}: written by another release (schema {version}, not "
            f"{VERSION}); give another folder"
        )
    return connection


def counting() -> Iterator[str]:
    """Have the database itself count what each tenant has.

    Beside the tables of the same version: a folder that was written without gets it, and a release
    that knows nothing of it counts all the same.
    """
    yield "CREATE TABLE used (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID"
    yield "CREATE INDEX files_by_tenant ON files (tenant)"
    yield "CREATE INDEX batches_by_tenant ON batches (tenant)"
    had = " UNION ALL ".join(
        f"SELECT {_whose(table, table)} AS tenant, {_size(table, table)} AS size FROM {table}"  # noqa: S608
        for table in CHOSEN
    )
    yield (
        f"INSERT INTO used SELECT tenant, sum(size) FROM ({had}) "  # noqa: S608
        "WHERE tenant IS NOT NULL GROUP BY tenant"
    )
    for table in CHOSEN:
        yield _trigger(table, "INSERT", "NEW", _size(table, "NEW"))
        yield _trigger(table, "DELETE", "OLD", f"-({_size(table, 'OLD')})")
    changed = f"{_size('batches', 'NEW')} - ({_size('batches', 'OLD')})"
    yield _trigger("batches", "UPDATE", "NEW", changed)


def _whose(table: str, row: str) -> str:
    return WHOSE[table].format(row=row)


def _size(table: str, row: str) -> str:
    return f"{ROW_BYTES} + {CHOSEN[table].format(row=row)}"


def _trigger(table: str, event: str, row: str, more: str) -> str:
    whose = _whose(table, row)
    count = f"UPDATE used SET bytes = bytes + {more} WHERE tenant = {whose};"  # noqa: S608
    if WHOSE[table] is OWN:  # what comes first of a tenant is a file or a batch
        count = f"INSERT OR IGNORE INTO used VALUES ({whose}, 0); {count}"  # noqa: S608
    return f"CREATE TRIGGER {table}_{event.lower()} AFTER {event} ON {table} BEGIN {count} END"


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

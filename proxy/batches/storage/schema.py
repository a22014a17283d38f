"""Tables of the database, and how it is opened."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.batches.storage.disk import DATABASE, SETTING
from proxy.batches.types import DiskError

VERSION = 1
BUSY_S = 30.0  # wait for a lock of another process
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
ROW_BYTES = 300  # bytes of a row and its index entries without client data
# The cast makes the length count bytes; a text's length ends at its first NUL.
TEXT = "coalesce(length(CAST({{row}}.{} AS BLOB)), 0)"
# Size of the client data in a row, and the row's tenant, by table.
CLIENT_BYTES = {
    "files": "{row}.bytes * ({row}.batch IS NULL) + " + TEXT.format("name"),
    "batches": " + ".join(map(TEXT.format, ("complaints", "metadata"))),
    # custom_id is also in an index
    "lines": " + ".join(map(TEXT.format, ("custom_id", "custom_id", "model"))),
    "results": "length({row}.content)",
}
OWN_TENANT, BATCH_TENANT = "{row}.tenant", "(SELECT tenant FROM batches WHERE id = {row}.batch)"
ROW_TENANT = {
    "files": OWN_TENANT,
    "batches": OWN_TENANT,
    "lines": BATCH_TENANT,
    "results": BATCH_TENANT,
}


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
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        # Acknowledged writes survive a power failure.
        connection.execute("PRAGMA synchronous = FULL")
        with transaction(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in TABLES.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {VERSION}")
            known = "SELECT 1 FROM sqlite_master WHERE name = 'used'"
            if version in (0, VERSION) and connection.execute(known).fetchone() is None:
                for statement in usage_statements():
                    connection.execute(statement)
    except (OSError, sqlite3.Error) as error:
        raise DiskError(f"{SETTING}: {path}: {error}; name a writable folder") from None
    if version not in (0, VERSION):
        connection.close()
        raise DiskError(
            f"{SETTING}: {path}: written by another release (schema {version}, not "
            f"{VERSION}); give another folder"
        )
    return connection


def usage_statements() -> Iterator[str]:
    """Yield statements that make the database count each tenant's bytes.

    Separate from `TABLES`, with the same version: older databases get the count added, and triggers
    keep it correct in older releases.
    """
    yield "CREATE TABLE used (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID"
    yield "CREATE INDEX files_by_tenant ON files (tenant)"
    yield "CREATE INDEX batches_by_tenant ON batches (tenant)"
    had = " UNION ALL ".join(
        f"SELECT {_tenant_of(table, table)} AS tenant, {_size(table, table)} AS size FROM {table}"  # noqa: S608
        for table in CLIENT_BYTES
    )
    yield (
        f"INSERT INTO used SELECT tenant, sum(size) FROM ({had}) "  # noqa: S608
        "WHERE tenant IS NOT NULL GROUP BY tenant"
    )
    for table in CLIENT_BYTES:
        yield _trigger(table, "INSERT", "NEW", _size(table, "NEW"))
        yield _trigger(table, "DELETE", "OLD", f"-({_size(table, 'OLD')})")
    changed = f"{_size('batches', 'NEW')} - ({_size('batches', 'OLD')})"
    yield _trigger("batches", "UPDATE", "NEW", changed)


def _tenant_of(table: str, row: str) -> str:
    return ROW_TENANT[table].format(row=row)


def _size(table: str, row: str) -> str:
    return f"{ROW_BYTES} + {CLIENT_BYTES[table].format(row=row)}"


def _trigger(table: str, event: str, row: str, more: str) -> str:
    tenant = _tenant_of(table, row)
    count = f"UPDATE used SET bytes = bytes + {more} WHERE tenant = {tenant};"  # noqa: S608
    if ROW_TENANT[table] is OWN_TENANT:  # a tenant's first row is a file or a batch
        count = f"INSERT OR IGNORE INTO used VALUES ({tenant}, 0); {count}"  # noqa: S608
    return f"CREATE TRIGGER {table}_{event.lower()} AFTER {event} ON {table} BEGIN {count} END"


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

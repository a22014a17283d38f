"""Copies the store of a folder into a PostgreSQL database."""

from __future__ import annotations

from pathlib import Path

from proxy.batches.storage.disk import DATABASE
from proxy.batches.storage.postgres import LEAD, PostgresBackend, chunks
from proxy.batches.storage.rows import BATCH_COLUMNS, FILE_COLUMNS
from proxy.batches.storage.schema import POSTGRES_OCTETS, UNSAVED, count_all
from proxy.batches.storage.sqlite import SqliteBackend
from proxy.config.batches import postgres_url
from proxy.config.redact import without_password
from proxy.errors import ProxyError

# Columns and order by table. Batches are copied last, so that no router runs one before.
TABLES = {
    "files": (f"{FILE_COLUMNS}, content", "ORDER BY rowid"),
    "results": ("batch, number, ok, content", "ORDER BY rowid"),
    "lines": (
        "batch, number, custom_id, model, start, size",
        f"AS l WHERE {UNSAVED}",
    ),
}
Counts = dict[str, tuple[int, int]]


def migrate(folder: Path, url: str, password_file: Path | None = None) -> Counts:
    """Copy all rows; return how many rows each table has, and how many of them are new.

    A run that was interrupted goes on. Raises `ProxyError`.
    """
    if not (folder / DATABASE).is_file():
        raise ProxyError(
            f"{folder}: there is no {DATABASE}; give the folder of router.batches.path"
        )
    try:
        postgres_url(url)
    except ValueError as error:
        raise ProxyError(f"--to {without_password(url)}: {error}") from None
    target = PostgresBackend(url, password_file)
    try:
        with target.errors():
            target.check()
            source = SqliteBackend(folder)
            try:
                with source.errors():
                    return _copy(source, target, folder)
            finally:
                source.close()
    finally:
        target.close()


def _copy(source: SqliteBackend, target: PostgresBackend, folder: Path) -> Counts:
    if not source.renew_duties().sends_lines:
        raise ProxyError(f"{folder}: a router uses it; stop the router first")
    if target.execute("SELECT pg_try_advisory_lock(?)", (LEAD,)).fetchone() != (True,):
        raise ProxyError("a router uses the database; stop the router first")
    if target.execute("SELECT 1 FROM batches LIMIT 1").fetchone():
        raise ProxyError("the database has batches already; give an empty database")
    ids = {row[0] for row in source.execute("SELECT id FROM files")}
    if not ids.issuperset(row[0] for row in target.execute("SELECT id FROM files").fetchall()):
        raise ProxyError("the database has files that the folder has not; give an empty database")
    target.execute("SET statement_timeout = 0")
    counts: Counts = {}
    for table, (columns, rest) in TABLES.items():
        total = new = 0
        for chunk in chunks(source.execute(f"SELECT {columns} FROM {table} {rest}")):  # noqa: S608
            with target.writing():
                new += len(target.insert_new(table, columns, chunk))
            total += len(chunk)
        counts[table] = total, new
    batches = source.execute(f"SELECT {BATCH_COLUMNS} FROM batches ORDER BY rowid").fetchall()  # noqa: S608
    with target.writing():
        target.insert("batches", BATCH_COLUMNS, batches)
        target.execute("DELETE FROM used")  # results were not counted without their batches
        target.execute(count_all(POSTGRES_OCTETS))
    return counts | {"batches": (len(batches), len(batches))}

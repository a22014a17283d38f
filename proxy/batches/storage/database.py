"""The database of a folder: connection, limits and space."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from proxy.batches.storage.disk import DiskRoom, disk_errors, place_of
from proxy.batches.storage.rows import ListPage, batch_of
from proxy.batches.storage.schema import connect, transaction
from proxy.batches.types import Batch, StoreFullError, TenantLimitError

# Results deleted in one transaction, and pages returned to the disk in one step, so that other
# operations do not wait.
MAX_RESULTS, MAX_PAGES = 200, 1000
LARGE_BYTES = 4 << 20  # deleted in one transaction, except for a single larger row


class StoreLimits(NamedTuple):
    """Limits on what the store keeps."""

    bytes: int = sys.maxsize
    bytes_each: int = sys.maxsize  # per tenant
    active_each: int = sys.maxsize  # batches per tenant


Base = TypeVar("Base", bound="Database")
Given = ParamSpec("Given")
Got = TypeVar("Got")


def frees_room(
    method: Callable[Concatenate[Base, Given], Got],
) -> Callable[Concatenate[Base, Given], Got]:
    """Let a method succeed on a full disk, and return freed pages to the disk."""

    @wraps(method)
    def run(store: Base, /, *args: Given.args, **named: Given.kwargs) -> Got:
        def do() -> Got:
            return method(store, *args, **named)

        if not store.room.is_short:
            with suppress(StoreFullError):
                return do()
        with store.room.spared(store.give_back):
            return store.room.retry_when_full(do)

    return run


class Database:
    """One connection to a folder's database."""

    def __init__(self, path: Path, keep_s: float, bounds: StoreLimits = StoreLimits()) -> None:  # noqa: B008
        self.keep_s = keep_s
        self.bounds = bounds
        self.connection = connect(path)
        self._path = path
        self._place = place_of(path)
        self.room = DiskRoom(path, self.connection)

    @property
    def is_in_place(self) -> bool:
        """True if the open database is still the folder's database."""
        return self._place is not None and place_of(self._path) == self._place

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Commit everything in the block, or nothing; raise `DiskError`."""
        with disk_errors(self._path), transaction(self.connection):
            yield

    def close(self) -> None:
        self.connection.close()

    def _used(self) -> dict[str, int]:
        return dict(self.connection.execute("SELECT tenant, bytes FROM used").fetchall())

    def full(self) -> set[str]:
        """Return the tenants at their limit; all if the total is."""
        max_all, max_each, _ = self.bounds
        used = self._used()
        over = sum(used.values()) >= max_all
        return {tenant for tenant, size in used.items() if over or size >= max_each}

    def _check_bytes(self, tenant: str, more: int) -> None:
        max_all, max_each, _ = self.bounds
        used = self._used()
        if (own := used.get(tenant, 0)) + more > max_each:
            raise TenantLimitError(
                f"Your files and results have {own} bytes; the limit is {max_each}. "
                "Delete files that you no longer need.",
                later=False,
            )
        if (every := sum(used.values())) + more > max_all:
            raise StoreFullError(
                f"files and results have {every} bytes; router.batches.max_bytes is "
                f"{max_all}; raise it, or lower keep_days"
            )

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

    def _batches(self, where: str, values: Sequence[Any]) -> list[Batch]:
        rows = self.connection.execute(f"SELECT * FROM batches WHERE {where}", values)  # noqa: S608
        return [batch_of(row) for row in rows]

    def _first_results(self, where: str, values: Sequence[Any]) -> tuple[list[int], bool]:
        """Return the line numbers of the first few results, and whether there are more."""
        rows = self.connection.execute(
            "SELECT number, length(content) FROM results "  # noqa: S608
            f"WHERE {where} ORDER BY number LIMIT ?",
            (*values, MAX_RESULTS),
        ).fetchall()
        numbers: list[int] = first_few(rows)
        return numbers, len(numbers) == MAX_RESULTS or len(numbers) < len(rows)

    def give_back(self) -> bool:
        """Return some free pages to the disk; return True if there are more."""
        before = self._free_pages()
        # `execute` would stop the pragma after its first page.
        with disk_errors(self._path):
            self.connection.executescript(f"PRAGMA incremental_vacuum({MAX_PAGES})")
        return 0 < self._free_pages() < before

    def _free_pages(self) -> int:
        (free,) = self.connection.execute("PRAGMA freelist_count").fetchone()
        return int(free)


def first_few(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the first names with a total size up to LARGE_BYTES; at least one."""
    found: list[Any] = []
    left = LARGE_BYTES
    for name, size in rows:
        left -= size
        if found and left < 0:
            break
        found.append(name)
    return found

"""Limits of the store, lists, and deletes on a full disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from proxy.batches.storage.backend import Backend, Row
from proxy.batches.storage.rows import BATCH_COLUMNS, ListPage, batch_of
from proxy.batches.types import Batch, StoreFullError, TenantLimitError

MAX_RESULTS = 200  # deleted in one transaction, so that other operations do not wait
LARGE_BYTES = 4 << 20  # deleted in one transaction, except for a single larger row


class StoreLimits(NamedTuple):
    bytes: int = sys.maxsize
    bytes_per_tenant: int = sys.maxsize
    active_per_tenant: int = sys.maxsize  # batches


Base = TypeVar("Base", bound="Database")
P = ParamSpec("P")
T = TypeVar("T")


def frees_room(
    method: Callable[Concatenate[Base, P], T],
) -> Callable[Concatenate[Base, P], T]:
    """Let a method succeed on a full disk, and return freed pages to the disk."""

    @wraps(method)
    def run(store: Base, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return store.backend.free_room(lambda: method(store, *args, **kwargs))

    return run


class Database:
    """The queries that files and batches share, on one connection."""

    def __init__(self, backend: Backend, keep_s: float, limits: StoreLimits | None = None) -> None:
        self.backend = backend
        self.keep_s = keep_s
        self.limits = limits or StoreLimits()

    def close(self) -> None:
        self.backend.close()

    def shrink(self) -> bool:
        return self.backend.shrink()

    def _used_bytes(self) -> dict[str, int]:
        return dict(self.backend.execute("SELECT tenant, bytes FROM used").fetchall())

    def full_tenants(self) -> set[str]:
        """Return the tenants at their limit; all if the total is."""
        limits, used = self.limits, self._used_bytes()
        is_full = sum(used.values()) >= limits.bytes
        return {
            tenant for tenant, size in used.items() if is_full or size >= limits.bytes_per_tenant
        }

    def _check_bytes(self, tenant: str, more: int) -> None:
        limits, used = self.limits, self._used_bytes()
        own, total = used.get(tenant, 0), sum(used.values())
        if own + more > limits.bytes_per_tenant:
            raise TenantLimitError(
                f"Your files and results have {own} bytes; the limit is {limits.bytes_per_tenant}. "
                "Delete files that you no longer need.",
                later=False,
            )
        if total + more > limits.bytes:
            raise StoreFullError(
                f"files and results have {total} bytes; router.batches.max_bytes is "
                f"{limits.bytes}; raise it, or lower keep_days"
            )

    def _page(
        self, table: str, columns: str, where: str, values: list[str], page: ListPage
    ) -> list[Row]:
        if page.after:
            sign = ">" if page.oldest_first else "<"
            where += f" AND rowid {sign} (SELECT rowid FROM {table} WHERE id = ?)"  # noqa: S608
            values = [*values, page.after]
        order = "ASC" if page.oldest_first else "DESC"
        return self.backend.execute(
            f"SELECT {columns} FROM {table} WHERE {where} ORDER BY rowid {order} LIMIT ?",  # noqa: S608
            (*values, page.limit + 1),
        ).fetchall()

    def _batches(self, where: str, values: Sequence[Any] = ()) -> list[Batch]:
        rows = self.backend.execute(f"SELECT {BATCH_COLUMNS} FROM batches WHERE {where}", values)  # noqa: S608
        return [batch_of(row) for row in rows.fetchall()]

    def _first_results(self, where: str, values: Sequence[Any]) -> tuple[list[int], bool]:
        """Return the line numbers of the first few results, and whether there are more."""
        rows = self.backend.execute(
            "SELECT number, length(content) FROM results "  # noqa: S608
            f"WHERE {where} ORDER BY number LIMIT ?",
            (*values, MAX_RESULTS),
        ).fetchall()
        numbers: list[int] = first_few(rows)
        return numbers, len(numbers) == MAX_RESULTS or len(numbers) < len(rows)


def first_few(rows: Iterable[Row], max_bytes: int = 0) -> list[Any]:
    """Return the first names with a total size up to `max_bytes`, or LARGE_BYTES; at least one."""
    names: list[Any] = []
    left = max_bytes or LARGE_BYTES
    for name, size in rows:
        left -= size
        if names and left < 0:
            break
        names.append(name)
    return names

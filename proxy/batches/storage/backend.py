"""What differs between the databases; both run the same SQL, with `?` for values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

Row = Sequence[Any]
T = TypeVar("T")


class Rows(Protocol):
    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class BatchDuties(NamedTuple):
    """What this process does for the batches of a store."""

    sends_lines: bool
    leads: bool  # it validates, ends and deletes
    session: int  # another number: others may have led since
    lost_claims: bool  # others may run the lines that it had
    replaced: bool = False  # the database is another one


class Backend(Protocol):
    """A database, used by one thread at a time. By default its lines need no claims."""

    is_shared: bool = False  # True if several processes run lines, which they claim

    def execute(self, sql: str, values: Row = ()) -> Rows: ...

    def insert(self, table: str, columns: str, rows: Iterable[Row]) -> None: ...

    def insert_new(self, table: str, columns: str, rows: Sequence[Row]) -> list[Row]:
        """Insert rows with new keys; return their first three columns."""

    def writing(self) -> AbstractContextManager[None]:
        """Commit everything in the block, or nothing; raise `DiskError`."""

    def claiming(self) -> AbstractContextManager[object]:
        """Claim the lines that the block reads, or none if it fails."""
        return nullcontext()

    def errors(self) -> AbstractContextManager[None]:
        """Raise `DiskError` for errors of the disk or the server."""

    def check(self) -> None:
        """Raise `DiskError` unless the database can be used."""

    def renew_duties(self) -> BatchDuties:
        """Return this process's duties, and renew its claims."""

    def has_led_since(self, session: int) -> bool:
        """Return True if this process has led since this session."""

    def lines(self, batch: str, after: int, limit: int, max_bytes: int) -> list[Row]:
        """Return the next lines without a result: number, custom_id, model, start, size.

        Claims them if the database is shared.
        """

    def release_lines(self, batch: str, numbers: Sequence[int]) -> None:
        """Give up the claims on lines that did not run."""

    def claimed_lines(self) -> list[tuple[str, int]]:
        """Return the batch and number of each claimed line."""
        return []

    def contents(self, file_id: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read (start, size) parts of a file; empty if it is missing."""

    def check_room(self, size: int) -> None:
        """Raise `StoreFullError` unless there is room for this many bytes."""

    def free_room(self, operation: Callable[[], T]) -> T:
        """Call `operation`, also on a full disk, and return freed space."""
        return operation()

    def shrink(self) -> bool:
        """Return some free space to the disk; return True if there is more."""
        return False

    def close(self) -> None: ...

"""Uploaded files, and output files that show a batch's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from proxy.batches.storage.database import Database, first_few, frees_room
from proxy.batches.storage.rows import ListPage, file_of, new_id, placeholders
from proxy.batches.storage.schema import ROW_BYTES
from proxy.batches.types import ACTIVE, File, InUseError

PIECE_BYTES = 1 << 20  # of a file, read in one operation
MAX_FILES = 10  # expired files deleted in one transaction
FILE_COLUMNS = "id, tenant, name, purpose, created, expires, bytes, batch, ok"


class FileStore(Database):
    """The files of one folder."""

    def add_file(self, tenant: str, name: str, purpose: str, content: bytes, now: float) -> File:
        size = len(content)
        file = File(new_id("file-"), tenant, name, purpose, now, now + self.keep_s, size)
        with self._writing():
            self.room.check(size)
            self._check_bytes(tenant, ROW_BYTES + len(name.encode()) + size)
            self._insert_file(file, content)
        return file

    def _insert_file(self, file: File, content: bytes | None) -> None:
        row = (*asdict(file).values(), content)
        self.connection.execute(
            f"INSERT INTO files ({FILE_COLUMNS}, content) VALUES ({placeholders(row)})",  # noqa: S608
            row,
        )

    def file(self, tenant: str, file_id: str) -> File | None:
        row = self.connection.execute(
            f"SELECT {FILE_COLUMNS} FROM files WHERE id = ? AND tenant = ?",  # noqa: S608
            (file_id, tenant),
        ).fetchone()
        return file_of(row) if row else None

    def files(self, tenant: str, page: ListPage, purpose: str | None = None) -> list[File]:
        """Return a page of a tenant's files, and one more file if there are more."""
        where, values = "tenant = ?", [tenant]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        rows = self._page("files", FILE_COLUMNS, where, values, page)
        return [file_of(row) for row in rows]

    @frees_room
    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a file; return False if it does not exist."""
        with self._writing():
            if self._is_read(file_id):
                raise InUseError(f"An active batch reads {file_id}; cancel the batch first.")
            file = self.file(tenant, file_id)
            if file is None:
                return False
            self.connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
            if file.batch is not None:  # the content of an output file is in `results`
                self.connection.execute(
                    "DELETE FROM results WHERE batch = ? AND ok = ?", (file.batch, file.ok)
                )
        return True

    @frees_room
    def empty_file(self, file: File, after: int) -> int | None:
        """Delete some of an output file's results, after line number `after`.

        Returns the last deleted number. Returns None if few results are left, which `delete_file`
        deletes.
        """
        if file.batch is None:
            return None
        with self._writing():
            where, values = "batch = ? AND ok = ? AND number > ?", (file.batch, file.ok, after)
            numbers, more = self._first_results(where, values)
            if not more:
                return None
            self.connection.execute(
                f"DELETE FROM results WHERE {where} AND number <= ?",  # noqa: S608
                (*values, numbers[-1]),
            )
        return numbers[-1]

    def _is_read(self, file_id: str) -> bool:
        found = self.connection.execute(
            f"SELECT 1 FROM batches WHERE input = ? AND status IN ({placeholders(ACTIVE)})",  # noqa: S608
            (file_id, *ACTIVE),
        )
        return found.fetchone() is not None

    def piece(self, file: File, at: int) -> tuple[bytes, int]:
        """Return the next part of a file and the position after it."""
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
        """Read parts of a file at (start, size) places; return empty parts if the file is missing.

        SQLite walks the file's pages up to the first place; later places cost little.
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

    def _outdated(self, now: float, since: float) -> list[str]:
        rows = self.connection.execute(
            "SELECT id, coalesce(length(content), 0) FROM files WHERE "  # noqa: S608
            "(expires < ? OR created < ?) AND id NOT IN "
            f"(SELECT input FROM batches WHERE status IN ({placeholders(ACTIVE)})) LIMIT ?",
            (now, since, *ACTIVE, MAX_FILES),
        ).fetchall()
        return first_few(rows)

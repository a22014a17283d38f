"""Uploaded files, and output files that show a batch's results."""

from __future__ import annotations

from dataclasses import asdict
from math import inf

from proxy.batches.storage.database import Database, first_few, frees_room
from proxy.batches.storage.rows import FILE_COLUMNS, ListPage, file_of, new_id
from proxy.batches.storage.schema import IS_ACTIVE, ROW_BYTES
from proxy.batches.types import File, InUseError

# Of a file, read in one operation.
PIECE_BYTES, MAX_PIECE_RESULTS = 1 << 20, 4000
MAX_FILES = 10  # expired files deleted in one transaction


class FileStore(Database):
    def add_file(
        self, tenant: str, name: str, purpose: str, content: bytes, now: float, keep_s: float = inf
    ) -> File:
        size = len(content)
        expires = now + min(keep_s, self.keep_s)
        file = File(new_id("file-"), tenant, name, purpose, now, expires, size)
        with self.backend.writing():
            self.backend.check_room(size)
            self._check_bytes(tenant, ROW_BYTES + len(name.encode()) + size)
            self._insert_file(file, content)
        return file

    def _insert_file(self, file: File, content: bytes | None = None) -> None:
        row = (*(asdict(file) | {"ok": int(file.ok)}).values(), content)
        self.backend.insert("files", f"{FILE_COLUMNS}, content", [row])

    def file(self, tenant: str, file_id: str) -> File | None:
        row = self.backend.execute(
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
        with self.backend.writing():
            if self._is_active_input(file_id):
                raise InUseError(f"An active batch reads {file_id}; cancel the batch first.")
            file = self.file(tenant, file_id)
            if file is None:
                return False
            self.backend.execute("DELETE FROM files WHERE id = ?", (file_id,))
            if file.batch is not None:  # the content of an output file is in `results`
                self.backend.execute(
                    "DELETE FROM results WHERE batch = ? AND ok = ?", (file.batch, int(file.ok))
                )
        return True

    @frees_room
    def delete_results_after(self, file: File, after: int) -> int | None:
        """Delete some of an output file's results, after line number `after`.

        Returns the last deleted number. Returns None if few results are left, which `delete_file`
        deletes.
        """
        if file.batch is None:
            return None
        with self.backend.writing():
            where = "batch = ? AND ok = ? AND number > ?"
            values = (file.batch, int(file.ok), after)
            numbers, more = self._first_results(where, values)
            if not more:
                return None
            self.backend.execute(
                f"DELETE FROM results WHERE {where} AND number <= ?",  # noqa: S608
                (*values, numbers[-1]),
            )
        return numbers[-1]

    def _is_active_input(self, file_id: str) -> bool:
        active = self.backend.execute(
            f"SELECT 1 FROM batches WHERE input = ? AND {IS_ACTIVE}",  # noqa: S608
            (file_id,),
        )
        return active.fetchone() is not None

    def read_piece(self, file: File, at: int) -> tuple[bytes, int]:
        """Return the next part of a file and the position after it."""
        if file.batch is None:
            content = self._content(file.id, at, min(PIECE_BYTES, file.bytes - at))
            return content, at + len(content)
        where, values = "batch = ? AND ok = ? AND number > ?", (file.batch, int(file.ok), at)
        sizes = self.backend.execute(
            f"SELECT number, length(content) FROM results WHERE {where} ORDER BY number LIMIT ?",  # noqa: S608
            (*values, MAX_PIECE_RESULTS),
        )
        if not (numbers := first_few(sizes.fetchall(), PIECE_BYTES)):
            return b"", at
        rows = self.backend.execute(
            f"SELECT content FROM results WHERE {where} AND number <= ? ORDER BY number",  # noqa: S608
            (*values, numbers[-1]),
        )
        return b"".join(row[0] + b"\n" for row in rows.fetchall()), numbers[-1]

    def _content(self, file_id: str, start: int, size: int) -> bytes:
        return self.backend.contents(file_id, [(start, size)])[0]

    def _expired_files(self, now: float, since: float) -> list[str]:
        rows = self.backend.execute(
            "SELECT id, coalesce(length(content), 0) FROM files WHERE "  # noqa: S608
            "(expires < ? OR created < ?) AND id NOT IN "
            f"(SELECT input FROM batches WHERE {IS_ACTIVE}) LIMIT ?",
            (now, since, MAX_FILES),
        ).fetchall()
        return first_few(rows)

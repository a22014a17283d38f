"""Persistent storage of files, batches and line results.

Use it from one thread at a time. A line without a result still has to run. After a restart a line
may run twice; the first result is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from proxy.batches.storage.database import frees_room
from proxy.batches.storage.files import FileStore
from proxy.batches.storage.rows import (
    BATCH_COLUMNS,
    ListPage,
    batch_of,
    error_result,
    new_id,
    output_line,
    placeholders,
    row_of,
)
from proxy.batches.storage.schema import IS_ACTIVE, UNSAVED
from proxy.batches.types import (
    OUTPUT,
    Batch,
    File,
    InputLine,
    InputProblem,
    LineJob,
    LineResult,
    Status,
    TenantLimitError,
)

FETCH_BYTES = 1 << 20  # of line bodies, read in one operation
MAX_LINES = 1000  # deleted or ended in one transaction, so that other operations do not wait long
# Final statuses, with the error code and message of lines that did not run.
ENDS = {
    Status.COMPLETED: ("", ""),
    Status.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    Status.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was run."),
}


class Store(FileStore):
    def add_batch(self, batch: Batch) -> None:
        row = row_of(batch)
        with self.backend.writing():
            self._check_bytes(batch.tenant, 0)
            (active,) = self.backend.execute(
                f"SELECT count(*) FROM batches WHERE tenant = ? AND {IS_ACTIVE}",  # noqa: S608
                (batch.tenant,),
            ).fetchone()
            if active >= self.limits.active_per_tenant:
                raise TenantLimitError(
                    f"You have {active} active batches, which is the limit. Retry when a "
                    "batch has ended, or cancel a batch.",
                    later=True,
                )
            self.backend.insert("batches", BATCH_COLUMNS, [tuple(row.values())])

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        batches = self._batches("id = ? AND tenant = ?", (batch_id, tenant))
        return batches[0] if batches else None

    def batches(self, tenant: str, page: ListPage) -> list[Batch]:
        """Return a page of a tenant's batches, and one more batch if there are more."""
        rows = self._page("batches", BATCH_COLUMNS, "tenant = ?", [tenant], page)
        return [batch_of(row) for row in rows]

    @frees_room
    def cancel_batch(self, tenant: str, batch_id: str, now: float) -> Batch | None:
        """Set a running batch to `cancelling`; leave other statuses unchanged."""
        with self.backend.writing():
            batch = self.batch(tenant, batch_id)
            if batch is not None and batch.status in (Status.VALIDATING, Status.IN_PROGRESS):
                self._set_status(batch, Status.CANCELLING, now)
        return batch

    def active_batches(self) -> list[Batch]:
        return self._batches(f"{IS_ACTIVE} ORDER BY rowid")

    def _set_status(self, batch: Batch, status: Status, now: float) -> None:
        batch.status = status
        batch.at[status] = now
        row = row_of(batch)
        # `_save` maintains the counts.
        for name in ("id", "completed", "failed"):
            del row[name]
        changes = ", ".join(f'"{name}" = ?' for name in row)
        self.backend.execute(
            f"UPDATE batches SET {changes} WHERE id = ?",  # noqa: S608
            (*row.values(), batch.id),
        )

    # Lines

    def read_input(self, batch: Batch, at: int, size: int) -> bytes:
        return self._content(batch.input, at, size)

    def delete_lines(self, batch: Batch) -> bool:
        """Delete some of a batch's lines; return True if there are more."""
        with self.backend.writing():
            return self._delete_some_lines(batch)

    def _delete_some_lines(self, batch: Batch) -> bool:
        deleted = self.backend.execute(
            "DELETE FROM lines WHERE batch = ? AND number IN "
            "(SELECT number FROM lines WHERE batch = ? ORDER BY number LIMIT ?)",
            (batch.id, batch.id, MAX_LINES),
        )
        return deleted.rowcount >= MAX_LINES

    def add_lines(self, batch: Batch, lines: Iterable[InputLine]) -> None:
        with self.backend.writing():
            self.backend.insert(
                "lines",
                "batch, number, custom_id, model, start, size",
                [(batch.id, x.number, x.custom_id, x.model, x.start, x.size) for x in lines],
            )

    def start_batch(self, batch: Batch, total: int, now: float) -> bool:
        """Start a validated batch; return False if it was cancelled."""
        return self._end_validation(batch, Status.IN_PROGRESS, now, total=total)

    def refuse_batch(self, batch: Batch, problems: list[InputProblem], now: float) -> bool:
        """Fail a batch with an invalid input; return False if it was cancelled."""
        return self._end_validation(batch, Status.FAILED, now, problems=problems)

    def _end_validation(self, batch: Batch, status: Status, now: float, **changes: Any) -> bool:
        with self.backend.writing():
            batches = self._batches("id = ?", (batch.id,))
            if not batches or batches[0].status is not Status.VALIDATING:
                return False
            for name, value in changes.items():
                setattr(batches[0], name, value)
            self._set_status(batches[0], status, now)
        return True

    def next_jobs(self, batch: Batch, after: int, limit: int) -> list[LineJob]:
        """Return the next lines without a result, after line number `after`."""
        with self.backend.claiming():
            lines = self.backend.lines(batch.id, after, limit, FETCH_BYTES)
            places = [(start, size) for *_, start, size in lines]
            bodies = self.backend.contents(batch.input, places)
        return [
            LineJob(batch.id, number, custom_id, model, body)
            for (number, custom_id, model, *_), body in zip(lines, bodies, strict=True)
        ]

    def release_lines(self, batch: Batch, numbers: Sequence[int]) -> None:
        """Let other processes run these lines."""
        self.backend.release_lines(batch.id, numbers)

    def release_other_lines(self, kept: Collection[tuple[str, int]]) -> None:
        """Release claimed lines, except known ones."""
        for line in self.backend.claimed_lines():
            if line not in kept:
                self.backend.release_lines(line[0], line[1:])

    def save_results(self, results: Sequence[LineResult]) -> None:
        """Store results of active batches; a line's first result is kept."""
        with self.backend.writing():
            ids = list({result.batch for result in results})
            rows = self.backend.execute(
                f"SELECT id FROM batches WHERE id IN ({placeholders(ids)}) AND {IS_ACTIVE}",  # noqa: S608
                ids,
            )
            active = {batch_id for (batch_id,) in rows.fetchall()}
            self._save(result for result in results if result.batch in active)

    def _save(self, results: Iterable[LineResult]) -> None:
        rows = [(x.batch, x.number, int(x.ok), output_line(x)) for x in results]
        new = self.backend.insert_new("results", "batch, number, ok, content", rows)
        for (batch, ok), count in Counter((batch, ok) for batch, _, ok in new).items():
            column = "completed" if ok else "failed"
            self.backend.execute(
                f"UPDATE batches SET {column} = {column} + ? WHERE id = ?",  # noqa: S608
                (count, batch),
            )

    def is_complete(self, batch: Batch) -> bool:
        return any(x.completed + x.failed >= x.total for x in self._batches("id = ?", (batch.id,)))

    def fail_lines(self, batch: Batch, status: Status, after: int) -> int | None:
        """Store error results for some lines that did not run, after line number `after`.

        Returns the last number; None if there are no more.
        """
        code, message = ENDS[status]
        if not code:
            return None
        with self.backend.writing():
            left = self._lines_left(batch, after)
            self._save(error_result(job, code, message) for job in left)
        return left[-1].number if len(left) == MAX_LINES else None

    def end_batch(self, batch_id: str, status: Status, now: float) -> None:
        """End a batch whose lines are deleted, and create the output files."""
        with self.backend.writing():
            (batch,) = self._batches("id = ?", (batch_id,))
            batch.output = self._create_result_file(batch, now, ok=True)
            batch.error = self._create_result_file(batch, now, ok=False)
            if status is Status.COMPLETED:
                batch.at[Status.FINALIZING] = now
            self._set_status(batch, status, now)

    def _lines_left(self, batch: Batch, after: int) -> list[LineJob]:
        rows = self.backend.execute(
            "SELECT number, custom_id, model FROM lines AS l "  # noqa: S608
            f"WHERE batch = ? AND number > ? AND {UNSAVED} ORDER BY number LIMIT ?",
            (batch.id, after, MAX_LINES),
        )
        return [
            LineJob(batch.id, number, custom_id, model, b"")
            for number, custom_id, model in rows.fetchall()
        ]

    def _create_result_file(self, batch: Batch, now: float, *, ok: bool) -> str | None:
        (size,) = self.backend.execute(
            "SELECT sum(length(content) + 1) FROM results WHERE batch = ? AND ok = ?",
            (batch.id, int(ok)),
        ).fetchone()
        if not size:
            return None
        name = f"{batch.id}_{'output' if ok else 'error'}.jsonl"
        expires = now + self.keep_s
        file = File(
            new_id("file-"), batch.tenant, name, OUTPUT, now, expires, size, batch.id, ok
        )  # fmt: skip
        self._insert_file(file)
        return file.id

    @frees_room
    def purge(self, now: float) -> bool:
        """Delete some expired data, or return free pages to the disk.

        Returns True if there is more.
        """
        since = now - self.keep_s
        with self.backend.writing():
            over = self._batches(f"NOT {IS_ACTIVE} AND expires < ? LIMIT 1", (since,))
            if over:
                self._delete_part_of(over[0])
                return True
            if files := self._expired_files(now, since):
                self.backend.execute(
                    f"DELETE FROM files WHERE id IN ({placeholders(files)})",  # noqa: S608
                    files,
                )
                return True
        return self.shrink()

    def _delete_part_of(self, batch: Batch) -> None:
        if self._delete_some_lines(batch):
            return
        numbers, more = self._first_results("batch = ?", (batch.id,))
        if numbers:
            self.backend.execute(
                "DELETE FROM results WHERE batch = ? AND number <= ?", (batch.id, numbers[-1])
            )
        if not more:
            self.backend.execute("DELETE FROM batches WHERE id = ?", (batch.id,))

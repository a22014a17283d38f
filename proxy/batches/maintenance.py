"""Long store operations in slices: validating a new batch's input, and ending a batch.

Each scheduler turn runs one slice of one batch, tenants in turn, so that large batches do not block
others. Each tenant has at most one input in validation, because its state is in memory. A failed
slice restarts the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from itertools import count

from proxy.batches.storage.store import Store
from proxy.batches.storage.store_thread import StoreThread
from proxy.batches.types import INPUT, Batch, DiskError, InputProblem, Status
from proxy.batches.validate import InputFileCheck

Wall = Callable[[], float]
Slices = Generator[None, None, str]  # returns a summary for the log
Work = Callable[["Store"], Slices]


@dataclass(slots=True, eq=False)
class BatchMaintenance:
    batch: Batch
    work: Work
    ends: bool
    slices: Slices | None = None  # None before the first slice


class Maintenance:
    def __init__(self, store: StoreThread) -> None:
        self._store = store
        self._operations: dict[str, BatchMaintenance] = {}  # by batch id, in order of arrival
        self._turns: dict[str, int] = {}  # sequence number of each tenant's last turn
        self._numbers = count(1)
        self._session = 0

    def __contains__(self, batch_id: str) -> bool:
        return batch_id in self._operations

    def is_ending(self, batch_id: str) -> bool:
        return batch_id in self._operations and self._operations[batch_id].ends

    def add(self, batch: Batch, work: Work, *, ends: bool = False) -> None:
        """Schedule an operation; it replaces the batch's previous operation."""
        self._operations[batch.id] = BatchMaintenance(batch, work, ends)

    def begin(self, session: int) -> None:
        """Forget all operations: another process may have led before this session."""
        self._session = session
        self._operations.clear()

    def clear(self) -> None:
        self._operations.clear()

    def next_operation(self, full: Collection[str]) -> BatchMaintenance | None:
        """Return the next operation, or None.

        New validations are skipped for tenants without storage left (`full`).
        """
        able = [
            operation
            for operation in self._operations.values()
            if operation.ends or operation.slices is not None or operation.batch.tenant not in full
        ]
        return min(able, key=self._order, default=None)

    def _order(self, operation: BatchMaintenance) -> tuple[int, bool, bool]:
        turn = self._turns.get(operation.batch.tenant, 0)
        return turn, not operation.ends, operation.slices is None

    async def run_next_slice(self, full: Collection[str]) -> str | None:
        """Run one slice of the next operation; return a log message when it completes.

        Raises `DiskError` if another process may have led since the session began.
        """
        if (operation := self.next_operation(full)) is None:
            return None
        batch = operation.batch
        self._turns[batch.tenant] = next(self._numbers)
        try:
            summary = await self._store(run_slice, operation, self._session)
        except BaseException:
            self._operations.pop(batch.id, None)
            raise
        if summary is None:
            return None
        self._operations.pop(batch.id, None)
        return f"batch {batch.id}: {summary}"


def run_slice(store: Store, operation: BatchMaintenance, session: int) -> str | None:
    """Run one slice; return the summary after the last."""
    if not store.backend.has_led_since(session):
        raise DiskError("the connection to the database was lost")
    if operation.slices is None:
        operation.slices = operation.work(store)
    try:
        next(operation.slices)
    except StopIteration as over:
        return str(over.value)
    return None


def validate_input(store: Store, batch: Batch, max_lines: int, wall: Wall) -> Slices:
    """Validate a batch's input, then start or refuse the batch."""
    yield from delete_all_lines(store, batch)  # left by an interrupted validation
    file = store.file(batch.tenant, batch.input)
    is_there = file is not None and file.purpose == INPUT
    check = InputFileCheck(file.bytes if file else 0, batch.endpoint, max_lines)
    while is_there:
        piece = store.read_input(batch, *check.next_slice)
        store.add_lines(batch, check.validate(piece))
        is_there = bool(piece)
        if check.is_done:
            break
        yield
    problems = check.problems
    if not is_there:
        problems = [
            InputProblem("file_not_found", f"The input file {batch.input} no longer exists.")
        ]
    if problems:
        yield from delete_all_lines(store, batch)
        store.refuse_batch(batch, problems, wall())
        return f"input refused: {len(problems)} errors"
    store.start_batch(batch, check.total, wall())
    return f"started: {check.total} lines"


def end_batch(store: Store, batch: Batch, status: Status, wall: Wall) -> Slices:
    last = store.fail_lines(batch, status, 0)
    while last is not None:
        yield
        last = store.fail_lines(batch, status, last)
    yield from delete_all_lines(store, batch)
    store.end_batch(batch.id, status, wall())
    return status


def delete_all_lines(store: Store, batch: Batch) -> Generator[None, None, None]:
    while store.delete_lines(batch):
        yield

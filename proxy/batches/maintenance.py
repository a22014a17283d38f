"""What takes the store long, done a slice at a time: reading a new batch's input, and ending one.

A turn of the lane has one slice of one batch's, the tenants in turn: however large one's batches
are, another's lines go on in between, and its new batches wait for a slice of each tenant's at most
before each of their own. Of one tenant only one input is under way, for what is known of its lines
lies in memory. A slice that failed has its batch begun anew, as after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from proxy.batches.types import INPUT, Batch, InputProblem, Status
from proxy.batches.validate import InputFileCheck

if TYPE_CHECKING:
    from proxy.batches.storage.store import Store
    from proxy.batches.storage.store_thread import StoreThread

Wall = Callable[[], float]
Slices = Generator[None, None, str]  # says in the end what came of it
Work = Callable[["Store"], Slices]


@dataclass(slots=True, eq=False)
class BatchMaintenance:
    """One batch's."""

    batch: Batch
    work: Work
    ends: bool
    slices: Slices | None = None  # once it was begun


class Maintenance:
    """All there are."""

    def __init__(self, keeper: StoreThread) -> None:
        self._keep = keeper
        self._of: dict[str, BatchMaintenance] = {}  # by batch, the oldest first
        self._turns: dict[str, int] = {}  # when each tenant had one last
        self._numbers = count(1)

    def __contains__(self, batch_id: str) -> bool:
        """Whether there is one of that batch."""
        return batch_id in self._of

    def ends(self, batch_id: str) -> bool:
        """Whether a batch is being ended."""
        return batch_id in self._of and self._of[batch_id].ends

    def add(self, batch: Batch, work: Work, *, ends: bool = False) -> None:
        """Have it done, in place of any other of that batch."""
        self._of[batch.id] = BatchMaintenance(batch, work, ends)

    def clear(self) -> None:
        """Have nothing done any more."""
        self._of.clear()

    def waiting(self, full: Collection[str]) -> BatchMaintenance | None:
        """Name the next; none is begun of an input whose tenant has no room for more."""
        able = [
            chore
            for chore in self._of.values()
            if chore.ends or chore.slices is not None or chore.batch.tenant not in full
        ]
        return min(able, key=self._order, default=None)

    def _order(self, chore: BatchMaintenance) -> tuple[int, bool, bool]:
        turn = self._turns.get(chore.batch.tenant, 0)
        return turn, not chore.ends, chore.slices is None

    async def turn(self, full: Collection[str]) -> str | None:
        """Do a slice of the next; returns what there is to say of one that is done by it."""
        if (chore := self.waiting(full)) is None:
            return None
        batch = chore.batch
        self._turns[batch.tenant] = next(self._numbers)
        try:
            said = await self._keep(some_of, chore)
        except BaseException:
            self._of.pop(batch.id, None)
            raise
        if said is None:
            return None
        self._of.pop(batch.id, None)
        return f"batch {batch.id}: {said}"


def some_of(store: Store, chore: BatchMaintenance) -> str | None:
    """Do a slice, and say what came of it all if it was the last."""
    if chore.slices is None:
        chore.slices = chore.work(store)
    try:
        next(chore.slices)
    except StopIteration as over:
        return str(over.value)
    return None


def take_in(store: Store, batch: Batch, max_lines: int, wall: Wall) -> Slices:
    """Read a batch's input, and take it on or refuse it."""
    yield from forget_lines(store, batch)  # that were read before
    file = store.file(batch.tenant, batch.input)
    is_there = file is not None and file.purpose == INPUT
    checking = InputFileCheck(file.bytes if file else 0, batch.endpoint, max_lines)
    while is_there:
        piece = store.input(batch, *checking.wanted)
        store.add_lines(batch, checking.take(piece))
        is_there = bool(piece)
        if checking.over:
            break
        yield
    complaints = checking.complaints
    if not is_there:
        complaints = [InputProblem("file_not_found", f"The input file {batch.input} is gone.")]
    if complaints:
        yield from forget_lines(store, batch)
        store.refuse(batch, complaints, wall())
        return f"{len(complaints)} mistakes in its input"
    store.begin(batch, checking.total, wall())
    return f"{checking.total} lines"


def close(store: Store, batch: Batch, status: Status, wall: Wall) -> Slices:
    """End a batch."""
    last = store.give_up(batch, status, 0)
    while last is not None:
        yield
        last = store.give_up(batch, status, last)
    yield from forget_lines(store, batch)
    store.end(batch.id, status, wall())
    return status


def forget_lines(store: Store, batch: Batch) -> Generator[None, None, None]:
    """Have a batch's lines kept no longer."""
    while store.forget_lines(batch):
        yield

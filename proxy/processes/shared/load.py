"""One process's charges and breakers told to the others, and theirs taken into its fleet.

What has changed is written at the end of the loop's turn, once however often it changed; what
others wrote is read before a decision, unless that was done two milliseconds ago.

That is too late for a worker that takes only so many requests: of a burst each process reads a part
in one turn, and would place it as if it were alone. There each says how many it has as it places
one more, and reads how many the others have once it has chosen: who finds no room chooses anew. So
a limit may be overrun by one request of each other process, that it decides on at that very moment.
What ends is told with the rest: to hear late of room that is free does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import add
from typing import TYPE_CHECKING, Protocol

from proxy.core.fleet.remote_load import own_numbers
from proxy.core.fleet.worker import NO_LIMIT
from proxy.core.fleet.worker_load import NO_LOAD, WorkerLoad
from proxy.processes.shared.shared_memory import BREAKS, MOST_WORKERS, ProcessSheet, SharedTable

if TYPE_CHECKING:
    from proxy.core.fleet.breaker import BreakerSnapshot
    from proxy.core.fleet.charges import Fleet
    from proxy.core.fleet.worker import Worker

LOOK_S = 0.002
SURE_S = 2.0  # after which all rows are read, whatever was told
# A row is given to another worker when nobody can have missed that the last one is gone.
REST_S = 60.0
NEW: BreakerSnapshot = (True, False, 0.0, 0, 0, 0.0, "")


class LoadPeer:
    """Another process, as far as it was read."""

    def __init__(self, sheet: ProcessSheet) -> None:
        self.sheet = sheet
        self.read = self.breaks = 0


class SharedPart(Protocol):
    """Something else that is shared."""

    def tell(self) -> None:
        """Write what has changed; called at the end of a turn in which anything has."""

    def take(self, now: float) -> None:
        """Read what the others have written; called at each look."""


class SharedLoad:
    """The `Others` of a fleet."""

    def __init__(
        self,
        table: SharedTable,
        process: int,
        fleet: Fleet,
        clock: Callable[[], float],
        soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self.process = process
        self.sheet = table.sheet(process)
        self.parts: list[SharedPart] = []
        self.changes = 0  # that were taken in: whoever waits may have better luck after one
        self.peers = [LoadPeer(table.sheet(i)) for i in range(table.processes) if i != process]
        self._fleet = fleet
        self._clock = clock
        self._soon = soon
        self._rows: dict[Worker, int] = {}
        self._workers: dict[int, Worker] = {}
        self._changed: set[Worker] = set()
        # as we know that they were told
        self._breakers: dict[Worker, tuple[float, BreakerSnapshot]] = {}
        self._taking = self._telling = False
        self._next = self._next_sure = 0.0

    # Who has which row

    def place(self, worker: Worker, row: int, since: float) -> None:
        """Have a worker told in a row that is its own since then, and take what others tell."""
        self._rows[worker] = row
        self._workers[row] = worker
        self._breakers[worker] = since, NEW  # what was said before that was said of another
        self.sheet.wipe(row)
        self._take([row], self._clock(), breakers=True)
        self.changed(worker)

    def row(self, worker: Worker) -> int | None:
        """Name the row of a worker."""
        return self._rows.get(worker)

    def worker(self, row: int) -> Worker | None:
        """Name the worker of a row."""
        return self._workers.get(row)

    def leave(self, worker: Worker) -> None:
        """Take nothing more of a worker that is gone; what is ours of it is told to its end."""
        row = self._rows.get(worker)
        if row is not None and self._workers.get(row) is worker:
            del self._workers[row]
        if not worker.requests:
            self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        self._rows.pop(worker, None)
        self._breakers.pop(worker, None)
        self._changed.discard(worker)

    def is_free(self, row: int) -> bool:
        """Whether nobody has anything charged in a row."""
        return not self.sheet.has(row) and not any(peer.sheet.has(row) for peer in self.peers)

    # Telling

    def changed(self, worker: Worker) -> None:
        """Tell the others of a worker at the end of this turn; of one request more at once."""
        if self._taking:
            return
        if worker.most != NO_LIMIT and (row := self._rows.get(worker)) is not None:
            own = worker.requests - worker.elsewhere.requests
            if own > self.sheet.read_requests(row):
                self.sheet.write_requests(row, own)
        self._changed.add(worker)
        self.speak()

    def speak(self) -> None:
        """Tell the others of whatever has changed at the end of this turn."""
        if not self._telling:
            self._telling = True
            self._soon(self.flush)

    def flush(self) -> None:
        """Tell them now."""
        changed, self._changed = self._changed, set()
        sheet = self.sheet
        self._telling = False
        for part in self.parts:
            part.tell()
        for worker in changed:
            row = self._rows.get(worker)
            if row is None:
                continue
            load = own_numbers(worker)
            sheet.write_load(row, load, worker.due_at)
            if not worker.breaker.spotless or self._breakers[worker][1] is not NEW:
                self._tell_breaker(worker, row)
            sheet.tell(row)
            if not load[0] and self._workers.get(row) is not worker:
                self._forget(worker)

    def _tell_breaker(self, worker: Worker, row: int) -> None:
        told = worker.breaker.told()
        if told != self._breakers[worker][1]:
            now = self._clock()
            self._breakers[worker] = now, told
            self.sheet.write_breaker(row, now, told)
            self.sheet.write_count(BREAKS, self.sheet.count(BREAKS) + 1)

    def tell_written(self) -> None:
        """Tell of tokens that streams have written: no decision waits for those."""
        for worker in self._rows:
            if worker.requests != worker.elsewhere.requests:
                self.changed(worker)

    # Taking

    def look(self, now: float) -> None:
        """Take what the others have told since the last look."""
        if now < self._next:
            return
        self._next = now + LOOK_S
        for part in self.parts:
            part.take(now)
        rows: set[int] = set()
        everything = breakers = now >= self._next_sure
        for peer in self.peers:
            sheet = peer.sheet
            if everything or sheet.changes != peer.read:
                peer.read, told = sheet.told(peer.read)
                if told is None:
                    everything = True
                else:
                    rows |= told
                if (breaks := sheet.count(BREAKS)) != peer.breaks:
                    peer.breaks = breaks
                    breakers = True
        if everything:
            self._next_sure = now + SURE_S
        if everything or breakers:  # seldom: which they are is not told
            self._take(list(self._workers), now, breakers=True)
        elif rows:
            self._take(rows, now)

    def have_filled(self, worker: Worker, now: float) -> bool:
        """Whether a worker has no room any more, by what others have placed since the last look."""
        if worker.most == NO_LIMIT or (row := self._rows.get(worker)) is None:
            return False
        requests = worker.requests - worker.elsewhere.requests
        for peer in self.peers:
            requests += peer.sheet.read_requests(row)
        if requests < worker.most:
            return False
        self._take([row], now)
        return worker.requests >= worker.most

    def _take(self, rows: Iterable[int], now: float, *, breakers: bool = False) -> None:
        self._taking = True
        try:
            for row in rows:
                worker = self._workers.get(row)
                if worker is not None:
                    self._take_load(worker, row, now)
                    if breakers:
                        self._take_breaker(worker, row)
        finally:
            self._taking = False

    def _take_load(self, worker: Worker, row: int, now: float) -> None:
        load, due_at = self.peers[0].sheet.read_load(row) if self.peers else (NO_LOAD, 0.0)
        for peer in self.peers[1:]:
            other, other_due_at = peer.sheet.read_load(row)
            load = tuple(map(add, load, other))
            if other_due_at > due_at:
                due_at = other_due_at
        if load != worker.elsewhere:
            self.changes += 1
            self._fleet.charged_elsewhere(worker, WorkerLoad._make(load), due_at, now)
        elif due_at > worker.due_at:
            worker.due_at = due_at

    def _take_breaker(self, worker: Worker, row: int) -> None:
        at, told = 0.0, NEW
        for peer in self.peers:
            said = peer.sheet.read_breaker(row)
            if said[0] > at:
                at, told = said
        if at > self._breakers[worker][0] and worker not in self._changed:
            self._breakers[worker] = at, told
            if told != worker.breaker.told():
                self.changes += 1
                self._fleet.judged_elsewhere(worker, told)


class WorkerRows:
    """Gives every worker a row; whoever leads has one of these."""

    def __init__(
        self, sharing: SharedLoad, clock: Callable[[], float], most: int = MOST_WORKERS
    ) -> None:
        self._sharing = sharing
        self._clock = clock
        self._most = most
        self._taken: dict[Worker, tuple[int, float]] = {}
        self._left: dict[int, float] = {}  # rows of workers that left, and when; the oldest first
        self._unused = 0

    def of(self, worker: Worker) -> tuple[int, float] | None:
        """Return a worker's row, and since when it is that; None if there is none left."""
        taken = self._taken.get(worker)
        if taken is None and (row := self._find()) is not None:
            taken = self._taken[worker] = row, self._clock()
        return taken

    def adopt(self, taken: Mapping[Worker, tuple[int, float]]) -> None:
        """Go on from what another leader has given."""
        self._taken = dict(taken)
        rows = {row for row, _ in taken.values()}
        self._unused = max(rows, default=-1) + 1
        now = self._clock()
        self._left = {row: now for row in range(self._unused) if row not in rows}

    def leave(self, worker: Worker) -> None:
        """Take back the row of a worker that is gone."""
        if (taken := self._taken.pop(worker, None)) is not None:
            self._left[taken[0]] = self._clock()

    def _find(self) -> int | None:
        if self._unused < self._most:
            self._unused += 1
            return self._unused - 1
        long_ago = self._clock() - REST_S
        for row, since in self._left.items():
            if since > long_ago:
                break
            if self._sharing.is_free(row):
                del self._left[row]
                return row
        return None

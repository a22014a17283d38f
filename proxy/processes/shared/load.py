"""Shares the charges and breakers of workers between processes.

Changes are written at the end of the loop's turn. Other processes' changes are read before a
decision, at most every 2 ms.

That is too late for a worker with a request limit. For such workers each process writes its count
as it places a request, reads the others' counts once it has chosen, and chooses again if the worker
is full. So at most one request per other process exceeds a limit.

A host's only process writes and reads when the supervisor does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import add
from typing import Protocol

from proxy.core.fleet.breaker import BreakerSnapshot
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.remote_load import own_load
from proxy.core.fleet.worker import NO_LIMIT, Worker
from proxy.core.fleet.worker_load import NO_LOAD, WorkerLoad
from proxy.processes.shared.process_sheet import (
    BREAKER_CHANGES,
    LARGE_PREFILLS,
    MAX_WORKERS,
    ProcessSheet,
)
from proxy.processes.shared.shared_memory import SETTLE_S, Peer, Peers, SharedTable
from proxy.processes.shared.urgent_changes import UrgentChanges
from proxy.processes.shared.worker_marks import WorkerMarks

READ_INTERVAL_S = 0.002
# Without other processes on this host, messages of others are read within this time.
REMOTE_INTERVAL_S = 0.008
FULL_READ_INTERVAL_S = 2.0  # interval of reading all rows, whether marked as changed or not
# Then every process has seen that the row's worker is gone.
ROW_REUSE_AFTER_S = 60.0
NEW_BREAKER = BreakerSnapshot()


class LoadPeer:
    """Another process, and how far its sheet is read."""

    def __init__(self, sheet: ProcessSheet) -> None:
        self.sheet = sheet
        self.changes_read = self.breaker_changes_read = 0


class SharedPart(Protocol):
    """Other state that is shared in the same turns."""

    def publish(self) -> None:
        """Write changes at the end of a turn."""

    def read_peers(self, now: float) -> None:
        """Read the other processes' changes."""


class SharedLoad:
    """Implements `RemoteLoad` of the core's fleet."""

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
        self.urgent: UrgentChanges | None = None  # for other hosts
        self.changes = 0  # changes applied; after a change queued requests may find capacity
        self.table = table
        self.peers = self.peers_of(LoadPeer)
        self._fleet = fleet
        self._clock = clock
        self._call_soon = soon
        self._rows: dict[Worker, int] = {}
        self._workers: dict[int, Worker] = {}
        self.marks = WorkerMarks()
        self._breakers: dict[Worker, tuple[float, BreakerSnapshot]] = {}  # last known shared state
        self._interval_s = READ_INTERVAL_S if self.peers.local else REMOTE_INTERVAL_S - SETTLE_S
        self._reading = self._scheduled = False
        self._next_read = self._next_full_read = 0.0
        self._reservation_changes = 0  # that were read

    def peers_of(self, make: Callable[[ProcessSheet], Peer]) -> Peers[Peer]:
        return Peers(self.table, self.process, make)

    # Rows

    def share_worker(self, worker: Worker, row: int, since: float) -> None:
        """Share a worker in a row that it owns since then; read the others' values."""
        self._rows[worker] = row
        self._workers[row] = worker
        self.marks.add(worker)
        self._breakers[worker] = since, NEW_BREAKER  # earlier values are another worker's
        self.sheet.wipe(row)
        self._read_rows([row], self._clock(), breakers=True)
        self._fleet.health.reserve(worker, self.table.reserved(row))
        self.publish_soon(worker)

    def row(self, worker: Worker) -> int | None:
        return self._rows.get(worker)

    def forget_worker(self, worker: Worker) -> None:
        """Stop reading a removed worker; its own charges are still written until they end."""
        row = self._rows.get(worker)
        if row is not None and self._workers.get(row) is worker:
            del self._workers[row]
        self.marks.remove(worker)
        if not worker.requests:
            self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        self._rows.pop(worker, None)
        self._breakers.pop(worker, None)
        self._fleet.roster.unpublished.discard(worker)

    def is_free(self, row: int) -> bool:
        """Return True if no process has charges in a row."""
        return not self.sheet.has_charges(row) and not any(
            peer.sheet.has_charges(row) for peer in self.peers
        )

    def publish_soon(self, worker: Worker) -> None:
        """Write a worker at the end of this turn; write an additional request at once."""
        if self._reading:
            return
        if worker.request_limit != NO_LIMIT and (row := self._rows.get(worker)) is not None:
            own = worker.requests - worker.remote_load.requests
            if own > self.sheet.read_requests(row):
                self.sheet.write_requests(row, own)
        self._fleet.roster.unpublished.add(worker)
        if not self._scheduled:
            self.schedule_flush()

    def schedule_flush(self, *, urgent: bool = False) -> None:
        if urgent and self.urgent is not None:
            self.urgent.unwritten = True
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self.flush)

    def has_urgent(self) -> bool:
        """Return whether other hosts should see a change that is not written yet at once."""
        urgent = self.urgent
        if urgent is None or urgent.unwritten or not self.table.awaits_urgent:
            return True
        if self._fleet.large_prefill_changes != self.sheet.count(LARGE_PREFILLS):
            return True
        for worker in self._fleet.roster.unpublished:
            if (row := self._rows.get(worker)) is None:
                continue
            requests = worker.requests - worker.remote_load.requests
            if urgent.is_urgent(worker, row, requests) or self._has_new_breaker(worker):
                return True
        return False

    def flush(self) -> None:
        roster, sheet = self._fleet.roster, self.sheet
        changed, roster.unpublished = roster.unpublished, set()
        self._scheduled = False
        for part in self.parts:
            part.publish()
        urgent = self.urgent
        for worker in changed:
            row = self._rows.get(worker)
            if row is None:
                continue
            load = own_load(worker)
            if urgent is not None:
                urgent.note_requests(worker, row, load.requests)
            sheet.write_load(row, load, worker.due_at)
            if self._has_new_breaker(worker):
                self._write_breaker(worker, row)
            sheet.mark_changed(row)
            if not load.requests and self._workers.get(row) is not worker:
                self._forget(worker)
        if (large_changes := self._fleet.large_prefill_changes) != sheet.count(LARGE_PREFILLS):
            sheet.write_count(LARGE_PREFILLS, large_changes)
        if urgent is not None:
            urgent.report()

    def _has_new_breaker(self, worker: Worker) -> bool:
        shared, breaker = self._breakers[worker][1], worker.breaker
        if breaker.has_no_failures and shared is NEW_BREAKER:
            return False
        return breaker.snapshot() != shared

    def _write_breaker(self, worker: Worker, row: int) -> None:
        now, snapshot = self._clock(), worker.breaker.snapshot()
        self._breakers[worker] = now, snapshot
        self.sheet.write_breaker(row, now, snapshot)
        self.sheet.write_count(BREAKER_CHANGES, self.sheet.count(BREAKER_CHANGES) + 1)

    def publish_rest(self) -> None:
        """Write generated tokens, and tenants that changed in a turn without a placement."""
        for part in self.parts:
            part.publish()
        for worker in self._rows:
            if worker.requests != worker.remote_load.requests:
                self.publish_soon(worker)

    def read_remote_charges(self, now: float) -> None:
        """Read the other processes' changes since the last look."""
        if now < self._next_read:
            return
        self._next_read = now + self._interval_s
        if not self.peers.may_have_news(now):
            return
        for part in self.parts:
            part.read_peers(now)
        rows: set[int] = set()
        read_all = breakers = now >= self._next_full_read
        for peer in self.peers:
            sheet = peer.sheet
            if read_all or sheet.changes != peer.changes_read:
                peer.changes_read, changed = sheet.changed_since(peer.changes_read)
                if changed is None:
                    read_all = True
                else:
                    rows |= changed
                if (breaker_changes := sheet.count(BREAKER_CHANGES)) != peer.breaker_changes_read:
                    peer.breaker_changes_read = breaker_changes
                    breakers = True
        if read_all:
            self._next_full_read = now + FULL_READ_INTERVAL_S
        if self.table.reservation_changes != self._reservation_changes:
            self._read_reservations()
        if read_all or breakers:  # rare; the ring does not name the breakers that changed
            self._read_rows(list(self._workers), now, breakers=True)
        elif rows:
            self._read_rows(rows, now)

    def is_filled_by_others(self, worker: Worker, now: float) -> bool:
        """Return True if other processes have filled the worker since the last look."""
        if (row := self._rows.get(worker)) is None:
            return False
        # The supervisor lowers this before other hosts learn that slots are free.
        self._fleet.health.reserve(worker, self.table.reserved(row))
        requests = worker.requests - worker.remote_load.requests
        for peer in self.peers:
            requests += peer.sheet.read_requests(row)
        if requests < worker.request_limit:
            return False
        self._read_rows([row], now)
        return worker.requests >= worker.request_limit

    def _read_reservations(self) -> None:
        self._reservation_changes = self.table.reservation_changes
        self.changes += 1
        for row, worker in self._workers.items():
            self._fleet.health.reserve(worker, self.table.reserved(row))

    def _read_rows(self, rows: Iterable[int], now: float, *, breakers: bool = False) -> None:
        self._reading = True
        try:
            for row in rows:
                worker = self._workers.get(row)
                if worker is not None:
                    self._read_load(worker, row, now)
                    if breakers:
                        self._read_breaker(worker, row)
        finally:
            self._reading = False

    def _read_load(self, worker: Worker, row: int, now: float) -> None:
        load: tuple[int, ...] = NO_LOAD
        due_at = 0.0
        for peer in self.peers:
            other, other_due_at = peer.sheet.read_load(row)
            load = tuple(map(add, load, other))
            if other_due_at > due_at:
                due_at = other_due_at
        if load != worker.remote_load:
            self.changes += 1
            self._fleet.health.apply_remote_load(worker, WorkerLoad._make(load), due_at, now)
        elif due_at > worker.due_at:
            worker.due_at = due_at

    def _read_breaker(self, worker: Worker, row: int) -> None:
        at, snapshot = 0.0, NEW_BREAKER
        for peer in self.peers:
            state = peer.sheet.read_breaker(row)
            if state[0] > at:
                at, snapshot = state
        if at > self._breakers[worker][0] and worker not in self._fleet.roster.unpublished:
            self._breakers[worker] = at, snapshot
            if snapshot != worker.breaker.snapshot():
                self.changes += 1
                self._fleet.health.take_breaker(worker, snapshot)


class WorkerRows:
    """Assigns rows to workers, in the leader."""

    def __init__(
        self, shared_load: SharedLoad, clock: Callable[[], float], max_rows: int = MAX_WORKERS
    ) -> None:
        self._shared_load = shared_load
        self._clock = clock
        self._max_rows = max_rows
        # Rows of removed workers with the time of removal, oldest first.
        self._left: dict[int, float] = {}
        self._unused = 0

    def adopt(self, rows: Collection[int]) -> None:
        """Continue with the rows that another leader assigned."""
        self._unused = max(rows, default=-1) + 1
        now = self._clock()
        self._left = {row: now for row in range(self._unused) if row not in rows}

    def release(self, row: int) -> None:
        self._left[row] = self._clock()

    def take(self) -> int | None:
        """Return a row for a worker; None if none is left."""
        if self._unused < self._max_rows:
            self._unused += 1
            return self._unused - 1
        reusable_before = self._clock() - ROW_REUSE_AFTER_S
        for row, since in self._left.items():
            if since > reusable_before:
                break
            if self._shared_load.is_free(row):
                del self._left[row]
                return row
        return None

"""Memory that all router processes of a host share.

Each process writes its own sheet and reads the others' sheets. The sheets after them are copies of
sheets on other hosts, which the supervisor writes (`replicas`). All write tenants' limit counters,
where a lost update does little harm. A number is eight aligned bytes, so a store is atomic and
needs no lock. Several numbers may be from different moments, so they are trusted only until the
next read.

Rings contain the numbers of changed rows, so that reading costs as much as has changed. A process
that misses a whole round reads all rows. Every process also does so now and then, because a
reordered store can hide a change.

The memory is an unlinked file and disappears with the last process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from enum import Enum
from struct import Struct, pack, unpack_from
from typing import Generic, NamedTuple, TypeVar

from proxy.core.fleet.breaker import BreakerSnapshot
from proxy.core.queue.buckets import LastDispatch
from proxy.core.tenants.tenants import Rank
from proxy.wire.worker.connection import WorkerError

WORD = 8
MAX_WORKERS = 1024  # rows, one per worker
MAX_TENANTS = 1024
PLACES = 64  # models and sizes are hashed into this many places
RING = 1024  # numbers of changed rows
LOG = 8192  # words of the prefix log
MAX_REMOTE = 64  # sheets for processes of other hosts

HEAD_WORDS, ROW_WORDS, FRONT_WORDS, LAST_WORDS, TRAFFIC_WORDS, TENANT_WORDS = 16, 17, 4, 4, 4, 11
CLASSES = len(Rank)
ROW_BYTES = ROW_WORDS * WORD
AT_RING = HEAD_WORDS
AT_TENANT_RING = AT_RING + RING
AT_ROWS = AT_TENANT_RING + RING
AT_FRONTS = AT_ROWS + MAX_WORKERS * ROW_WORDS
AT_LASTS = AT_FRONTS + PLACES * CLASSES * FRONT_WORDS
AT_TRAFFIC = AT_LASTS + PLACES * LAST_WORDS
AT_TENANTS = AT_TRAFFIC + PLACES * TRAFFIC_WORDS
AT_LOG = AT_TENANTS + MAX_TENANTS * TENANT_WORDS
SHEET_WORDS = AT_LOG + LOG
# Words in the head.
CHANGES, WAITING, BYTES, TOKENS, LIFE, TENANT_CHANGES, BREAKS, LOGGED, ALIVE = range(9)
RINGS = {CHANGES: AT_RING, TENANT_CHANGES: AT_TENANT_RING}  # by the word that counts their changes
FLOORS = 9  # and the next two words: each class's position when its last request left
# After all sheets, written by all processes: each tenant row's mark, and the use of its limits.
CELL_WORDS = 2
# Then written by the supervisor: the number of remote sheets in use, the number of changes of
# reservations, the number of hosts, and for each worker the slots reserved for other hosts.
AT_REMOTE = MAX_TENANTS * (1 + CELL_WORDS)
AT_RESERVATIONS, AT_HOSTS, AT_RESERVED = AT_REMOTE + 1, AT_REMOTE + 2, AT_REMOTE + 3
COMMON_WORDS = AT_RESERVED + MAX_WORKERS

LOAD = Struct("@10qd")
BREAKER = Struct("@dqdqqd")
AT_BREAKER = LOAD.size
FRONT, LAST, TRAFFIC = Struct("@qddd"), Struct("@dqq"), Struct("@qqd")
TENANT, FLOOR = Struct("@qq9d"), Struct("@3d")
# Each of these takes as much.
PLACE_BYTES, FRONTS = FRONT_WORDS * WORD, PLACES * CLASSES
NO_PLACES = bytes((FRONTS + 2 * PLACES) * PLACE_BYTES)
CHUNK_BYTES = 16 * PLACE_BYTES  # compared first
IDLE = Struct("@qq")  # the first two numbers of a tenant's row


Peer = TypeVar("Peer")


class QueueFront(NamedTuple):
    """The first request of a class that waits for a model and size."""

    waits: int = 0  # 0 if no request waits
    virtual: float = 0.0
    since: float = 0.0
    oldest: float = 0.0  # arrival of the oldest request of the class


class TrafficRow(NamedTuple):
    """A model's traffic since the start."""

    shorts: int = 0
    longs: int = 0
    long_s: float = 0.0  # prefill time of long requests


class TenantRow(NamedTuple):
    """A tenant's use in one process."""

    running: int = 0
    waits: int = 0  # one bit per class
    # By class. A dead process's successor continues from these.
    settled: tuple[float, float, float] = (0.0, 0.0, 0.0)  # charged since the start
    lifts: tuple[float, float, float] = (0.0, 0.0, 0.0)
    unsettled: tuple[float, float, float] = (0.0, 0.0, 0.0)  # estimates of requests in flight


class PlaceKind(Enum):
    """What is written by model and size."""

    FRONT, LAST, TRAFFIC = range(3)


def changed_places(before: bytes, now: bytes) -> Iterator[tuple[PlaceKind, int]]:
    """Return what differs between two results of `ProcessSheet.places`."""
    for chunk in range(0, len(now), CHUNK_BYTES):
        if before[chunk : chunk + CHUNK_BYTES] == now[chunk : chunk + CHUNK_BYTES]:
            continue
        for at in range(chunk, min(chunk + CHUNK_BYTES, len(now)), PLACE_BYTES):
            if before[at : at + PLACE_BYTES] != now[at : at + PLACE_BYTES]:
                index = at // PLACE_BYTES
                if index < FRONTS:
                    yield PlaceKind.FRONT, index
                else:
                    kind, place = divmod(index - FRONTS, PLACES)
                    yield (PlaceKind.TRAFFIC if kind else PlaceKind.LAST), place


class SharedTable:
    """The shared memory."""

    def __init__(self, fd: int, processes: int) -> None:
        self.fd = fd
        self.processes = processes
        self.sheets = (os.fstat(fd).st_size // WORD - COMMON_WORDS) // SHEET_WORDS
        self._given: list[memoryview[float]] = []
        self._marks = b""
        self._rows_of_marks: dict[int, int] = {}
        self._common = self.sheets * SHEET_WORDS * WORD
        self.memory = mmap.mmap(fd, self._common + COMMON_WORDS * WORD)

    @classmethod
    def make(cls, processes: int, remote: int = 0) -> SharedTable:
        """Create the memory; its file descriptor is passed to the processes.

        `remote`: the number of sheets for processes of other hosts.
        """
        fd = os.memfd_create("router-processes")
        os.ftruncate(fd, ((processes + remote) * SHEET_WORDS + COMMON_WORDS) * WORD)
        return cls(fd, processes)

    @property
    def remote_in_use(self) -> int:
        """The number of remote sheets that have been used."""
        return self._common_count(AT_REMOTE)

    def use_remote(self, count: int) -> None:
        """Have all processes read this many remote sheets from now on."""
        self._write_common(AT_REMOTE, count)

    @property
    def hosts(self) -> int:
        """The number of hosts that serve the fleet, as last known."""
        return max(self._common_count(AT_HOSTS), 1)

    def write_hosts(self, count: int) -> None:
        self._write_common(AT_HOSTS, count)

    @property
    def reservation_changes(self) -> int:
        return self._common_count(AT_RESERVATIONS)

    def reserve(self, row: int, slots: int) -> None:
        """Reserve a worker's slots for other hosts."""
        if slots != self.reserved(row):
            self._write_common(AT_RESERVED + row, slots)
            self._write_common(AT_RESERVATIONS, self.reservation_changes + 1)

    def reserved(self, row: int) -> int:
        return self._common_count(AT_RESERVED + row)

    def _write_common(self, at: int, value: int) -> None:
        _store(self.memory, self._common + at * WORD, ONE_COUNT.pack(value))

    def _common_count(self, at: int) -> int:
        value: int = ONE_COUNT.unpack_from(self.memory, self._common + at * WORD)[0]
        return value

    def sheet(self, process: int) -> ProcessSheet:
        return ProcessSheet(self.memory, process)

    def clear(self, process: int) -> None:
        """Clear the charges of a process that died.

        Tenants' charges stay, because tenants are compared by them. They are not even rewritten:
        others may read them at any moment.
        """
        sheet = self.sheet(process)
        changes = {ring: sheet.count(ring) for ring in RINGS}
        start = process * SHEET_WORDS
        for first, end in ((0, AT_TENANTS), (AT_LOG, SHEET_WORDS)):
            size = (end - first) * WORD
            place = (start + first) * WORD
            self.memory[place : place + size] = bytes(size)
        for row in range(MAX_TENANTS):
            sheet.write_idle(row)
        for ring, before in changes.items():
            sheet.write_count(ring, before + RING + 1)  # makes every reader read all rows

    def tenant_row(self, mark: int) -> int | None:
        """Return the row of a tenant, given a unique non-zero number; None if no row is left.

        All processes create the same rows in the same order.
        """
        for row in ((mark + i) % MAX_TENANTS for i in range(MAX_TENANTS)):
            place = self._common + row * WORD
            there = ONE_COUNT.unpack_from(self.memory, place)[0]
            if not there:
                _store(self.memory, place, ONE_COUNT.pack(mark))
            if there in (0, mark):
                return row
        return None

    def tenant_marks(self) -> dict[int, int]:
        """Return the marks of all tenants by row."""
        marks = self.memory[self._common : self._common + MAX_TENANTS * WORD]
        if marks != self._marks:
            self._marks = marks
            numbers = unpack_from(f"@{MAX_TENANTS}q", marks)
            self._rows_of_marks = {row: mark for row, mark in enumerate(numbers) if mark}
        return self._rows_of_marks

    def tenant_cells(self, row: int) -> memoryview[float]:
        """Return the numbers of a tenant that all processes write."""
        start = self._common + (MAX_TENANTS + row * CELL_WORDS) * WORD
        cells = memoryview(self.memory)[start : start + CELL_WORDS * WORD].cast("d")
        self._given.append(cells)
        return cells

    def close(self) -> None:
        for cells in self._given:
            cells.release()
        self.memory.close()
        os.close(self.fd)


class Peers(Generic[Peer]):
    """What a process keeps for each other process: first those of this host."""

    def __init__(
        self, table: SharedTable, process: int, make: Callable[[ProcessSheet], Peer]
    ) -> None:
        self._table = table
        self._all = [make(table.sheet(i)) for i in range(table.sheets) if i != process]
        self.local = self._all[: table.processes - 1]

    def __iter__(self) -> Iterator[Peer]:
        remote = self._table.remote_in_use
        return iter(self._all[: len(self.local) + remote] if remote else self.local)


class ProcessSheet:
    """One process's part of the memory."""

    def __init__(self, memory: mmap.mmap, process: int) -> None:
        self._memory = memory
        self._start = process * SHEET_WORDS * WORD
        self._rows = self._start + AT_ROWS * WORD
        self._fronts = self._start + AT_FRONTS * WORD
        self._lasts = self._start + AT_LASTS * WORD
        self._traffic = self._start + AT_TRAFFIC * WORD
        self._tenants = self._start + AT_TENANTS * WORD
        self._log = self._start + AT_LOG * WORD

    def write_load(self, row: int, load: tuple[int, ...], due_at: float) -> None:
        _store(self._memory, self._rows + row * ROW_BYTES, LOAD.pack(*load, due_at))

    def read_load(self, row: int) -> tuple[tuple[int, ...], float]:
        values = LOAD.unpack_from(self._memory, self._rows + row * ROW_BYTES)
        return values[:-1], values[-1]

    def write_requests(self, row: int, requests: int) -> None:
        """Write the first number of a worker's charges."""
        _store(self._memory, self._rows + row * ROW_BYTES, ONE_COUNT.pack(requests))

    def read_requests(self, row: int) -> int:
        requests: int = ONE_COUNT.unpack_from(self._memory, self._rows + row * ROW_BYTES)[0]
        return requests

    def write_breaker(self, row: int, at: float, snapshot: BreakerSnapshot) -> None:
        """Write a breaker's state and its time."""
        closed, busy, until, failures, openings, tried_at, why = snapshot
        flags = closed | busy << 1 | _number_of(why) << 2
        place = self._rows + row * ROW_BYTES + AT_BREAKER
        # The time is written last, so that an old state is never read with a new time.
        _store(self._memory, place, BREAKER.pack(0.0, flags, until, failures, openings, tried_at))
        _store(self._memory, place, ONE_TIME.pack(at))

    def read_breaker(self, row: int) -> tuple[float, BreakerSnapshot]:
        """Read a breaker's state; the time is 0 if none was written."""
        place = self._rows + row * ROW_BYTES + AT_BREAKER
        at, flags, until, failures, openings, tried_at = BREAKER.unpack_from(self._memory, place)
        closed, busy = bool(flags & 1), bool(flags & 2)
        return at, (closed, busy, until, failures, openings, tried_at, _why(flags >> 2))

    def has(self, row: int) -> bool:
        """Return True if a worker has charges."""
        return any(self.read_load(row)[0][:-1])  # generated tokens, the last number, only grow

    def wipe(self, row: int) -> None:
        """Clear a row for another worker."""
        start = self._rows + row * ROW_BYTES
        self._memory[start : start + ROW_BYTES] = bytes(ROW_BYTES)

    @property
    def changes(self) -> int:
        """The number of changes since the start."""
        return self.count(CHANGES)

    def mark_changed(self, row: int, ring: int = CHANGES) -> None:
        """Add a row to a ring of changes, after the row was written."""
        memory, start = self._memory, self._start
        changes = ONE_COUNT.unpack_from(memory, start + ring * WORD)[0]
        _store(memory, start + (RINGS[ring] + changes % RING) * WORD, ONE_COUNT.pack(row))
        _store(memory, start + ring * WORD, ONE_COUNT.pack(changes + 1))

    def changed_since(self, since: int, ring: int = CHANGES) -> tuple[int, set[int] | None]:
        """Return the number of changes, and the rows changed since the last reading.

        The rows are None if all rows may have changed.
        """
        now = self.count(ring)
        if now - since > RING:
            return now, None
        start = self._start + RINGS[ring] * WORD
        rows = {
            ONE_COUNT.unpack_from(self._memory, start + index % RING * WORD)[0]
            for index in range(since, now)
        }
        # Entries that were overwritten during the loop are invalid.
        return (now, rows) if self.count(ring) - since <= RING else (now, None)

    def write_count(self, which: int, value: int) -> None:
        _store(self._memory, self._start + which * WORD, ONE_COUNT.pack(value))

    def count(self, which: int) -> int:
        """Read a number of the head."""
        value: int = ONE_COUNT.unpack_from(self._memory, self._start + which * WORD)[0]
        return value

    def write_front(self, place: int, rank: int, front: QueueFront) -> None:
        at = place * CLASSES + rank
        _store(self._memory, self._fronts + at * FRONT_WORDS * WORD, FRONT.pack(*front))

    def read_front(self, place: int, rank: int) -> QueueFront:
        at = place * CLASSES + rank
        return QueueFront(*FRONT.unpack_from(self._memory, self._fronts + at * FRONT_WORDS * WORD))

    def write_last(self, place: int, last: LastDispatch) -> None:
        _store(self._memory, self._lasts + place * LAST_WORDS * WORD, LAST.pack(*last))

    def read_last(self, place: int) -> LastDispatch:
        at, passed, passer = LAST.unpack_from(self._memory, self._lasts + place * LAST_WORDS * WORD)
        return LastDispatch(at, bool(passed), passer)

    def write_traffic(self, place: int, traffic: TrafficRow) -> None:
        _store(self._memory, self._traffic + place * TRAFFIC_WORDS * WORD, TRAFFIC.pack(*traffic))

    def read_traffic(self, place: int) -> TrafficRow:
        return TrafficRow(
            *TRAFFIC.unpack_from(self._memory, self._traffic + place * TRAFFIC_WORDS * WORD)
        )

    def write_usage(self, row: int, usage: TenantRow) -> None:
        place = self._tenants + row * TENANT_WORDS * WORD
        running, waits, settled, lifts, unsettled = usage
        packed = TENANT.pack(running, waits, *settled, *lifts, *unsettled)
        _store(self._memory, place, packed)

    def read_usage(self, row: int) -> TenantRow:
        place = self._tenants + row * TENANT_WORDS * WORD
        running, waits, *served = TENANT.unpack_from(self._memory, place)
        a, b, c, d, e, f, g, h, i = served
        return TenantRow(running, waits, (a, b, c), (d, e, f), (g, h, i))

    def write_running(self, row: int, running: int) -> None:
        place = self._tenants + row * TENANT_WORDS * WORD
        _store(self._memory, place, ONE_COUNT.pack(running))

    def read_running(self, row: int) -> int:
        place = self._tenants + row * TENANT_WORDS * WORD
        running: int = ONE_COUNT.unpack_from(self._memory, place)[0]
        return running

    def write_idle(self, row: int) -> None:
        """Write that a tenant has no requests here; keep its charges."""
        place = self._tenants + row * TENANT_WORDS * WORD
        _store(self._memory, place, IDLE.pack(0, 0))

    def write_floors(self, floors: tuple[float, ...]) -> None:
        _store(self._memory, self._start + FLOORS * WORD, FLOOR.pack(*floors))

    def read_floors(self) -> tuple[float, ...]:
        return FLOOR.unpack_from(self._memory, self._start + FLOORS * WORD)

    def write_log(self, row: int, hashes: tuple[int, ...]) -> None:
        """Log the block hashes of a prompt prefix that a worker got."""
        length, logged = len(hashes), self.count(LOGGED)
        at = logged % LOG
        if at + 1 + length > LOG:  # records are contiguous; the rest of the log stays empty
            _store(self._memory, self._log + at * WORD, MARK.pack(0))
            logged, at = logged + LOG - at, 0
        mark = (row + 1) << LENGTH_BITS | length
        _store(self._memory, self._log + at * WORD, pack(f"@{length + 1}Q", mark, *hashes))
        self.write_count(LOGGED, logged + 1 + length)

    def places(self) -> bytes:
        """Return all that is written by model and size, to see whether it has changed."""
        return self._memory[self._fronts : self._tenants]

    def read_log(self, since: int) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
        """Return the new position and the entries since the last one.

        Overwritten entries are lost.
        """
        now = self.count(LOGGED)
        found: list[tuple[int, tuple[int, ...]]] = []
        reached = since
        while reached < now and now - since <= LOG:
            at = reached % LOG
            mark = MARK.unpack_from(self._memory, self._log + at * WORD)[0]
            length = mark & LENGTH_MASK
            if not mark or at + 1 + length > LOG:
                reached += LOG - at
                continue
            hashes = unpack_from(f"@{length}Q", self._memory, self._log + (at + 1) * WORD)
            found.append(((mark >> LENGTH_BITS) - 1, hashes))
            reached += 1 + length
        # Entries that were overwritten during the loop are invalid.
        return (now, found) if self.count(LOGGED) - since <= LOG else (now, [])


def _number_of(why: str) -> int:
    """Encode why a breaker opened, a status or a WorkerError, as a number; 0 is unknown."""
    if why.isdecimal():
        return int(why) + len(WORKER_ERRORS)
    return WORKER_ERRORS.index(why) if why in WORKER_ERRORS else 0


def _why(number: int) -> str:
    return (
        WORKER_ERRORS[number] if number < len(WORKER_ERRORS) else str(number - len(WORKER_ERRORS))
    )


def _store(memory: mmap.mmap, place: int, numbers: bytes) -> None:
    # `pack_into` writes zeros first, which other processes could read.
    memory[place : place + len(numbers)] = numbers


ONE_COUNT, ONE_TIME, MARK = Struct("@q"), Struct("@d"), Struct("@Q")
WORKER_ERRORS = ("", *(error.value for error in WorkerError))
LENGTH_BITS = 8
LENGTH_MASK = (1 << LENGTH_BITS) - 1

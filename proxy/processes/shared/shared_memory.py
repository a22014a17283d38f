"""What the processes of a router tell each other without asking: a piece of memory they all see.

Each process has a sheet of its own in it, and writes nowhere else but to what tenants have taken of
their limits, where a lost update does little; the others read. A number is
eight bytes in their place, so a store is whole or not there, and nobody ever waits for a lock. What
is read of several numbers may be of two moments: none is believed for longer than until the next
look.

Of the workers' rows and the tenants' those that have changed are told in rings of row numbers, so
that to look is worth what has happened and not what there is. Who has missed a round of one reads
all rows, and everybody does now and then: where stores may overtake each other, a change can be
missed.

The memory has no name: it is a file that was never linked, and goes with the last process.
"""

from __future__ import annotations

import mmap
import os
from struct import Struct, pack, unpack_from
from typing import NamedTuple

from proxy.core.fleet.breaker import BreakerSnapshot
from proxy.core.queue.buckets import LastDispatch
from proxy.core.tenants.tenants import Rank
from proxy.wire.worker.connection import WorkerError

WORD = 8
MOST_WORKERS = 1024  # rows, one for each worker
MOST_TENANTS = 1024
PLACES = 64  # into which models, and sizes, fall by a hash of theirs
RING = 1024  # numbers of rows that have changed
LOG = 8192  # words of prompts' beginnings that were sent somewhere

HEAD_WORDS, ROW_WORDS, FRONT_WORDS, LAST_WORDS, TIDE_WORDS, TENANT_WORDS = 16, 17, 4, 4, 4, 11
CLASSES = len(Rank)
ROW_BYTES = ROW_WORDS * WORD
AT_RING = HEAD_WORDS
AT_TENANT_RING = AT_RING + RING
AT_ROWS = AT_TENANT_RING + RING
AT_FRONTS = AT_ROWS + MOST_WORKERS * ROW_WORDS
AT_LASTS = AT_FRONTS + PLACES * CLASSES * FRONT_WORDS
AT_TIDES = AT_LASTS + PLACES * LAST_WORDS
AT_TENANTS = AT_TIDES + PLACES * TIDE_WORDS
AT_LOG = AT_TENANTS + MOST_TENANTS * TENANT_WORDS
SHEET_WORDS = AT_LOG + LOG
# In the head.
CHANGES, WAITING, BYTES, TOKENS, LIFE, TENANT_CHANGES, BREAKS, LOGGED, ALIVE = range(9)
RINGS = {CHANGES: AT_RING, TENANT_CHANGES: AT_TENANT_RING}  # by what counts their changes
FLOORS = 9  # and the next two words: where a class's turns were when nobody was left
# Behind all sheets, everybody's: who has which row among the tenants, and what each has taken.
CELL_WORDS = 2
COMMON_WORDS = MOST_TENANTS * (1 + CELL_WORDS)

LOAD = Struct("@10qd")
BREAKER = Struct("@dqdqqd")
AT_BREAKER = LOAD.size
FRONT, LAST, TIDE = Struct("@qddd"), Struct("@dqq"), Struct("@qqd")
TENANT, FLOOR = Struct("@qq9d"), Struct("@3d")
IDLE = Struct("@qq")  # how a tenant's begins


class QueueFront(NamedTuple):
    """Who would go first of a class that waits for a model, shorts or longs."""

    waits: int = 0  # 0: nobody
    virtual: float = 0.0
    since: float = 0.0
    oldest: float = 0.0  # since when any of the class waits there


class TrafficRow(NamedTuple):
    """What was asked of a model, since ever."""

    shorts: int = 0
    longs: int = 0
    long_s: float = 0.0  # of prefill that longs brought


class TenantRow(NamedTuple):
    """What a tenant has of one process."""

    running: int = 0
    waits: int = 0  # a bit for each class
    # Each by class. They stay when a process dies, and its successor goes on from there.
    settled: tuple[float, float, float] = (0.0, 0.0, 0.0)  # charged since ever
    lifts: tuple[float, float, float] = (0.0, 0.0, 0.0)
    unsettled: tuple[float, float, float] = (0.0, 0.0, 0.0)  # estimates of requests in flight


class SharedTable:
    """The memory."""

    def __init__(self, fd: int, processes: int) -> None:
        self.fd = fd
        self.processes = processes
        self._given: list[memoryview[float]] = []
        self._common = processes * SHEET_WORDS * WORD
        self.memory = mmap.mmap(fd, self._common + COMMON_WORDS * WORD)

    @classmethod
    def make(cls, processes: int) -> SharedTable:
        """Make one; its file descriptor is to be handed on."""
        fd = os.memfd_create("router-processes")
        os.ftruncate(fd, (processes * SHEET_WORDS + COMMON_WORDS) * WORD)
        return cls(fd, processes)

    def sheet(self, process: int) -> ProcessSheet:
        """Return what one process writes."""
        return ProcessSheet(self.memory, process)

    def clear(self, process: int) -> None:
        """Forget a process that is no more: what it has charged is nobody's now.

        What tenants were served stays: it was, and all that stand beside each other by it must go
        on from the same numbers. It is not touched at all, for others may look at any moment.
        """
        sheet = self.sheet(process)
        changes = {ring: sheet.count(ring) for ring in RINGS}
        start = process * SHEET_WORDS
        for first, end in ((0, AT_TENANTS), (AT_LOG, SHEET_WORDS)):
            size = (end - first) * WORD
            place = (start + first) * WORD
            self.memory[place : place + size] = bytes(size)
        for row in range(MOST_TENANTS):
            sheet.write_idle(row)
        for ring, before in changes.items():
            sheet.write_count(ring, before + RING + 1)  # everybody has missed a round

    def tenant_row(self, mark: int) -> int | None:
        """Find or make the row of a tenant, by a number that is its own and not 0; None: all taken.

        All processes make the rows of the same tenants in the same order, so that it does not
        matter who is first.
        """
        for row in ((mark + i) % MOST_TENANTS for i in range(MOST_TENANTS)):
            place = self._common + row * WORD
            there = ONE_COUNT.unpack_from(self.memory, place)[0]
            if not there:
                _store(self.memory, place, ONE_COUNT.pack(mark))
            if there in (0, mark):
                return row
        return None

    def tenant_cells(self, row: int) -> memoryview[float]:
        """Return the numbers of a tenant that all processes write."""
        start = self._common + (MOST_TENANTS + row * CELL_WORDS) * WORD
        cells = memoryview(self.memory)[start : start + CELL_WORDS * WORD].cast("d")
        self._given.append(cells)
        return cells

    def close(self) -> None:
        """Give it back, here."""
        for cells in self._given:
            cells.release()
        self.memory.close()
        os.close(self.fd)


class ProcessSheet:
    """One process's part of the table."""

    def __init__(self, memory: mmap.mmap, process: int) -> None:
        self._memory = memory
        self._start = process * SHEET_WORDS * WORD
        self._rows = self._start + AT_ROWS * WORD
        self._fronts = self._start + AT_FRONTS * WORD
        self._lasts = self._start + AT_LASTS * WORD
        self._tides = self._start + AT_TIDES * WORD
        self._tenants = self._start + AT_TENANTS * WORD
        self._log = self._start + AT_LOG * WORD

    # Of workers

    def write_load(self, row: int, load: tuple[int, ...], due_at: float) -> None:
        """Say what is charged to a worker, and when it should next be heard of."""
        _store(self._memory, self._rows + row * ROW_BYTES, LOAD.pack(*load, due_at))

    def read_load(self, row: int) -> tuple[tuple[int, ...], float]:
        """Read that."""
        values = LOAD.unpack_from(self._memory, self._rows + row * ROW_BYTES)
        return values[:-1], values[-1]

    def write_requests(self, row: int, requests: int) -> None:
        """Say how many requests of what is charged to a worker; that is its first number."""
        _store(self._memory, self._rows + row * ROW_BYTES, ONE_COUNT.pack(requests))

    def read_requests(self, row: int) -> int:
        """Read that."""
        requests: int = ONE_COUNT.unpack_from(self._memory, self._rows + row * ROW_BYTES)[0]
        return requests

    def write_breaker(self, row: int, at: float, told: BreakerSnapshot) -> None:
        """Say what became of a worker's breaker, and when."""
        closed, busy, until, failures, openings, tried_at, why = told
        flags = closed | busy << 1 | _number_of(why) << 2
        place = self._rows + row * ROW_BYTES + AT_BREAKER
        # The moment comes last: nobody may believe the old state to be as new as that.
        _store(self._memory, place, BREAKER.pack(0.0, flags, until, failures, openings, tried_at))
        _store(self._memory, place, ONE_TIME.pack(at))

    def read_breaker(self, row: int) -> tuple[float, BreakerSnapshot]:
        """Read that; the moment is 0 where nothing was ever said."""
        place = self._rows + row * ROW_BYTES + AT_BREAKER
        at, flags, until, failures, openings, tried_at = BREAKER.unpack_from(self._memory, place)
        closed, busy = bool(flags & 1), bool(flags & 2)
        return at, (closed, busy, until, failures, openings, tried_at, _why(flags >> 2))

    def has(self, row: int) -> bool:
        """Whether anything is charged to a worker."""
        return any(self.read_load(row)[0][:-1])  # what was written is for ever

    def wipe(self, row: int) -> None:
        """Make a row as new, for another worker."""
        start = self._rows + row * ROW_BYTES
        self._memory[start : start + ROW_BYTES] = bytes(ROW_BYTES)

    # Of changes

    @property
    def changes(self) -> int:
        """How many rows were told to have changed, since ever."""
        return self.count(CHANGES)

    def tell(self, row: int, ring: int = CHANGES) -> None:
        """Say that a row has changed, once it has; `ring`: what counts the changes of its kind."""
        memory, start = self._memory, self._start
        changes = ONE_COUNT.unpack_from(memory, start + ring * WORD)[0]
        _store(memory, start + (RINGS[ring] + changes % RING) * WORD, ONE_COUNT.pack(row))
        _store(memory, start + ring * WORD, ONE_COUNT.pack(changes + 1))

    def told(self, since: int, ring: int = CHANGES) -> tuple[int, set[int] | None]:
        """Return how far changes are told, and the rows since then; None: all may have changed."""
        now = self.count(ring)
        if now - since > RING:
            return now, None
        start = self._start + RINGS[ring] * WORD
        rows = {
            ONE_COUNT.unpack_from(self._memory, start + each % RING * WORD)[0]
            for each in range(since, now)
        }
        # What was overwritten meanwhile was read as something else.
        return (now, rows) if self.count(ring) - since <= RING else (now, None)

    # Of all else

    def write_count(self, which: int, value: int) -> None:
        """Write a number of the head."""
        _store(self._memory, self._start + which * WORD, ONE_COUNT.pack(value))

    def count(self, which: int) -> int:
        """Read it."""
        value: int = ONE_COUNT.unpack_from(self._memory, self._start + which * WORD)[0]
        return value

    def write_front(self, place: int, rank: int, front: QueueFront) -> None:
        """Say who would go first."""
        at = place * CLASSES + rank
        _store(self._memory, self._fronts + at * FRONT_WORDS * WORD, FRONT.pack(*front))

    def read_front(self, place: int, rank: int) -> QueueFront:
        """Read that."""
        at = place * CLASSES + rank
        return QueueFront(*FRONT.unpack_from(self._memory, self._fronts + at * FRONT_WORDS * WORD))

    def write_last(self, place: int, last: LastDispatch) -> None:
        """Say what the last turn was."""
        _store(self._memory, self._lasts + place * LAST_WORDS * WORD, LAST.pack(*last))

    def read_last(self, place: int) -> LastDispatch:
        """Read that."""
        at, passed, passer = LAST.unpack_from(self._memory, self._lasts + place * LAST_WORDS * WORD)
        return LastDispatch(at, bool(passed), passer)

    def write_tide(self, place: int, tide: TrafficRow) -> None:
        """Say what was asked."""
        _store(self._memory, self._tides + place * TIDE_WORDS * WORD, TIDE.pack(*tide))

    def read_tide(self, place: int) -> TrafficRow:
        """Read that."""
        return TrafficRow(*TIDE.unpack_from(self._memory, self._tides + place * TIDE_WORDS * WORD))

    def write_taken(self, row: int, taken: TenantRow) -> None:
        """Say what a tenant has here."""
        place = self._tenants + row * TENANT_WORDS * WORD
        running, waits, settled, lifts, unsettled = taken
        packed = TENANT.pack(running, waits, *settled, *lifts, *unsettled)
        _store(self._memory, place, packed)

    def read_taken(self, row: int) -> TenantRow:
        """Read that."""
        place = self._tenants + row * TENANT_WORDS * WORD
        running, waits, *served = TENANT.unpack_from(self._memory, place)
        a, b, c, d, e, f, g, h, i = served
        return TenantRow(running, waits, (a, b, c), (d, e, f), (g, h, i))

    def write_running(self, row: int, running: int) -> None:
        """Say how many requests a tenant has in flight here."""
        place = self._tenants + row * TENANT_WORDS * WORD
        _store(self._memory, place, ONE_COUNT.pack(running))

    def read_running(self, row: int) -> int:
        """Read that."""
        place = self._tenants + row * TENANT_WORDS * WORD
        running: int = ONE_COUNT.unpack_from(self._memory, place)[0]
        return running

    def write_idle(self, row: int) -> None:
        """Write that a tenant has nothing here any more, and leave what it was charged."""
        place = self._tenants + row * TENANT_WORDS * WORD
        _store(self._memory, place, IDLE.pack(0, 0))

    def write_floors(self, floors: tuple[float, ...]) -> None:
        """Say where turns were when nobody was left of a class."""
        _store(self._memory, self._start + FLOORS * WORD, FLOOR.pack(*floors))

    def read_floors(self) -> tuple[float, ...]:
        """Read that."""
        return FLOOR.unpack_from(self._memory, self._start + FLOORS * WORD)

    def write_log(self, row: int, hashes: tuple[int, ...]) -> None:
        """Say that a worker was sent a prompt that begins with these blocks."""
        length, logged = len(hashes), self.count(LOGGED)
        at = logged % LOG
        if at + 1 + length > LOG:  # a record is in one piece: what is left stays empty
            _store(self._memory, self._log + at * WORD, MARK.pack(0))
            logged, at = logged + LOG - at, 0
        mark = (row + 1) << LENGTH_BITS | length
        _store(self._memory, self._log + at * WORD, pack(f"@{length + 1}Q", mark, *hashes))
        self.write_count(LOGGED, logged + 1 + length)

    def read_log(self, since: int) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
        """Return how far was read, and rows and blocks since then; what is too old is missed."""
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
        # What was overwritten meanwhile was read as something else.
        return (now, found) if self.count(LOGGED) - since <= LOG else (now, [])


def _number_of(why: str) -> int:
    """Write why a breaker opened, a status or a trouble, as a number; 0 is nothing known."""
    if why.isdecimal():
        return int(why) + len(TROUBLES)
    return TROUBLES.index(why) if why in TROUBLES else 0


def _why(number: int) -> str:
    """Read that."""
    return TROUBLES[number] if number < len(TROUBLES) else str(number - len(TROUBLES))


def _store(memory: mmap.mmap, place: int, numbers: bytes) -> None:
    # `pack_into` writes zeroes first, and others would see them.
    memory[place : place + len(numbers)] = numbers


ONE_COUNT, ONE_TIME, MARK = Struct("@q"), Struct("@d"), Struct("@Q")
TROUBLES = ("", *(trouble.value for trouble in WorkerError))
LENGTH_BITS = 8
LENGTH_MASK = (1 << LENGTH_BITS) - 1

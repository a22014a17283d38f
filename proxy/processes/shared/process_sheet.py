"""One process's part of the shared memory.

A number is eight aligned bytes, so a store is atomic and needs no lock. Several numbers may be from
different moments, so they are trusted only until the next read.

Rings contain the numbers of changed rows, so that reading costs as much as has changed. A process
that misses a whole round reads all rows. Every process also does so now and then, because a
reordered store can hide a change.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from enum import Enum
from struct import Struct
from typing import NamedTuple, TypeAlias

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

HEAD_WORDS, ROW_WORDS, FRONT_WORDS, LAST_WORDS, TRAFFIC_WORDS, TENANT_WORDS = 16, 18, 4, 4, 4, 11
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
CHANGES, WAITING, BYTES, TOKENS, LIFE, TENANT_CHANGES, BREAKER_CHANGES, LOGGED, ALIVE = range(9)
RINGS = {CHANGES: AT_RING, TENANT_CHANGES: AT_TENANT_RING}  # by the word that counts their changes
FLOORS = 9  # and the next two words: each class's position when its last request left
LARGE_PREFILLS = 12  # starts and ends of large prefills

LOAD = Struct("@11qd")
BREAKER = Struct("@dqdqqd")
AT_BREAKER = LOAD.size
FRONT, LAST, TRAFFIC = Struct("@qddd"), Struct("@dqq"), Struct("@qqd")
TENANT, FLOOR = Struct("@qq9d"), Struct("@3d")
# Each of these takes as much.
PLACE_BYTES, FRONTS = FRONT_WORDS * WORD, PLACES * CLASSES
NO_PLACES = bytes((FRONTS + 2 * PLACES) * PLACE_BYTES)
CHUNK_BYTES = 16 * PLACE_BYTES  # compared first
IDLE = Struct("@qq")  # the first two numbers of a tenant's row
Shares: TypeAlias = tuple[float, ...]  # one number per class
NO_SHARES: Shares = (0.0,) * CLASSES


class QueueFront(NamedTuple):
    """The first request of a class that waits for a model and size."""

    tenant: int = 0  # its mark; 0 if no request waits
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
    settled: Shares = NO_SHARES  # charged since the start
    lifts: Shares = NO_SHARES
    unsettled: Shares = NO_SHARES  # estimates of requests in flight


NO_USAGE = TenantRow()


class PlaceKind(Enum):
    """What is written by model and size."""

    FRONT = 0
    LAST = 1
    TRAFFIC = 2


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


class ProcessSheet:
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
        store(self._memory, self._rows + row * ROW_BYTES, LOAD.pack(*load, due_at))

    def read_load(self, row: int) -> tuple[tuple[int, ...], float]:
        values = LOAD.unpack_from(self._memory, self._rows + row * ROW_BYTES)
        return values[:-1], values[-1]

    def write_requests(self, row: int, requests: int) -> None:
        """Write the first number of a worker's charges."""
        store(self._memory, self._rows + row * ROW_BYTES, ONE_COUNT.pack(requests))

    def read_requests(self, row: int) -> int:
        requests: int = ONE_COUNT.unpack_from(self._memory, self._rows + row * ROW_BYTES)[0]
        return requests

    def write_breaker(self, row: int, at: float, snapshot: BreakerSnapshot) -> None:
        closed, busy, until, failures, openings, tried_at, why = snapshot
        flags = closed | busy << 1 | _number_of(why) << 2
        place = self._rows + row * ROW_BYTES + AT_BREAKER
        # The time is written last, so that an old state is never read with a new time.
        store(self._memory, place, BREAKER.pack(0.0, flags, until, failures, openings, tried_at))
        store(self._memory, place, ONE_TIME.pack(at))

    def read_breaker(self, row: int) -> tuple[float, BreakerSnapshot]:
        """Read a breaker's state; the time is 0 if none was written."""
        place = self._rows + row * ROW_BYTES + AT_BREAKER
        at, flags, until, failures, openings, tried_at = BREAKER.unpack_from(self._memory, place)
        closed, busy, why = bool(flags & 1), bool(flags & 2), _why(flags >> 2)
        return at, BreakerSnapshot(closed, busy, until, failures, openings, tried_at, why)

    def has_charges(self, row: int) -> bool:
        return any(self.read_load(row)[0][:-2])  # totals, the last numbers, only grow

    def wipe(self, row: int) -> None:
        """Clear a row for another worker."""
        start = self._rows + row * ROW_BYTES
        self._memory[start : start + ROW_BYTES] = bytes(ROW_BYTES)

    @property
    def changes(self) -> int:
        return self.count(CHANGES)

    def mark_changed(self, row: int, ring: int = CHANGES) -> None:
        """Add a row to a ring of changes, after the row was written."""
        memory, start = self._memory, self._start
        changes = ONE_COUNT.unpack_from(memory, start + ring * WORD)[0]
        store(memory, start + (RINGS[ring] + changes % RING) * WORD, ONE_COUNT.pack(row))
        store(memory, start + ring * WORD, ONE_COUNT.pack(changes + 1))

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

    def write_count(self, index: int, value: int) -> None:
        store(self._memory, self._start + index * WORD, ONE_COUNT.pack(value))

    def count(self, index: int) -> int:
        """Read a number of the head."""
        value: int = ONE_COUNT.unpack_from(self._memory, self._start + index * WORD)[0]
        return value

    def write_front(self, place: int, rank: int, front: QueueFront) -> None:
        at = place * CLASSES + rank
        store(self._memory, self._fronts + at * FRONT_WORDS * WORD, FRONT.pack(*front))

    def read_front(self, place: int, rank: int) -> QueueFront:
        at = place * CLASSES + rank
        return QueueFront(*FRONT.unpack_from(self._memory, self._fronts + at * FRONT_WORDS * WORD))

    def write_last(self, place: int, last: LastDispatch) -> None:
        store(self._memory, self._lasts + place * LAST_WORDS * WORD, LAST.pack(*last))

    def read_last(self, place: int) -> LastDispatch:
        at, passed, passer = LAST.unpack_from(self._memory, self._lasts + place * LAST_WORDS * WORD)
        return LastDispatch(at, bool(passed), passer)

    def write_traffic(self, place: int, traffic: TrafficRow) -> None:
        store(self._memory, self._traffic + place * TRAFFIC_WORDS * WORD, TRAFFIC.pack(*traffic))

    def read_traffic(self, place: int) -> TrafficRow:
        at = self._traffic + place * TRAFFIC_WORDS * WORD
        return TrafficRow(*TRAFFIC.unpack_from(self._memory, at))

    def write_usage(self, row: int, usage: TenantRow) -> None:
        place = self._tenants + row * TENANT_WORDS * WORD
        running, waits, settled, lifts, unsettled = usage
        packed = TENANT.pack(running, waits, *settled, *lifts, *unsettled)
        store(self._memory, place, packed)

    def read_usage(self, row: int) -> TenantRow:
        place = self._tenants + row * TENANT_WORDS * WORD
        running, waits, *shares = TENANT.unpack_from(self._memory, place)
        settled, lifts, unsettled = shares[:3], shares[3:6], shares[6:]
        return TenantRow(running, waits, tuple(settled), tuple(lifts), tuple(unsettled))

    def write_running(self, row: int, running: int) -> None:
        place = self._tenants + row * TENANT_WORDS * WORD
        store(self._memory, place, ONE_COUNT.pack(running))

    def read_running(self, row: int) -> int:
        place = self._tenants + row * TENANT_WORDS * WORD
        running: int = ONE_COUNT.unpack_from(self._memory, place)[0]
        return running

    def write_idle(self, row: int) -> None:
        """Write that a tenant has no requests here; keep its charges."""
        place = self._tenants + row * TENANT_WORDS * WORD
        store(self._memory, place, IDLE.pack(0, 0))

    def write_floors(self, floors: tuple[float, ...]) -> None:
        store(self._memory, self._start + FLOORS * WORD, FLOOR.pack(*floors))

    def read_floors(self) -> tuple[float, ...]:
        return FLOOR.unpack_from(self._memory, self._start + FLOORS * WORD)

    def write_log(self, words: bytes) -> None:
        """Add words to the prefix log; more than it holds are lost."""
        logged, length = self.count(LOGGED), len(words) // WORD
        if length <= LOG:
            at = logged % LOG
            until_end = (LOG - at) * WORD
            store(self._memory, self._log + at * WORD, words[:until_end])
            store(self._memory, self._log, words[until_end : length * WORD])
        self.write_count(LOGGED, logged + length)

    def places(self) -> bytes:
        """Return all that is written by model and size, to see whether it has changed."""
        return self._memory[self._fronts : self._tenants]

    def read_log(self, since: int) -> tuple[int, bytes]:
        """Return the new position and the words since the last one.

        None are returned if some are overwritten.
        """
        now = self.count(LOGGED)
        if not 0 < now - since <= LOG:
            return now, b""
        first, end = self._log + since % LOG * WORD, self._log + LOG * WORD
        last = first + (now - since) * WORD
        words = self._memory[first : min(last, end)]
        if last > end:
            words += self._memory[self._log : self._log + last - end]
        # Words that were overwritten in the meantime are invalid.
        return (now, words) if self.count(LOGGED) - since <= LOG else (now, b"")


def _number_of(why: str) -> int:
    """Encode why a breaker opened, a status or a WorkerError, as a number; 0 is unknown."""
    if why.isdecimal() and len(why) == STATUS_DIGITS:
        return int(why) + len(WORKER_ERRORS)
    return WORKER_ERRORS.index(why) if why in WORKER_ERRORS else 0


def _why(number: int) -> str:
    status = number - len(WORKER_ERRORS)
    return WORKER_ERRORS[number] if status < 0 else str(status)


def store(memory: mmap.mmap, place: int, numbers: bytes) -> None:
    # `pack_into` writes zeros first, which other processes could read.
    memory[place : place + len(numbers)] = numbers


ONE_COUNT, ONE_TIME = Struct("@q"), Struct("@d")
WORKER_ERRORS = ("", *(error.value for error in WorkerError))
STATUS_DIGITS = 3
# Of an entry of the log: its number of hashes, below the mark of the worker.
LENGTH_BITS = 16
LENGTH_MASK = (1 << LENGTH_BITS) - 1

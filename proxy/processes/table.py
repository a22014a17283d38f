"""What the processes of a router tell each other without asking: a piece of memory they all see.

Each process has a sheet of its own in it, and writes nowhere else; the others read. A number is
eight bytes in their place, so a store is whole or not there, and nobody ever waits for a lock. What
is read of several numbers may be of two moments: none is believed for longer than until the next
look.

Of the workers' rows those that have changed are told in a ring of row numbers, so that to look is
worth what has happened and not what there is. Who has missed a round of it reads all rows, and
everybody does now and then: where stores may overtake each other, a change can be missed.

The memory has no name: it is a file that was never linked, and goes with the last process.
"""

from __future__ import annotations

import mmap
import os
from struct import Struct
from typing import NamedTuple

from proxy.core.breaker import Told
from proxy.core.elsewhere import Load

WORD = 8
MOST_WORKERS = 1024  # rows, one for each worker
PLACES = 64  # into which models and sizes fall, by a hash of theirs
RING = 1024  # a power of two

HEAD_WORDS, ROW_WORDS, PLACE_WORDS = 16, 16, 8
SHEET_WORDS = HEAD_WORDS + RING + MOST_WORKERS * ROW_WORDS + PLACES * PLACE_WORDS
AT_RING = HEAD_WORDS
AT_ROWS = AT_RING + RING
AT_PLACES = AT_ROWS + MOST_WORKERS * ROW_WORDS
# In the head.
CHANGES, WAITING, BYTES, TOKENS = range(4)

LOAD = Struct("@8qd")
BREAKER = Struct("@dqdqqd")
AT_BREAKER = LOAD.size
PLACE = Struct("@qd2qd")


class Row(NamedTuple):
    """What one process says of one worker."""

    load: Load
    due_at: float


class Place(NamedTuple):
    """What one process says of a model's shorts, or longs."""

    rank: int = 0  # of the class that goes first among those who wait; 0: nobody waits
    turn: float = 0.0  # who of that class goes first: the least
    shorts: int = 0  # asked, since ever
    longs: int = 0
    long_s: float = 0.0  # of prefill that longs brought, since ever


class Table:
    """The memory."""

    def __init__(self, fd: int, processes: int) -> None:
        self.fd = fd
        self.processes = processes
        self.memory = mmap.mmap(fd, processes * SHEET_WORDS * WORD)

    @classmethod
    def make(cls, processes: int) -> Table:
        """Make one; its file descriptor is to be handed on."""
        fd = os.memfd_create("router-processes")
        os.ftruncate(fd, processes * SHEET_WORDS * WORD)
        return cls(fd, processes)

    def sheet(self, process: int) -> Sheet:
        """Return what one process writes."""
        return Sheet(self.memory, process)

    def clear(self, process: int) -> None:
        """Forget a process that is no more: what it has charged is nobody's now."""
        sheet = self.sheet(process)
        changes = sheet.changes
        start = process * SHEET_WORDS * WORD
        self.memory[start : start + SHEET_WORDS * WORD] = bytes(SHEET_WORDS * WORD)
        sheet.changes = changes + RING + 1  # everybody has missed a round

    def close(self) -> None:
        """Give it back, here."""
        self.memory.close()
        os.close(self.fd)


class Sheet:
    """One process's part of the table."""

    def __init__(self, memory: mmap.mmap, process: int) -> None:
        self._memory = memory
        self._start = process * SHEET_WORDS * WORD
        self._rows = self._start + AT_ROWS * WORD
        self._places = self._start + AT_PLACES * WORD

    # Of workers

    def write_load(self, row: int, load: Load, due_at: float) -> None:
        """Say what is charged to a worker."""
        LOAD.pack_into(self._memory, self._rows + row * ROW_WORDS * WORD, *load, due_at)

    def read_load(self, row: int) -> Row:
        """Read that."""
        *load, due_at = LOAD.unpack_from(self._memory, self._rows + row * ROW_WORDS * WORD)
        return Row(Load(*load), due_at)

    def write_breaker(self, row: int, at: float, told: Told) -> None:
        """Say what became of a worker's breaker, and when."""
        closed, busy, until, failures, openings, tried_at = told
        flags = closed | busy << 1
        place = self._rows + row * ROW_WORDS * WORD + AT_BREAKER
        # The moment comes last: nobody may believe the old state to be as new as that.
        BREAKER.pack_into(self._memory, place, 0.0, flags, until, failures, openings, tried_at)
        ONE_TIME.pack_into(self._memory, place, at)

    def read_breaker(self, row: int) -> tuple[float, Told]:
        """Read that; the moment is 0 where nothing was ever said."""
        place = self._rows + row * ROW_WORDS * WORD + AT_BREAKER
        at, flags, until, failures, openings, tried_at = BREAKER.unpack_from(self._memory, place)
        closed, busy = bool(flags & 1), bool(flags & 2)
        return at, (closed, busy, until, failures, openings, tried_at)

    def has(self, row: int) -> bool:
        """Whether anything is charged to a worker."""
        return any(self.read_load(row).load[:-1])  # what was written is for ever

    def wipe(self, row: int) -> None:
        """Make a row as new, for another worker."""
        start = self._rows + row * ROW_WORDS * WORD
        self._memory[start : start + ROW_WORDS * WORD] = bytes(ROW_WORDS * WORD)

    # Of changes

    @property
    def changes(self) -> int:
        """How many rows were told to have changed, since ever."""
        return self.count(CHANGES)

    @changes.setter
    def changes(self, changes: int) -> None:
        ONE_COUNT.pack_into(self._memory, self._start + CHANGES * WORD, changes)

    def tell(self, row: int) -> None:
        """Say that a row has changed, once it has."""
        changes = self.changes
        place = self._start + (AT_RING + changes % RING) * WORD
        ONE_COUNT.pack_into(self._memory, place, row)
        self.changes = changes + 1

    def told(self, since: int) -> tuple[int, set[int] | None]:
        """Return how far changes are told, and the rows since then; None: all may have changed."""
        now = self.changes
        if now - since > RING:
            return now, None
        rows = {
            ONE_COUNT.unpack_from(self._memory, self._start + (AT_RING + each % RING) * WORD)[0]
            for each in range(since, now)
        }
        # What was overwritten meanwhile was read as something else.
        return (now, rows) if self.changes - since <= RING else (now, None)

    # Of the queue

    def write_count(self, which: int, value: int) -> None:
        """Say how long the queue is, in one of its measures."""
        ONE_COUNT.pack_into(self._memory, self._start + which * WORD, value)

    def count(self, which: int) -> int:
        """Read a number of the head."""
        value: int = ONE_COUNT.unpack_from(self._memory, self._start + which * WORD)[0]
        return value

    def write_place(self, place: int, said: Place) -> None:
        """Say who waits of a model and size, and what was asked."""
        PLACE.pack_into(self._memory, self._places + place * PLACE_WORDS * WORD, *said)

    def read_place(self, place: int) -> Place:
        """Read that."""
        return Place(*PLACE.unpack_from(self._memory, self._places + place * PLACE_WORDS * WORD))


ONE_COUNT, ONE_TIME = Struct("@q"), Struct("@d")

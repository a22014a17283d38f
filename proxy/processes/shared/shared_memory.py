"""Memory that all router processes of a host share.

Each process writes its own sheet and reads the others' sheets. The sheets after them are copies of
sheets on other hosts, which the supervisor writes (`replicas`). All write tenants' limit counters,
where a lost update does little harm.

The memory is an unlinked file and disappears with the last process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from struct import unpack_from
from typing import Generic, TypeVar

from proxy.processes.shared.process_sheet import (
    AT_LOG,
    AT_TENANTS,
    MAX_TENANTS,
    MAX_WORKERS,
    ONE_COUNT,
    RING,
    RINGS,
    SHEET_WORDS,
    WORD,
    ProcessSheet,
    store,
)

LOOK_INTERVAL_S = 0.1
# Hosts publish at the same moments, so that messages of all are read together, after a short wait.
SETTLE_S, MAX_SETTLE_S = 0.003, 0.005
MICRO = 1e-6
MAX_REMOTE = 64  # sheets for processes of other hosts
# After all sheets, written by all processes: each tenant row's mark, and the use of its limits.
CELL_WORDS = 2
# Then the numbers below, and for each worker the slots reserved for other hosts.
AT_NUMBERS = MAX_TENANTS * (1 + CELL_WORDS)
AT_RESERVED = AT_NUMBERS + 7
COMMON_WORDS = AT_RESERVED + MAX_WORKERS

Peer = TypeVar("Peer")


class SharedTable:
    def __init__(self, fd: int, processes: int) -> None:
        self.fd = fd
        self.processes = processes
        self.sheets = (os.fstat(fd).st_size // WORD - COMMON_WORDS) // SHEET_WORDS
        self._given: list[memoryview[float]] = []
        self._marks = b""
        self._rows_of_marks: dict[int, int] = {}
        self.common = self.sheets * SHEET_WORDS * WORD
        self.memory = mmap.mmap(fd, self.common + COMMON_WORDS * WORD)

    @classmethod
    def make(cls, processes: int, remote: int = 0) -> SharedTable:
        """Create the memory; its file descriptor is passed to the processes.

        `remote`: the number of sheets for processes of other hosts.
        """
        fd = os.memfd_create("router-processes")
        os.ftruncate(fd, ((processes + remote) * SHEET_WORDS + COMMON_WORDS) * WORD)
        table = cls(fd, processes)
        table.hosts = 1
        return table

    @property
    def hosts(self) -> int:  # that serve the fleet, as last known
        return self._number(0)

    @hosts.setter
    def hosts(self, value: int) -> None:
        self._set_number(0, value)

    @property
    def remote_in_use(self) -> int:  # remote sheets that have been used
        return self._number(1)

    @remote_in_use.setter
    def remote_in_use(self, value: int) -> None:
        self._set_number(1, value)

    @property
    def reservation_changes(self) -> int:
        return self._number(2)

    @reservation_changes.setter
    def reservation_changes(self, value: int) -> None:
        self._set_number(2, value)

    @property
    def updates(self) -> int:  # of remote sheets and reservations; processes then read them
        return self._number(3)

    @updates.setter
    def updates(self, value: int) -> None:
        self._set_number(3, value)

    @property
    def sent(self) -> int:  # updates that this host sent
        return self._number(4)

    @sent.setter
    def sent(self, value: int) -> None:
        self._set_number(4, value)

    @property
    def awaits_urgent(self) -> int:
        """1 if the supervisor does not look itself, but awaits a message of urgent changes."""
        return self._number(5)

    @awaits_urgent.setter
    def awaits_urgent(self, value: int) -> None:
        self._set_number(5, value)

    @property
    def heard_us(self) -> int:  # the microsecond of the last message of another host
        return self._number(6)

    @heard_us.setter
    def heard_us(self, value: int) -> None:
        self._set_number(6, value)

    def _number(self, at: int) -> int:
        value: int = ONE_COUNT.unpack_from(self.memory, self.common + (AT_NUMBERS + at) * WORD)[0]
        return value

    def _set_number(self, at: int, value: int) -> None:
        store(self.memory, self.common + (AT_NUMBERS + at) * WORD, ONE_COUNT.pack(value))

    def note_heard(self, now: float) -> None:
        """Have processes read remote sheets once no other message has come for a moment."""
        self.heard_us = int(now / MICRO)
        self.updates += 1

    def reserve(self, row: int, slots: int) -> None:
        if slots != self.reserved(row):
            store(self.memory, self._place_of_slots(row), ONE_COUNT.pack(slots))
            self.reservation_changes += 1
            self.updates += 1

    def reserved(self, row: int) -> int:
        slots: int = ONE_COUNT.unpack_from(self.memory, self._place_of_slots(row))[0]
        return slots

    def _place_of_slots(self, row: int) -> int:
        return self.common + (AT_RESERVED + row) * WORD

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
            place = self.common + row * WORD
            row_mark = ONE_COUNT.unpack_from(self.memory, place)[0]
            if not row_mark:
                store(self.memory, place, ONE_COUNT.pack(mark))
            if row_mark in (0, mark):
                return row
        return None

    def tenant_marks(self) -> dict[int, int]:
        marks = self.memory[self.common : self.common + MAX_TENANTS * WORD]
        if marks != self._marks:
            self._marks = marks
            numbers = unpack_from(f"@{MAX_TENANTS}q", marks)
            self._rows_of_marks = {row: mark for row, mark in enumerate(numbers) if mark}
        return self._rows_of_marks

    def tenant_cells(self, row: int) -> memoryview[float]:
        """Return the numbers of a tenant that all processes write."""
        start = self.common + (MAX_TENANTS + row * CELL_WORDS) * WORD
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
        self.settle_s = SETTLE_S
        self._updates, self._look_at = -1, 0.0  # of other hosts
        self._noticed_at: float | None = None  # of updates that are not read
        self._in_use = self.local

    def may_have_news(self, now: float) -> bool:
        """Return False if all peers are on other hosts, and nothing or not all of it has come."""
        if self.local:
            return True
        updates = self._table.updates
        if now < self._look_at:
            if updates == self._updates:
                return False
            if 0.0 <= now - self._table.heard_us * MICRO < self.settle_s:
                if self._noticed_at is None:
                    self._noticed_at = now
                if now - self._noticed_at < MAX_SETTLE_S:
                    return False
        self._noticed_at = None
        self._updates, self._look_at = updates, now + LOOK_INTERVAL_S
        return True

    def __iter__(self) -> Iterator[Peer]:
        count = len(self.local) + self._table.remote_in_use
        if count != len(self._in_use):
            self._in_use = self._all[:count]
        return iter(self._in_use)

"""Writes what replicas report into the remote sheets of this host's shared memory.

The charges of a silent replica are released. Its tenants' charges stay: tenants are compared by
them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from math import inf
from operator import add

from proxy.core.fleet.breaker import BreakerSnapshot
from proxy.core.fleet.worker_load import NO_LOAD
from proxy.core.queue.buckets import LastDispatch
from proxy.core.tenants.tenants import Rank
from proxy.processes.replicas.messages import (
    Breaker,
    Load,
    ProcessChanges,
    Settled,
    Update,
)
from proxy.processes.replicas.worker_names import WorkerNames
from proxy.processes.shared.limits import FLOORS_ROW
from proxy.processes.shared.process_sheet import (
    BREAKER_CHANGES,
    LIFE,
    NO_SHARES,
    NO_USAGE,
    TENANT_CHANGES,
    WAITING,
    ProcessSheet,
    QueueFront,
    TenantRow,
    TrafficRow,
)
from proxy.processes.shared.shared_memory import MAX_REMOTE, SharedTable

logger = logging.getLogger(__name__)

LEASE_S = 3.0  # silence after which a replica is taken for dead
FORGET_S = 600.0  # then it may have new sheets when it returns
OFFSET_WINDOW_S = 60.0  # clocks are compared by the fastest message in this time
HISTORY = 0  # the first remote sheet: tenants' charges of processes that ended
# Of the history: processes, and their tenants. The rest is folded into one sum.
MAX_HISTORY, MAX_CHARGES, MAX_FOLDED = 256, 4096, 1024


class RemoteProcess:
    """A process of another host, and its sheet."""

    def __init__(self, index: int) -> None:
        self.index = index  # of the sheet
        self.life = self.waiting = 0
        self.loads: dict[str, Load] = {}
        self.breakers: dict[str, Breaker] = {}
        self.usage: Settled = {}


class Member:
    """Another replica."""

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.number = -1  # of its last update
        self.heard_at = now
        self.heard: dict[str, int] = {}
        self.is_lost = True  # some of its state is unknown until a whole update arrives
        self.is_silent = False
        self.processes: dict[int, RemoteProcess] = {}
        self._offset = inf  # from its clock to this host's
        self._next_offset = inf
        self._offset_since = now

    @property
    def offset(self) -> float:
        return min(self._offset, self._next_offset)

    def compare_clocks(self, now: float, clock: float) -> None:
        """Messages take time, so the smallest difference is the best."""
        if now - self._offset_since > OFFSET_WINDOW_S:
            self._offset, self._next_offset, self._offset_since = self._next_offset, inf, now
        self._next_offset = min(self._next_offset, now - clock)


class RemoteSheets:
    def __init__(self, table: SharedTable, workers: WorkerNames) -> None:
        self.members: dict[str, Member] = {}  # alive, or silent for less than FORGET_S
        self.history: dict[str, Settled] = {}
        self._table = table
        self._workers = workers
        self._free = list(range(table.sheets - 1, table.processes + HISTORY, -1))
        self._lives = count(1)
        self._is_full = False
        self.folded: Settled = {}  # of processes that left the history
        self._folded_names: dict[str, None] = {}

    def alive(self, now: float) -> list[Member]:
        return [m for m in self.members.values() if now - m.heard_at <= LEASE_S]

    def wants_whole(self, now: float) -> bool:
        """Return True if the state of a living replica is not wholly known."""
        return any(member.is_lost for member in self.alive(now))

    def apply(self, update: Update, now: float) -> None:
        member = self.members.get(update.member)
        if member is None:
            member = self.members[update.member] = Member(update.member, now)
        member.heard_at, member.heard, member.is_silent = now, update.heard, False
        member.compare_clocks(now, update.clock)
        if update.number != member.number + 1:
            member.is_lost = True
        member.number = update.number
        if update.whole:
            member.is_lost = False
            self._learn_folded(update.folded, update.folded_names)
            self._add_history(update.history)
            running = {part.index for part in update.processes}
            for index in member.processes.keys() - running:
                self._end(member, index)
        for index in update.gone:
            self._clear(member, index)
        if not member.is_lost:
            for part in update.processes:
                self._write(member, part, whole=update.whole)
        if update.leaves:
            self._forget(member)
        if update.processes or update.gone or update.whole or update.leaves:
            self._table.note_heard(now)

    def expire(self, now: float) -> list[str]:
        """Release the charges of silent replicas; return their names."""
        silent = []
        for member in list(self.members.values()):
            if now - member.heard_at > LEASE_S and not member.is_silent:
                silent.append(member.name)
                member.is_silent = member.is_lost = True
                for index in member.processes:
                    self._clear(member, index)
                self._table.updates += 1
            if now - member.heard_at > FORGET_S:
                self._forget(member)
                self._table.updates += 1
        return silent

    @property
    def folded_names(self) -> list[str]:
        return list(self._folded_names)

    def write_new_rows(self, names: list[str]) -> None:
        for member in self.members.values():
            for process in member.processes.values():
                for name in names:
                    sheet = self._table.sheet(process.index)
                    sheet.wipe(self._workers.rows[name])
                    self._write_worker(process, name, member.offset)
        self._table.updates += 1

    @property
    def waits(self) -> bool:
        return any(process.waiting for process in self._all_processes())

    def requests(self, name: str) -> int:
        """Return the number of requests that other replicas have on a worker."""
        return sum(
            process.loads[name][0][0] for process in self._all_processes() if name in process.loads
        )

    def _all_processes(self) -> Iterator[RemoteProcess]:
        for member in self.members.values():
            yield from member.processes.values()

    # Sheets

    def _process(self, member: Member, index: int) -> RemoteProcess | None:
        process = member.processes.get(index)
        if process is None and not self._free:
            self._make_room(member)
        if process is None and self._free:
            process = member.processes[index] = RemoteProcess(self._free.pop())
            in_use = process.index - self._table.processes + 1
            self._table.remote_in_use = max(in_use, self._table.remote_in_use)
        return process

    def _make_room(self, newcomer: Member) -> None:
        """Forget the replica that has been silent for the longest time."""
        silent = [member for member in self.members.values() if member.is_silent]
        if silent:
            self._forget(min(silent, key=lambda member: member.heard_at))
        elif not self._is_full:
            self._is_full = True
            logger.error(
                "router.shared: more than %d router processes on other hosts; the charges of "
                "some, as %s, are not seen here",
                MAX_REMOTE - 1,
                newcomer.name,
            )

    def _write(self, member: Member, part: ProcessChanges, *, whole: bool) -> None:
        if (process := self._process(member, part.index)) is None:
            member.is_lost = True
            return
        if whole:
            unnamed = process.loads.keys() - part.loads.keys()
            part.loads.update(dict.fromkeys(unnamed, (NO_LOAD, 0.0)))
            part.usage.update(dict.fromkeys(process.usage.keys() - part.usage.keys(), NO_USAGE))
        sheet = self._table.sheet(process.index)
        if part.life != process.life:  # a new process: readers start anew
            process.life = part.life
            sheet.write_count(LIFE, next(self._lives))
        process.loads.update(part.loads)
        process.breakers.update(part.breakers)
        for name in {*part.loads, *part.breakers}:
            self._write_worker(process, name, member.offset)
        process.waiting = part.waiting
        _write_queue(sheet, part, member.offset)
        for place, traffic in part.traffic.items():
            sheet.write_traffic(place, TrafficRow(*traffic))
        for mark, usage in part.usage.items():
            if (tenant_row := self._table.tenant_row(mark)) is not None:
                process.usage[mark] = usage[2]
                sheet.write_usage(tenant_row, TenantRow(*usage))
                sheet.mark_changed(tenant_row, TENANT_CHANGES)
        if part.floors is not None:
            sheet.write_floors(part.floors)
            sheet.mark_changed(FLOORS_ROW, TENANT_CHANGES)
        if part.prefixes:
            sheet.write_log(part.prefixes)

    def _write_worker(self, process: RemoteProcess, name: str, offset: float) -> None:
        if (row := self._workers.rows.get(name)) is None:
            return
        sheet = self._table.sheet(process.index)
        if name in process.loads:
            load, due_at = process.loads[name]
            sheet.write_load(row, load, _shifted(due_at, offset))
        if name in process.breakers:
            at, state = process.breakers[name]
            sent = BreakerSnapshot(*state)
            until, tried_at = _shifted(sent.until, offset), _shifted(sent.tried_at, offset)
            snapshot = sent._replace(until=until, tried_at=tried_at)
            sheet.write_breaker(row, at + offset, snapshot)
            sheet.write_count(BREAKER_CHANGES, sheet.count(BREAKER_CHANGES) + 1)
        sheet.mark_changed(row)

    def _clear(self, member: Member, index: int) -> None:
        if (process := member.processes.get(index)) is not None:
            self._table.clear(process.index)
            process.life = process.waiting = 0
            process.loads.clear()
            process.breakers.clear()

    def _end(self, member: Member, index: int) -> None:
        """Move a process's charges into the history, and free its sheet."""
        self._clear(member, index)
        process = member.processes.pop(index)
        self._add_history({f"{member.name}/{index}": process.usage})
        sheet = self._table.sheet(process.index)
        for mark in process.usage:
            if (row := self._table.tenant_row(mark)) is not None:
                sheet.write_usage(row, TenantRow())
                sheet.mark_changed(row, TENANT_CHANGES)
        self._free.append(process.index)

    def _forget(self, member: Member) -> None:
        for index in list(member.processes):
            self._end(member, index)
        del self.members[member.name]

    def _add_history(self, history: dict[str, Settled]) -> None:
        """Add processes that ended, each once."""
        marks: set[int] = set()
        for name, settled in history.items():
            if name in self._folded_names:
                continue  # of a host that has not forgotten it yet
            before = self.history.setdefault(name, {})
            for mark, shares in settled.items():
                shares_before = before.get(mark, NO_SHARES)
                if (larger := tuple(map(max, shares, shares_before))) != shares_before:
                    before[mark] = larger
                    marks.add(mark)
        charges = sum(map(len, self.history.values()))
        while len(self.history) > MAX_HISTORY or charges > MAX_CHARGES:
            oldest = next(iter(self.history))
            self._folded_names[oldest] = None
            if len(self._folded_names) > MAX_FOLDED:
                del self._folded_names[next(iter(self._folded_names))]
            settled = self.history.pop(oldest)
            charges -= len(settled)
            for mark, shares in settled.items():
                self.folded[mark] = tuple(map(add, shares, self.folded.get(mark, NO_SHARES)))
        self._write_history(marks)

    def _learn_folded(self, folded: Settled, names: list[str]) -> None:
        if self._folded_names or not names:
            return
        self.folded, self._folded_names = folded, dict.fromkeys(names)
        for name in self.history.keys() & self._folded_names.keys():
            del self.history[name]
        self._write_history({*folded})

    def _write_history(self, marks: set[int]) -> None:
        sheet = self._table.sheet(self._table.processes + HISTORY)
        for mark in marks:
            if (row := self._table.tenant_row(mark)) is not None:
                ended = (*self.history.values(), self.folded)
                shares = [charges.get(mark, NO_SHARES) for charges in ended]
                settled = tuple(map(sum, zip(*shares, strict=True)))
                sheet.write_usage(row, TenantRow(settled=settled))
                sheet.mark_changed(row, TENANT_CHANGES)


def _write_queue(sheet: ProcessSheet, part: ProcessChanges, offset: float) -> None:
    for at, (tenant, virtual, since, oldest) in part.fronts.items():
        front = QueueFront(tenant, virtual, since + offset, oldest + offset)
        sheet.write_front(*divmod(at, len(Rank)), front)
    sheet.write_count(WAITING, part.waiting)
    for place, (last_at, passed, passer) in part.lasts.items():
        sheet.write_last(place, LastDispatch(last_at + offset, passed, passer))


def _shifted(time: float, offset: float) -> float:
    return time + offset if time else time  # 0 means never

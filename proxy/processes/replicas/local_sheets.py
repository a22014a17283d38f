"""Reads what the processes of this host have changed in their sheets."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.fleet.worker_load import NO_LOAD
from proxy.core.tenants.tenants import Rank
from proxy.processes.replicas.messages import ProcessChanges
from proxy.processes.replicas.worker_names import WorkerNames
from proxy.processes.shared.limits import FLOORS_ROW
from proxy.processes.shared.process_sheet import (
    BREAKER_CHANGES,
    LARGE_PREFILLS,
    LIFE,
    NO_PLACES,
    NO_USAGE,
    TENANT_CHANGES,
    WAITING,
    PlaceKind,
    changed_places,
)
from proxy.processes.shared.shared_memory import SharedTable


class LocalSheet:
    """A process's sheet, and how far it is read."""

    def __init__(self, index: int, table: SharedTable) -> None:
        self.index = index
        self._table = table
        self._sheet = table.sheet(index)
        self._life = 0
        self._forget()

    def _forget(self) -> None:
        self._changes_read = self._tenants_read = self._logged = 0
        self._waiting = 0
        self._breakers: dict[str, float] = {}  # times of breakers' states
        self._breaker_changes = self._large_prefills = 0
        self._reported_requests: dict[str, int] = {}  # by worker
        self._places = NO_PLACES
        self._floors: tuple[float, ...] = ()

    def has_urgent_change(self, workers: WorkerNames, scarce: Callable[[str, int], bool]) -> bool:
        """Return True if other hosts should see a change at once.

        `scarce`: whether a worker with so many requests has few free slots.
        """
        sheet = self._sheet
        if (
            sheet.count(WAITING)
            or sheet.count(LIFE) != self._life
            or sheet.count(BREAKER_CHANGES) != self._breaker_changes
            or sheet.count(LARGE_PREFILLS) != self._large_prefills
        ):
            return True
        _, rows = sheet.changed_since(self._changes_read)
        for row in workers.names if rows is None else rows:
            name = workers.names.get(row, "")
            requests = sheet.read_requests(row)
            if requests != self._reported_requests.get(name, 0) and scarce(name, requests):
                return True
        return False

    def changes(self, workers: WorkerNames, *, whole: bool) -> ProcessChanges | None:
        """Return what has changed since the last call, or all; None if that is nothing."""
        sheet = self._sheet
        if not (life := sheet.count(LIFE)):
            return None  # not started yet
        if life != self._life:
            self._life = life
            self._forget()
        elif whole:
            logged = self._logged  # old prefixes are not sent again
            self._forget()
            self._logged = logged
        changed = ProcessChanges(self.index, life, waiting=sheet.count(WAITING))
        self._read_workers(changed, workers, whole=whole)
        self._read_places(changed)
        self._read_tenants(changed, whole=whole)
        self._logged, changed.prefixes = sheet.read_log(self._logged)
        if not whole and changed == ProcessChanges(self.index, life, waiting=self._waiting):
            return None
        self._waiting = changed.waiting
        return changed

    def _read_workers(self, changed: ProcessChanges, workers: WorkerNames, *, whole: bool) -> None:
        sheet = self._sheet
        self._breaker_changes = sheet.count(BREAKER_CHANGES)
        self._large_prefills = sheet.count(LARGE_PREFILLS)
        self._changes_read, rows = sheet.changed_since(self._changes_read)
        # The last requests of a removed worker are not seen.
        for removed in self._reported_requests.keys() - workers.rows.keys():
            del self._reported_requests[removed]
            changed.loads[removed] = NO_LOAD, 0.0
        for row in workers.names if whole or rows is None else rows:
            if (name := workers.names.get(row)) is None:
                continue
            load, _ = changed.loads[name] = sheet.read_load(row)
            self._reported_requests[name] = load[0]
            at, snapshot = sheet.read_breaker(row)
            if at and at != self._breakers.get(name):
                self._breakers[name] = at
                changed.breakers[name] = at, snapshot

    def _read_places(self, changed: ProcessChanges) -> None:
        sheet, before = self._sheet, self._places
        self._places = sheet.places()
        for kind, at in changed_places(before, self._places):
            match kind:
                case PlaceKind.FRONT:
                    changed.fronts[at] = sheet.read_front(*divmod(at, len(Rank)))
                case PlaceKind.LAST:
                    changed.lasts[at] = sheet.read_last(at)
                case PlaceKind.TRAFFIC:
                    changed.traffic[at] = sheet.read_traffic(at)

    def _read_tenants(self, changed: ProcessChanges, *, whole: bool) -> None:
        sheet = self._sheet
        self._tenants_read, rows = sheet.changed_since(self._tenants_read, TENANT_CHANGES)
        marks = self._table.tenant_marks()
        for row in marks if whole or rows is None else rows:
            if (mark := marks.get(row)) is None:
                continue
            usage = sheet.read_usage(row)
            if not whole or usage != NO_USAGE:
                changed.usage[mark] = usage
        if whole or rows is None or FLOORS_ROW in rows:
            changed.floors = sheet.read_floors()

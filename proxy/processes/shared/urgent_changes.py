"""Reports to the supervisor that other hosts should see a change at once.

Otherwise the supervisor looks 10 times a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.processes.shared.process_sheet import BREAKS, WAITING, ProcessSheet

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker
    from proxy.processes.shared.shared_memory import SharedTable

LARGE_TOKENS = 2048  # of prompts, on a worker


class UrgentChanges:
    """Compares changes with the supervisor's last update.

    Some reports are of small changes: the supervisor looks closer.
    """

    def __init__(
        self, table: SharedTable, sheet: ProcessSheet, report: Callable[[], object]
    ) -> None:
        self.unwritten = False  # True if a change must be written at once
        self._table = table
        self._sheet = sheet
        self._report = report
        self._breaks = 0
        self._sent = -1  # updates
        self._sent_loads: dict[int, tuple[int, ...]] = {}  # by row
        self._are_new = False

    def note_load(self, worker: Worker, row: int, load: tuple[int, ...]) -> None:
        """Note the load that is written now."""
        if self.is_urgent(worker, row, load):
            self._are_new = True

    def is_urgent(self, worker: Worker, row: int, load: tuple[int, ...]) -> bool:
        """Compare a load with what the supervisor sent."""
        if (sent := self._table.sent) != self._sent:
            self._sent = sent
            self._sent_loads.clear()
        if (before := self._sent_loads.get(row)) is None:
            before = self._sent_loads[row] = self._sheet.read_load(row)[0]
        few_free = 2 * self._table.hosts * worker.requests >= worker.most
        return abs(load[2] - before[2]) >= LARGE_TOKENS or (few_free and load[0] != before[0])

    def report(self) -> None:
        """Report urgent changes; called after everything is written."""
        self.unwritten = False
        if not self._table.awaits_urgent:
            self._are_new = False  # the supervisor looks soon
            return
        breaks = self._sheet.count(BREAKS)
        if self._are_new or breaks != self._breaks or self._sheet.count(WAITING):
            self._are_new, self._breaks = False, breaks
            self._table.await_urgent(awaits=False)
            self._report()

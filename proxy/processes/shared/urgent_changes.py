"""Reports to the supervisor that other hosts should see a change at once.

Otherwise the supervisor looks 10 times a second.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.fleet.worker import Worker
from proxy.processes.shared.process_sheet import (
    BREAKER_CHANGES,
    LARGE_PREFILLS,
    WAITING,
    ProcessSheet,
)
from proxy.processes.shared.shared_memory import SharedTable


class UrgentChanges:
    """Compares changes with the supervisor's last update."""

    def __init__(
        self, table: SharedTable, sheet: ProcessSheet, report: Callable[[], object]
    ) -> None:
        self.unwritten = False  # True if a change must be written at once
        self._table = table
        self._sheet = sheet
        self._report = report
        self._reported = (0, 0)  # changes of breakers, and of large prefills
        self._sent = -1  # updates
        self._sent_requests: dict[int, int] = {}  # by row
        self._has_new_requests = False

    def note_requests(self, worker: Worker, row: int, requests: int) -> None:
        """Note this process's requests on a worker, which are written now."""
        if self.is_urgent(worker, row, requests):
            self._has_new_requests = True

    def is_urgent(self, worker: Worker, row: int, requests: int) -> bool:
        """Return whether a worker with few free slots has other requests than were sent."""
        if (sent := self._table.sent) != self._sent:
            self._sent = sent
            self._sent_requests.clear()
        if (before := self._sent_requests.get(row)) is None:
            before = self._sent_requests[row] = self._sheet.read_requests(row)
        return (
            requests != before and 2 * self._table.hosts * worker.requests >= worker.request_limit
        )

    def report(self) -> None:
        """Report urgent changes; called after everything is written."""
        self.unwritten = False
        if not self._table.awaits_urgent:
            self._has_new_requests = False  # the supervisor looks soon
            return
        counts = self._sheet.count(BREAKER_CHANGES), self._sheet.count(LARGE_PREFILLS)
        if self._has_new_requests or counts != self._reported or self._sheet.count(WAITING):
            self._has_new_requests, self._reported = False, counts
            self._table.awaits_urgent = False
            self._report()

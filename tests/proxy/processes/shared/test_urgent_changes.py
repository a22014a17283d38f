"""Changes that other hosts should see at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proxy.core.fleet.worker import Worker
from proxy.processes.shared.process_sheet import BREAKER_CHANGES, WAITING, ProcessSheet
from proxy.processes.shared.shared_memory import SharedTable
from proxy.processes.shared.urgent_changes import UrgentChanges
from tests.proxy.core.making import spec

ROW = 3


class Process:
    """A process with one worker, which 4 requests fill, and what it reports."""

    def __init__(self, table: SharedTable) -> None:
        self.table = table
        self.sheet: ProcessSheet = table.sheet(0)
        self.reports = 0
        self._worker = Worker(spec("a", most=4), 0)
        self._urgent = UrgentChanges(table, self.sheet, self._report)

    def _report(self) -> None:
        self.reports += 1

    def write(self, requests: int, tokens: int = 0) -> int:
        """Write a load as at the end of a turn; return the number of reports so far."""
        load = requests, requests, tokens, 0, 0, 0, 0, 0, 0, 0, 0
        self._worker.requests = requests
        self._urgent.note_requests(self._worker, ROW, requests)
        self.sheet.write_load(ROW, load, 0.0)
        self._urgent.report()
        return self.reports


@pytest.fixture
def process() -> Iterator[Process]:
    table = SharedTable.make(1)
    table.awaits_urgent = True
    yield Process(table)
    table.close()


def test_requests_are_compared_with_the_last_update(process: Process) -> None:
    assert process.write(1) == 0
    process.table.sent += 1
    assert process.write(2) == 1
    process.table.awaits_urgent = True
    process.table.sent += 1
    assert process.write(2) == 1
    assert process.write(3) == 2


@pytest.mark.parametrize(("hosts", "reports"), [(1, [0, 1]), (2, [1, 1])])
def test_requests_are_urgent_where_slots_are_scarce(
    process: Process, hosts: int, reports: list[int]
) -> None:
    process.table.hosts = hosts
    assert [process.write(requests) for requests in (1, 2)] == reports


@pytest.mark.parametrize("word", [BREAKER_CHANGES, WAITING])
def test_breakers_and_waiting_requests_are_urgent(process: Process, word: int) -> None:
    assert process.write(0) == 0
    process.sheet.write_count(word, 1)
    assert process.write(0) == 1
    process.table.awaits_urgent = True
    assert process.write(0) == (2 if word == WAITING else 1)

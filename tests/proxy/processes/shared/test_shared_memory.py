"""The memory that processes share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from proxy.core.fleet.breaker import BreakerSnapshot
from proxy.core.fleet.worker_load import WorkerLoad
from proxy.core.queue.buckets import LastDispatch
from proxy.processes.shared.process_sheet import (
    BYTES,
    CHANGES,
    MAX_TENANTS,
    MAX_WORKERS,
    PLACES,
    RING,
    RINGS,
    WAITING,
    QueueFront,
    TenantRow,
    TrafficRow,
)
from proxy.processes.shared.shared_memory import SharedTable
from proxy.wire.worker.connection import WorkerError

LOAD = WorkerLoad(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
BREAKER = BreakerSnapshot(False, True, 12.5, 3, 2, 11.0, "503")


@pytest.fixture
def table() -> Iterator[SharedTable]:
    table = SharedTable.make(3)
    yield table
    table.close()


@pytest.mark.parametrize("why", ["", "100", "503", "999", *WorkerError])
def test_reason_of_an_open_breaker_is_stored(table: SharedTable, why: str) -> None:
    sheet = table.sheet(1)
    for flags in ((True, False), (False, True), (False, False)):
        breaker = BreakerSnapshot(*flags, 12.5, 3, 2, 11.0, str(why))
        sheet.write_breaker(0, 7.0, breaker)
        assert sheet.read_breaker(0) == (7.0, breaker)
    sheet.write_breaker(0, 7.0, BREAKER._replace(why="unknown"))
    assert sheet.read_breaker(0)[1] == BREAKER._replace(why="")


def test_sheets_do_not_overlap(table: SharedTable) -> None:
    sheets = [table.sheet(i) for i in range(3)]
    last = MAX_WORKERS - 1
    for number, sheet in enumerate(sheets):
        for row in (0, last):
            sheet.write_load(row, LOAD._replace(requests=number), number + row / 2)
            sheet.write_breaker(row, 7.0 + number, BREAKER)
        for place in (0, PLACES - 1):
            sheet.write_front(place, 2, QueueFront(1, 2.5, number, 0.5))
            sheet.write_last(place, LastDispatch(number, passed=True, passer=2))
            sheet.write_traffic(place, TrafficRow(1, number, 2.5))
        for tenant in (0, MAX_TENANTS - 1):
            row_of_tenant = TenantRow(
                number, 5, (0.5, 0.0, number), (1.0, 2.0, 3.0), (number, 4.0, 5.0)
            )
            sheet.write_usage(tenant, row_of_tenant)
        sheet.write_count(WAITING, number)
        sheet.write_count(BYTES, 2**40 + number)
    for number, sheet in enumerate(sheets):
        for row in (0, last):
            assert sheet.read_load(row) == (LOAD._replace(requests=number), number + row / 2)
            assert sheet.read_breaker(row) == (7.0 + number, BREAKER)
        assert sheet.read_load(1) == (WorkerLoad(), 0.0)
        assert sheet.read_breaker(1)[0] == 0.0
        assert sheet.read_front(PLACES - 1, 2) == QueueFront(1, 2.5, number, 0.5)
        assert sheet.read_last(PLACES - 1) == LastDispatch(number, passed=True, passer=2)
        assert sheet.read_traffic(PLACES - 1) == TrafficRow(1, number, 2.5)
        assert sheet.read_usage(MAX_TENANTS - 1) == TenantRow(
            number, 5, (0.5, 0.0, number), (1.0, 2.0, 3.0), (number, 4.0, 5.0)
        )
        assert sheet.read_front(PLACES - 1, 1) == QueueFront()
        assert (sheet.count(WAITING), sheet.count(BYTES)) == (number, 2**40 + number)
        assert sheet.count(CHANGES) == 0


@pytest.mark.parametrize("ring", RINGS)
def test_changes_are_listed_unless_a_round_was_missed(table: SharedTable, ring: int) -> None:
    sheet = table.sheet(1)
    for other in RINGS.keys() - {ring}:
        sheet.mark_changed(3, other)
    assert sheet.changed_since(0, ring) == (0, set())
    for row in (5, 9, 5):
        sheet.mark_changed(row, ring)
    assert sheet.changed_since(0, ring) == (3, {5, 9})
    assert sheet.changed_since(2, ring) == (3, {5})
    for row in range(RING):
        sheet.mark_changed(row, ring)
    assert sheet.changed_since(3, ring) == (RING + 3, set(range(RING)))
    assert sheet.changed_since(2, ring) == (RING + 3, None)


def test_clear_removes_a_process_but_not_service_of_tenants_and_notifies_others(
    table: SharedTable,
) -> None:
    sheet, other = table.sheet(1), table.sheet(2)
    sheet.write_load(4, LOAD, 1.0)
    sheet.mark_changed(4)
    sheet.write_usage(5, TenantRow(3, 6, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)))
    sheet.write_floors((7.0, 8.0, 9.0))
    other.write_load(4, LOAD, 1.0)
    table.clear(1)
    assert sheet.read_load(4) == (WorkerLoad(), 0.0)
    assert other.read_load(4)[0] == LOAD
    assert sheet.read_usage(5) == TenantRow(0, 0, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    assert sheet.read_floors() == (0.0, 0.0, 0.0)
    assert sheet.changed_since(1)[1] is None
    now = sheet.changes
    sheet.mark_changed(8)  # its successor
    assert sheet.changed_since(now) == (now + 1, {8})


def test_row_is_in_use_while_it_has_charges(table: SharedTable) -> None:
    sheet = table.sheet(0)
    assert not sheet.has_charges(3)
    sheet.write_load(3, WorkerLoad(requests=1), 0.0)
    assert sheet.has_charges(3)
    sheet.write_load(3, WorkerLoad(total_written=10, total_placed=2), 9.0)
    assert not sheet.has_charges(3)
    sheet.wipe(3)
    assert sheet.read_load(3) == (WorkerLoad(), 0.0)


def test_concurrent_read_returns_one_version(table: SharedTable) -> None:
    code = (
        "import sys; from proxy.processes.shared.process_sheet import TenantRow;"
        "from proxy.processes.shared.shared_memory import SharedTable;"
        "t = SharedTable(int(sys.argv[1]), 3); s = t.sheet(2); stop = t.sheet(1);"
        "ones, twos = (TenantRow(i, 7, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)) for i in (1, 2));"
        "exec('while not stop.count(1): s.write_usage(5, ones); s.write_usage(5, twos)')"
    )
    os.set_inheritable(table.fd, True)
    read = table.sheet(2).read_usage
    with subprocess.Popen(
        [sys.executable, "-c", code, str(table.fd)], pass_fds=[table.fd]
    ) as writer:
        try:
            while not read(5).running:
                assert writer.poll() is None
            seen = Counter(read(5) for _ in range(50_000))
        finally:
            table.sheet(1).write_count(1, 1)
    assert seen.keys() <= {TenantRow(i, 7, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)) for i in (1, 2)}


def test_tenant_rows_are_found_by_all(table: SharedTable) -> None:
    marks = [7, 7 + MAX_TENANTS, 9]
    rows = [table.tenant_row(mark) for mark in marks]
    assert rows == [7, 8, 9]
    assert [table.tenant_row(mark) for mark in reversed(marks)] == [9, 8, 7]
    cells = [table.tenant_cells(row) for row in (7, 8)]
    cells[0][1] = 2.5
    assert [list(cell) for cell in cells] == [[0.0, 2.5], [0.0, 0.0]]


def test_tenants_beyond_the_last_row_get_none(table: SharedTable) -> None:
    for mark in range(1, MAX_TENANTS + 1):
        assert table.tenant_row(mark) is not None
    assert table.tenant_row(MAX_TENANTS + 1) is None

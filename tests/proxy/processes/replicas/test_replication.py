"""Slots of workers that a host takes after it has lost the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from proxy.processes.ipc_messages import WorkersChanged
from proxy.processes.replicas.messages import Update
from proxy.processes.replicas.remote_sheets import LEASE_S
from proxy.processes.replicas.replication import Replication
from proxy.processes.shared.process_sheet import LIFE
from proxy.processes.shared.shared_memory import MAX_REMOTE, SharedTable
from tests.proxy.processes.replicas.test_remote_sheets import LOAD, known

ROW, LIMIT = 5, 8


class Host:
    """A host, and what it hears of two others."""

    def __init__(self, table: SharedTable) -> None:
        self.table = table
        self.now = 10.0
        self.replication = Replication(
            table, nullcontext, send=lambda _: None, clock=lambda: self.now
        )
        self.replication.report(WorkersChanged((known(row=ROW, most=LIMIT),)))
        self._number = 0

    def hear(self, *members: str) -> int:
        """Hear itself, then others; return how many slots are left to them."""
        self._number += 1
        for member in (self.replication.name, *members):
            heard = {self.replication.name: self.replication._number}
            update = Update(member, self._number, self.now, whole=True, heard=heard)
            self.replication.handle(update, self.now)
        self.replication._reserve(self.now)
        return self.table.reserved(ROW)

    def report(self, requests: int) -> int:
        """Send a message with this number of requests; return how many slots are left to others."""
        sheet = self.table.sheet(0)
        sheet.write_count(LIFE, 1)
        sheet.write_load(ROW, (requests, *LOAD[1:]), 0.0)
        sheet.mark_changed(ROW)
        self.now += 0.02
        assert self.replication.next_message(self.now) is not None
        return self.table.reserved(ROW)


@pytest.fixture
def host() -> Iterator[Host]:
    table = SharedTable.make(1, MAX_REMOTE)
    yield Host(table)
    table.close()


def test_host_that_reconnects_first_takes_only_its_part(host: Host) -> None:
    shared = host.hear("m", "n")
    assert shared == LIMIT - 3
    host.now += LEASE_S + 1.0
    host.replication._lost(OSError())
    assert host.table.reserved(ROW) == shared
    assert host.hear() == shared
    host.now += 0.5
    assert host.hear("m") == shared
    host.now += 0.5
    assert host.hear("m", "n") == shared


def test_host_whose_others_do_not_return_takes_all_slots(host: Host) -> None:
    host.hear("m", "n")
    host.now += LEASE_S + 1.0
    host.replication._lost(OSError())
    host.hear()
    host.now += LEASE_S + 0.1
    assert host.hear() == 0


def test_slots_are_left_to_others_before_they_hear_that_these_are_free(host: Host) -> None:
    host.hear("m", "n")
    host.report(6)
    assert host.hear("m", "n") == 1  # of two
    assert host.report(0) == 5

"""Sheets of other hosts: clocks, silence, restarts, and what stays of hosts that ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proxy.processes.ipc_messages import KnownWorker, WorkersChanged
from proxy.processes.replicas.local_sheets import LocalSheet
from proxy.processes.replicas.messages import ProcessChanges, Update, decode, encode
from proxy.processes.replicas.remote_sheets import FORGET_S, LEASE_S, MAX_HISTORY, RemoteSheets
from proxy.processes.replicas.worker_names import WorkerNames
from proxy.processes.shared.process_sheet import LIFE, WAITING, TenantRow
from proxy.processes.shared.shared_memory import MAX_REMOTE, SharedTable
from tests.present import present
from tests.proxy.core.making import spec

FIRST, HISTORY = 2, 1  # sheets of a host with one process
LOAD = (3, 3, 500, 0, 100, 900, 1, 0, 0, 7, 4)
MARK, NOTHING = 12345, (0.0, 0.0, 0.0)


def known(name: str = "a", row: int | None = 5, most: int | None = None) -> KnownWorker:
    """Return a worker as the leader reports it."""
    return KnownWorker(
        spec(name, most=most), row, 0.0, up=True, probed=True, up_since=0.0, awaited_since=0.0,
        draining=False, models=(), reported_max_model_len=None, gauges=None, pace=None,
    )  # fmt: skip


class Receiver:
    def __init__(self) -> None:
        self.table = SharedTable.make(1, MAX_REMOTE)
        self.workers = WorkerNames()
        self.workers.apply(WorkersChanged((known(),)))
        self.sheets = RemoteSheets(self.table, self.workers)
        self.numbers: dict[str, int] = {}

    def receive(
        self, now: float, *parts: ProcessChanges, member: str = "m", **more: object
    ) -> None:
        """Receive the next update of a member whose clock is 1000 s ahead."""
        number = self.numbers[member] = self.numbers.get(member, 0) + 1
        update = Update(member, number, now + 1000.0, processes=list(parts), **more)
        self.sheets.apply(decode(encode(update)), now)

    def settled(self, sheet: int) -> float:
        row = present(self.table.tenant_row(MARK))
        return sum(self.table.sheet(sheet).read_usage(row).settled)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.table.close()


def loaded(index: int = 0, life: int = 1, waiting: int = 2) -> ProcessChanges:
    name = next(iter(WORKERS))
    return ProcessChanges(
        index,
        life,
        waiting=waiting,
        loads={name: (LOAD, 1012.0)},
        breakers={name: (1008.0, (False, False, 1030.0, 3, 1, 0.0, "500"))},
        usage={MARK: (1, 0, (70.0, 0.0, 0.0), NOTHING, NOTHING)},
    )


WORKERS = {f"a {spec('a').url}": 5}


def test_times_are_those_of_this_host(receiver: Receiver) -> None:
    receiver.receive(10.5, loaded(), whole=True)
    receiver.receive(11.0)  # this one was faster
    receiver.sheets.apply(Update("m", 3, 1012.0, processes=[loaded()]), 11.5)
    sheet = receiver.table.sheet(FIRST)
    assert sheet.read_load(5) == (LOAD, 11.5)
    at, snapshot = sheet.read_breaker(5)
    assert (at, snapshot) == (7.5, (False, False, 29.5, 3, 1, 0.0, "500"))


def test_updates_count_only_after_the_whole_state(receiver: Receiver) -> None:
    receiver.receive(1.0, loaded())
    assert receiver.sheets.wants_whole(1.0)
    assert receiver.table.remote_in_use == 0
    receiver.receive(1.1, loaded(), whole=True)
    assert not receiver.sheets.wants_whole(1.1)
    receiver.numbers["m"] += 1  # a message was lost
    receiver.receive(1.2, loaded(waiting=9))
    assert receiver.sheets.wants_whole(1.2)
    assert receiver.table.sheet(FIRST).count(WAITING) == 2
    assert receiver.table.sheet(FIRST).has_charges(5)
    assert receiver.sheets.expire(1.3 + LEASE_S) == ["m"]
    assert not receiver.table.sheet(FIRST).has_charges(5)


def test_silent_host_frees_its_requests_but_keeps_what_tenants_were_charged(
    receiver: Receiver,
) -> None:
    receiver.receive(1.0, loaded(), whole=True)
    sheet = receiver.table.sheet(FIRST)
    assert receiver.sheets.expire(1.0 + LEASE_S) == []
    assert sheet.has_charges(5)
    assert receiver.sheets.expire(1.1 + LEASE_S) == ["m"]
    assert not sheet.has_charges(5)
    assert (sheet.count(WAITING), receiver.settled(FIRST)) == (0, 70.0)
    assert not receiver.sheets.wants_whole(1.1 + LEASE_S)
    # It returns: the same charges, in the same sheet.
    receiver.receive(9.0, loaded())
    assert receiver.sheets.wants_whole(9.0)
    receiver.receive(9.1, loaded(), whole=True)
    assert sheet.has_charges(5)
    assert receiver.settled(FIRST) == 70.0
    # It does not return: its charges move into the history.
    receiver.sheets.expire(9.2 + FORGET_S)
    assert receiver.settled(FIRST) == 0.0
    assert receiver.settled(HISTORY) == 70.0
    assert receiver.sheets.members == {}


def test_all_hosts_have_one_history(receiver: Receiver) -> None:
    """A host that joins later learns it; a host that ended counts once."""
    receiver.receive(1.0, loaded(), whole=True)
    receiver.receive(1.1, leaves=True)
    assert receiver.settled(HISTORY) == 70.0
    late = Receiver()
    history = receiver.sheets.history
    for member in ("x", "y"):
        late.receive(2.0, member=member, whole=True, history=history)
    assert late.settled(HISTORY) == 70.0
    receiver.receive(2.0, member="x", whole=True, history=history)
    assert receiver.settled(HISTORY) == 70.0
    late.table.close()


def test_history_and_sheets_are_bounded(receiver: Receiver) -> None:
    for number in range(MAX_HISTORY + 10):
        receiver.receive(1.0, loaded(), member=f"m{number}", whole=True)
        receiver.receive(1.0, member=f"m{number}", leaves=True)
    assert len(receiver.sheets.history) == MAX_HISTORY
    total = 70.0 * (MAX_HISTORY + 10)
    assert receiver.settled(HISTORY) == total
    # Another host still names the oldest.
    receiver.receive(1.0, member="m", whole=True, history={"m0/0": {MARK: (70.0, 0.0, 0.0)}})
    assert receiver.settled(HISTORY) == total
    receiver.receive(1.0, *(loaded(index) for index in range(MAX_REMOTE)), whole=True)
    assert (
        sum(receiver.table.sheet(at).has_charges(5) for at in range(MAX_REMOTE + 1))
        == MAX_REMOTE - 1
    )


def test_history_of_many_tenants_is_small_and_new_hosts_learn_all_of_it(receiver: Receiver) -> None:
    tenants, ended = 300, 64  # more charges than a history has
    usage = dict.fromkeys(range(1, tenants), (0, 0, (70.0, 0.0, 0.0), NOTHING, NOTHING))
    usage[MARK] = usage.pop(1)
    for number in range(ended):
        part = ProcessChanges(0, 1, usage=dict(usage))
        receiver.receive(1.0, part, member=f"m{number}", whole=True)
        receiver.receive(1.0, member=f"m{number}", leaves=True)
    sheets = receiver.sheets
    whole = {
        "history": sheets.history, "folded": sheets.folded, "folded_names": sheets.folded_names
    }  # fmt: skip
    assert len(encode(Update("x", 1, 0.0, whole=True, **whole))) < 130_000
    late = Receiver()
    late.receive(2.0, member="x", whole=True, history={"m1/0": {MARK: (70.0, 0.0, 0.0)}})
    for member in ("y", "z"):
        late.receive(2.0, member=member, whole=True, **whole)
    assert late.settled(HISTORY) == receiver.settled(HISTORY) == 70.0 * ended
    late.table.close()


def test_tenants_without_charges_are_left_out_of_whole_updates(receiver: Receiver) -> None:
    """A tenant that had requests when it was last reported has none then."""
    receiver.receive(1.0, loaded(), whole=True)
    row = present(receiver.table.tenant_row(MARK))
    assert receiver.table.sheet(FIRST).read_usage(row).running == 1
    receiver.receive(1.1, ProcessChanges(0, 1), whole=True)
    assert receiver.table.sheet(FIRST).read_usage(row) == TenantRow()
    sheet = LocalSheet(0, receiver.table)
    receiver.table.sheet(0).write_count(LIFE, 1)
    assert present(sheet.changes(receiver.workers, whole=True)).usage == {}
    receiver.table.sheet(0).write_usage(row, TenantRow(running=1))
    assert present(sheet.changes(receiver.workers, whole=True)).usage.keys() == {MARK}


def test_restarted_process_is_read_anew(receiver: Receiver) -> None:
    receiver.receive(1.0, loaded(), whole=True)
    sheet = receiver.table.sheet(FIRST)
    before = sheet.count(LIFE)
    receiver.receive(1.1, loaded())
    assert sheet.count(LIFE) == before
    receiver.receive(1.2, loaded(life=2), gone=[0])
    assert sheet.count(LIFE) != before
    assert sheet.has_charges(5)
    receiver.receive(1.3, gone=[0])
    assert not sheet.has_charges(5)
    assert receiver.settled(FIRST) == 70.0


def test_worker_that_this_host_finds_later_has_its_load(receiver: Receiver) -> None:
    receiver.workers.apply(WorkersChanged((), removed=("a",)))
    receiver.receive(1.0, loaded(), whole=True)
    assert not receiver.table.sheet(FIRST).has_charges(8)
    receiver.sheets.write_new_rows(receiver.workers.apply(WorkersChanged((known(row=8),))))
    assert receiver.table.sheet(FIRST).read_load(8)[0] == LOAD


def test_names_follow_the_leader() -> None:
    workers = WorkerNames()
    name = next(iter(WORKERS))
    assert workers.apply(WorkersChanged((known(most=4),))) == [name]
    assert workers.apply(WorkersChanged((known(most=None),))) == []
    assert (workers.rows, workers.names, workers.limits) == ({name: 5}, {5: name}, {})
    assert workers.apply(WorkersChanged((known("b", 5, 2),))) == [f"b {spec('b').url}"]  # reused
    assert workers.names == {5: f"b {spec('b').url}"}
    assert workers.apply(WorkersChanged((known("c", 6),), complete=True)) == [f"c {spec('c').url}"]
    assert workers.names == {6: f"c {spec('c').url}"}
    assert workers.apply(WorkersChanged((known("c", None),))) == []
    assert (workers.rows, workers.limits) == ({}, {})


def test_worker_that_another_host_removed_has_no_charges_of_it(receiver: Receiver) -> None:
    receiver.receive(1.0, loaded(), whole=True)
    sheet = receiver.table.sheet(FIRST)
    part = loaded()
    part.loads.clear()
    receiver.receive(1.1, part, whole=True)
    assert not sheet.has_charges(5)


def test_sheets_of_silent_hosts_are_given_to_living_ones(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    most = MAX_REMOTE - 1
    receiver.receive(1.0, *(loaded(index) for index in range(most)), whole=True)
    receiver.receive(1.1, loaded(), member="n", whole=True)
    assert "more than 63 router processes" in caplog.text
    assert receiver.sheets.wants_whole(1.1)
    receiver.sheets.expire(1.2 + LEASE_S)
    receiver.receive(1.3 + LEASE_S, loaded(), member="n", whole=True)
    assert not receiver.sheets.wants_whole(1.3 + LEASE_S)
    assert list(receiver.sheets.members) == ["n"]
    assert sum(receiver.table.sheet(at).has_charges(5) for at in range(MAX_REMOTE + 1)) == 1

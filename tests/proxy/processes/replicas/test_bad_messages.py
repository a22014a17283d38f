"""Messages of a peer with numbers that do not fit: nothing is raised, nothing written elsewhere."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from proxy.processes.ipc_messages import WorkersChanged
from proxy.processes.replicas.messages import MAX_INT, ProcessChanges, Update, encode
from proxy.processes.replicas.replication import Replication
from proxy.processes.shared.process_sheet import FRONTS, LOG, PLACES, SHEET_WORDS, WORD
from proxy.processes.shared.shared_memory import MAX_REMOTE, SharedTable
from tests.proxy.processes.replicas.test_remote_sheets import LOAD, MARK, NOTHING, WORKERS, known

NAME = next(iter(WORKERS))
FRONT, LAST, TRAFFIC = (1, 2.0, 3.0, 4.0), (5.0, True, 1), (1, 2, 3.0)
USAGE = (1, 0, (70.0, 0.0, 0.0), NOTHING, NOTHING)
CLOSED = (True, False, 0.0, 0, 0, 0.0, "")
GOOD = {
    "waiting": 1,
    "loads": {NAME: (LOAD, 1.0)},
    "breakers": {NAME: (8.0, (False, False, 30.0, 3, 1, 0.0, "500"))},
    "fronts": {0: FRONT, FRONTS - 1: FRONT},
    "lasts": {0: LAST, PLACES - 1: LAST},
    "traffic": {0: TRAFFIC, PLACES - 1: TRAFFIC},
    "usage": {MARK: USAGE, MAX_INT: USAGE},
    "floors": (1.0, 2.0, 3.0),
    "prefixes": bytes(range(256)) * (LOG // 256 * WORD),
}
BAD = {
    "waiting": [{"waiting": MAX_INT + 1}],
    "loads": [
        {"loads": {NAME: (load, 1.0)}}
        for load in ((), LOAD[1:], (*LOAD, 0), (MAX_INT + 1, *LOAD[1:]))
    ],
    "breakers": [{"breakers": {NAME: (8.0, (*CLOSED[:3], MAX_INT + 1, *CLOSED[4:]))}}],
    "fronts": [{"fronts": {at: FRONT}} for at in (-1, FRONTS, MAX_INT)],
    "lasts": [{"lasts": {at: LAST}} for at in (-1, PLACES, MAX_INT)],
    "traffic": [{"traffic": {at: TRAFFIC}} for at in (-1, PLACES, MAX_INT)],
    "usage": [{"usage": {mark: USAGE}} for mark in (-1, 0, MAX_INT + 1)],
    "floors": [{"floors": floors} for floors in ((), (1.0, 2.0), (1.0, 2.0, 3.0, 4.0))],
    "prefixes": [{"prefixes": bytes(LOG * WORD + 1)}],
}  # fmt: skip
SHEET_BYTES = SHEET_WORDS * WORD


class Host:
    def __init__(self) -> None:
        self.table = SharedTable.make(1, MAX_REMOTE)
        self.replication = Replication(
            self.table, nullcontext, send=lambda _: None, clock=lambda: 10.0
        )
        self.replication.report(WorkersChanged((known(),)))
        self._number = 0

    def hear(self, **changes: object) -> None:
        self._number += 1
        part = ProcessChanges(0, 1, **changes)
        self.replication._receive(
            encode(Update("m", self._number, 10.0, whole=True, processes=[part]))
        )

    @property
    def memory(self) -> bytes:
        return self.table.memory[:]


@pytest.fixture
def host() -> Iterator[Host]:
    found = Host()
    yield found
    found.table.close()


def test_greatest_indices_are_written_into_the_sender_s_sheet(host: Host) -> None:
    before = host.memory
    host.hear(**GOOD)
    assert not host.replication.errors
    sheet = host.table.sheet(2)
    assert sheet.read_front(PLACES - 1, 2) == FRONT
    assert sheet.read_traffic(PLACES - 1) == TRAFFIC
    assert sheet.read_log(0) == (LOG, GOOD["prefixes"])
    after = host.memory
    first, end = 2 * SHEET_BYTES, 3 * SHEET_BYTES
    assert before[:first] == after[:first]
    assert before[end : 65 * SHEET_BYTES] == after[end : 65 * SHEET_BYTES]


@pytest.mark.parametrize("field", BAD)
def test_number_that_does_not_fit_is_refused_with_its_message(host: Host, field: str) -> None:
    host.hear(**GOOD)
    before = host.memory
    for changes in BAD[field]:
        host.hear(**GOOD | changes)
    assert host.replication.errors == len(BAD[field])
    assert host.memory == before
    host.hear(**GOOD | {"waiting": 7})
    assert host.replication.sheets.members["m"].processes[0].waiting == 7


def test_damaged_messages_are_survived(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    part = ProcessChanges(0, 1, **GOOD | {"prefixes": bytes(32)})
    message = encode(Update("m", 1, 10.0, whole=True, heard={"n": 1}, processes=[part], gone=[0]))
    own = host.memory[:SHEET_BYTES]
    rng = random.Random(1)
    caplog.set_level(logging.WARNING, "proxy")  # an earlier test may have set another
    for _ in range(1000):
        damaged = bytearray(message)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        host.replication._receive(bytes(damaged))
    assert 0 < host.replication.errors < 1000
    assert len(caplog.messages) == 1
    assert host.memory[:SHEET_BYTES] == own


@pytest.mark.parametrize("length", [1, LOG - 1, LOG, LOG + 1, 3 * LOG])
@pytest.mark.parametrize("before", [0, 1, LOG - 1])
def test_log_is_written_within_its_place(host: Host, before: int, length: int) -> None:
    own, after = host.table.sheet(0), host.table.sheet(1)
    after.write_count(0, 5)
    own.write_log(bytes(before * WORD))
    words = b"\1" * (length * WORD)
    own.write_log(words + b"\2")  # a part of a word is not written
    assert own.read_log(before) == (before + length, words if length <= LOG else b"")
    assert after.count(0) == 5

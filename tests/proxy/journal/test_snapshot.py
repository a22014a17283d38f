"""A snapshot is read in parts."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from proxy.journal.engine_state import EngineJournal
from proxy.journal.messages import MalformedMessageError
from proxy.journal.snapshot import SnapshotReader
from tests.proxy.journal.simulated_engine import SimulatedEngine, replica_of

encode = msgspec.msgpack.encode


def test_parts_are_as_large_as_the_limit() -> None:
    engine = SimulatedEngine(Random(1))
    for _ in range(200):
        engine.step()
    payload = encode(engine.snapshot())
    reader, parts = SnapshotReader(engine.position, payload, 1000), 1
    while not reader.read(500):
        parts += 1
    assert len(payload) / 1500 < parts <= len(payload) / 500 + 1
    assert reader.block_tokens == 16
    journal = EngineJournal()
    assert journal.apply_snapshot(reader)
    assert replica_of(journal) == engine.requests()


@pytest.mark.parametrize(
    "row",
    [
        [],
        [1],
        {},
        1,
        [1, "a", 1, b"", 1, True, [-1]],
        [1, "a", 1, b"", 1, 1, []],
        [1, "a", 1, "", 1, True, []],
        ["1", "a", 1, b"", 1, True],
    ],
)
def test_wrong_rows_are_refused(row: object) -> None:
    reader = SnapshotReader(SimulatedEngine(Random(1)).position, encode([16, [row]]), 1000)
    with pytest.raises(MalformedMessageError, match="request in a snapshot: "):
        reader.read()

"""The replica of one engine equals the engine after each recovery."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from proxy.journal.engine_state import MAX_COMPLETED, MAX_OWN_NAMES, EngineJournal
from proxy.journal.messages import Position
from tests.proxy.journal.simulated_engine import (
    SimulatedEngine,
    read_snapshot,
    read_step,
    replica_of,
)

RUN = b"r" * 8
NAMES = (
    "arrived", "named", "cleared", "evicted", "resident", "numbers", "counts", "tokens",
    "preempted", "ended", "forgotten", "found",
)  # fmt: skip


class CacheRecord:
    """Names and resident tokens by number, as a listener sees them."""

    def __init__(self) -> None:
        self.names: dict[int, bytes] = {}
        self.tokens: dict[int, int] = {}
        self.found_tokens: dict[int, int] = {}

    def restart(self, block_tokens: int) -> None:
        assert block_tokens
        self.names, self.tokens = {}, {}

    def add_name(self, number: int, name: bytes, prompt_tokens: int) -> None:
        assert prompt_tokens
        assert number not in self.names
        self.names[number] = name

    def record_found(self, number: int, tokens: int) -> None:
        assert number not in self.tokens
        self.found_tokens[number] = tokens

    def record_resident(self, number: int, tokens: int) -> None:
        self.tokens[number] = tokens

    def record_evicted(self, number: int, first: int, last: int) -> None:
        assert first < last
        self.tokens[number] = min(self.tokens[number], first)

    def clear(self) -> None:
        self.tokens = dict.fromkeys(self.tokens, 0)

    def forget(self, number: int) -> None:
        self.names.pop(number, None)
        self.tokens.pop(number, None)


def step(number: int = 1, **values: Any) -> tuple[Position, Any]:
    """Return a position and a step with these values."""
    payload = [values.get(name, [] if name != "cleared" else False) for name in NAMES]
    return Position(RUN, number), read_step(payload)


def journal_with(*ids: str, **settings: int) -> EngineJournal:
    """Return a replica with running requests, numbered from 1."""
    journal = EngineJournal(**settings)
    rows = [[number, name, 100, b"", 0, True, []] for number, name in enumerate(ids, 1)]
    assert journal.apply_snapshot(read_snapshot(Position(RUN, 0), [16, rows]))
    return journal


def test_own_names_are_noted_at_arrival_and_bounded() -> None:
    journal, record = journal_with(), CacheRecord()
    journal.listener = record
    for index in range(MAX_OWN_NAMES + 1):
        journal.expect(f"x{index}", b"%d" % index)
    new = [[1, "chatcmpl-x0-0123abcd", 9], [2, "cmpl-x1-0-0123abcd", 9], [3, "other", 9]]
    assert journal.apply_step(*step(arrived=new))
    assert record.names == {2: b"1"}
    assert journal.apply_step(*step(2, arrived=[[4, "chatcmpl-x1-0123abcd", 9]]))
    assert record.names == {2: b"1"}  # the name was used


def tokens_of(journal: EngineJournal, request_id: str) -> list[Sequence[int]]:
    return [request.tokens.tolist() for request in journal.streams(request_id)]


@pytest.mark.parametrize("seed", range(40))
def test_replica_equals_the_engine_after_drops_restarts_and_late_joins(seed: int) -> None:
    random = Random(seed)
    engine = SimulatedEngine(random)
    for _ in range(random.randrange(30)):
        engine.step()
    journal, record = EngineJournal(max_kept_steps=random.choice((3, 1000))), CacheRecord()
    journal.listener = record
    snapshot: tuple[int, Position, list[Any]] | None = None  # arrives after that number of steps
    compared = 0
    for at in range(400):
        last = at > 390  # without drops, so that the replica recovers
        if not last and random.random() < 0.01:
            engine = SimulatedEngine(random, first=random.choice((1, 1000)))
        payload = engine.step()
        if last or random.random() > 0.05:
            good = journal.apply_step(engine.position, read_step(payload))
            if not good and snapshot is None:
                snapshot = at + random.randrange(5), engine.position, engine.snapshot()
        if snapshot is not None and (at >= snapshot[0] or last):
            journal.apply_snapshot(read_snapshot(snapshot[1], snapshot[2]))
            snapshot = None
        if journal.exact and (journal.run, journal.number) == engine.position:
            compared += 1
            assert replica_of(journal) == engine.requests()
            held = {number: tokens for number, tokens in record.tokens.items() if tokens}
            assert held == {n: r.resident for n, r in engine.known.items() if r.resident}
            assert record.names == {n: r.name for n, r in engine.known.items() if r.name}
    assert journal.exact
    assert compared > 100


def test_old_snapshot_does_not_replace_a_newer_state() -> None:
    journal = journal_with("chatcmpl-a-00000000")
    assert journal.apply_step(*step(1, numbers=[1], tokens=[7]))
    assert journal.apply_snapshot(read_snapshot(Position(RUN, 0), [16, []]))
    assert tokens_of(journal, "a") == [[7]]


def test_gap_keeps_the_tokens_before_it() -> None:
    journal = journal_with("chatcmpl-a-00000000")
    journal.apply_step(*step(1, numbers=[1], tokens=[7]))
    assert not journal.apply_step(*step(3, numbers=[1], tokens=[9]))
    assert (journal.exact, journal.gaps) == (False, 1)
    assert tokens_of(journal, "a") == [[7]]
    assert not journal.apply_step(*step(4))
    assert journal.gaps == 1


def test_found_tokens_come_before_resident_ones() -> None:
    journal = journal_with("chatcmpl-a-00000000")
    journal.listener = record = CacheRecord()
    assert journal.apply_step(*step(1, found=[1, 16], resident=[1, 64]))
    assert (record.found_tokens, record.tokens) == ({1: 16}, {1: 64})


def test_unknown_number_is_a_gap() -> None:
    for values in (
        {"numbers": [9], "tokens": [1]},
        {"numbers": [9], "counts": [2], "tokens": [1, 2]},
        {"evicted": [9, 0, 16]},
        {"resident": [9, 16]},
        {"found": [9, 16]},
        {"ended": [[9, "stop"]]},
        {"forgotten": [9]},
        {"arrived": [[1, "again", 1]]},
    ):
        journal = journal_with("chatcmpl-a-00000000")
        assert not journal.apply_step(*step(1, **values))
        assert (journal.exact, journal.gaps) == (False, 1)


def test_new_run_is_no_gap_but_needs_a_snapshot() -> None:
    journal = journal_with("chatcmpl-a-00000000")
    _, empty = step()
    assert not journal.apply_step(Position(b"s" * 8, 1), empty)
    assert (journal.exact, journal.gaps) == (False, 0)


def test_snapshot_of_an_earlier_run_is_recognised_at_the_next_step() -> None:
    journal = EngineJournal()
    _, empty = step()
    assert not journal.apply_step(Position(b"s" * 8, 1), empty)
    assert journal.apply_snapshot(read_snapshot(Position(RUN, 50), [16, []]))
    assert not journal.apply_step(Position(b"s" * 8, 2), empty)
    assert journal.apply_snapshot(read_snapshot(Position(b"s" * 8, 2), [16, []]))


def test_kept_steps_are_bounded() -> None:
    journal = EngineJournal(max_kept_steps=10)
    for number in range(1, 100):
        journal.apply_step(*step(number))
    assert not journal.apply_snapshot(read_snapshot(Position(RUN, 50), [16, []]))
    assert journal.apply_snapshot(read_snapshot(Position(RUN, 95), [16, []]))
    assert journal.number == 99


def test_tokens_of_a_stream_are_bounded() -> None:
    journal = journal_with("chatcmpl-a-00000000", "chatcmpl-b-00000000", max_tokens=5)
    for number in range(1, 8):
        journal.apply_step(*step(number, numbers=[1], tokens=[number]))
    journal.apply_step(*step(8, numbers=[2], counts=[6], tokens=[*range(6)]))
    journal.apply_step(*step(9, numbers=[2], counts=[2], tokens=[1, 2]))
    assert tokens_of(journal, "a") == tokens_of(journal, "b") == [[]]
    assert not any(request.complete for request in journal.requests.values())
    row = [1, "chatcmpl-a-00000000", 5, b"", 0, True, [*range(6)]]
    journal.apply_step(*step(11))
    journal.apply_snapshot(read_snapshot(Position(RUN, 11), [16, [row]], max_tokens=5))
    assert not journal.requests[1].complete


def test_streams_are_found_by_request_id() -> None:
    journal = journal_with(
        "0_chatcmpl-many-00000001",
        "1_chatcmpl-many-00000001",
        "cmpl-job-1-0-00000002",
        "chatcmpl-job-00000003",
    )
    assert [r.request_id for r in journal.streams("many")] == [
        "0_chatcmpl-many-00000001",
        "1_chatcmpl-many-00000001",
    ]
    assert [r.request_id for r in journal.streams("job-1")] == ["cmpl-job-1-0-00000002"]
    assert [r.request_id for r in journal.streams("job")] == ["chatcmpl-job-00000003"]
    assert journal.streams("none") == []


def test_likely_reading_of_an_id_comes_first() -> None:
    journal = journal_with("chatcmpl-job-1-00000001", "chatcmpl-job-00000002")
    assert [r.request_id for r in journal.streams("job")] == ["chatcmpl-job-00000002"]
    journal.apply_step(*step(1, numbers=[2], tokens=[7], ended=[[2, "stop"]]))
    assert [r.request_id for r in journal.streams("job-1")] == ["chatcmpl-job-1-00000001"]


@pytest.mark.parametrize(
    ("reason", "left"), [("abort", [[7, 8]]), ("error", [[7, 8]]), ("stop", [[7]])]
)
def test_tokens_of_ended_requests_are_kept_for_a_while(reason: str, left: list[list[int]]) -> None:
    """The client of a completed one may not have its last text yet."""
    journal = journal_with("chatcmpl-a-00000000")
    journal.apply_step(*step(1, numbers=[1], tokens=[7]))
    journal.now = 5.0
    journal.apply_step(*step(2, numbers=[1], tokens=[8], ended=[[1, reason]], forgotten=[1]))
    assert tokens_of(journal, "a") == left
    (found,) = journal.streams("a", since=5.0)
    assert found.complete
    assert journal.streams("a", since=5.1) == []  # the client has used the ID again


def test_the_last_ended_request_of_an_id_counts() -> None:
    journal = journal_with("chatcmpl-a-00000000")
    journal.apply_step(*step(1, numbers=[1], tokens=[7]))
    ended = [[1, "stop"]]
    again = [[2, "chatcmpl-a-00000001", 5]]
    journal.apply_step(*step(2, numbers=[1], tokens=[8], ended=ended, forgotten=[1], arrived=again))
    journal.apply_step(*step(3, numbers=[2], tokens=[90]))
    journal.now = 7.0
    journal.apply_step(*step(4, ended=[[2, "abort"]], forgotten=[2]))
    assert tokens_of(journal, "a") == [[90]]


def test_likely_reading_of_an_ended_id_comes_first() -> None:
    journal = journal_with("chatcmpl-a-00000000", "chatcmpl-a-1-00000001")
    journal.apply_step(*step(1, numbers=[1, 2], tokens=[7, 8]))
    journal.apply_step(*step(2, numbers=[1, 2], tokens=[17, 18]))
    journal.apply_step(*step(3, ended=[[1, "abort"]], forgotten=[1]))
    journal.now = 7.0
    journal.apply_step(*step(4, ended=[[2, "stop"]], forgotten=[2]))
    assert tokens_of(journal, "a") == [[7, 17]]


def test_few_completed_requests_keep_their_tokens() -> None:
    count = MAX_COMPLETED + 1
    journal = journal_with(*(f"chatcmpl-r{number}-{number:08}" for number in range(count)))
    numbers = [*range(1, count + 1)]
    ended = [[number, "length"] for number in numbers]
    journal.apply_step(*step(1, numbers=numbers, tokens=numbers, ended=ended))
    found = [bool(journal.streams(f"r{number}")) for number in range(count)]
    assert found == [False] + [True] * MAX_COMPLETED
    assert not any(request.tokens for request in journal.requests.values())

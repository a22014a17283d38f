"""Sessions, and what their turns leave in caches."""

from __future__ import annotations

import tracemalloc
from bisect import bisect_right

import pytest

from proxy.core.learned.prefix_index import COVERED, ENDS
from proxy.core.learned.sessions import (
    END_BYTES,
    MAX_IDLE_S,
    MAX_VISITS,
    SHORT_END_BYTES,
    Session,
    Sessions,
    Visit,
    end_mark,
)

LONG = tuple(range(1, 41))
BYTES = COVERED[len(LONG)]


@pytest.mark.parametrize(
    ("capacity", "written", "left"),
    [
        (0, 10**9, 6000),  # unknown
        (10_000, 500, 6000),
        (10_000, 4500, 6000),
        (10_000, 5500, 5000),  # the end of the prompt is evicted first
        (10_000, 20_000, 0),
    ],
)
def test_what_was_written_later_evicts(capacity: int, written: int, left: int) -> None:
    assert Visit(0, 0.0, 6000, 500).cached_tokens(capacity, written) == left


def test_prompt_of_a_session_begins_like_the_last_one() -> None:
    session = Session(1, 0.0)
    assert session.may_extend(LONG)  # nothing is known
    session.record_prompt(LONG, BYTES)
    assert session.may_extend((*LONG, 99))
    assert session.may_extend((*LONG[:35], 77, 78))  # the last half may differ
    assert session.may_extend(())  # too short to have hashes
    assert not session.may_extend((7, *LONG))
    assert not session.may_extend(LONG[:5])


def test_another_prompt_begins_anew() -> None:
    sessions = Sessions()
    session = sessions.get_or_create(1, 0.0)
    sessions.record_turn(session, LONG, BYTES, Visit(0, 0.0, 6000, 0))
    sessions.record_turn(session, (*LONG, 99), BYTES, Visit(1, 0.0, 7000, 0))
    assert [v.worker for v in session.visits] == [0, 1]
    other = tuple(range(101, 141))
    sessions.record_turn(session, other, BYTES, Visit(2, 0.0, 300, 0))
    assert [v.worker for v in session.visits] == [2]


def test_one_side_request_changes_nothing() -> None:
    sessions = Sessions()
    session = sessions.get_or_create(1, 0.0)
    for _ in range(3):
        sessions.record_turn(session, LONG, BYTES, Visit(0, 0.0, 6000, 0))
        sessions.record_turn(session, (7, 8), COVERED[2], Visit(2, 0.0, 300, 0))
        assert [v.worker for v in session.visits] == [0]
    sessions.record_turn(session, (7, 9), COVERED[2], Visit(2, 0.0, 300, 0))
    assert [v.worker for v in session.visits] == [2], "the prompt was made shorter"


def test_prompt_extends_the_last_one_only_with_nearly_all_of_it() -> None:
    session = Session(1, 0.0)
    assert session.extends_nearly_all(LONG)  # nothing is known
    session.record_prompt(LONG, BYTES)
    assert session.extends_nearly_all((*LONG, 99))
    assert session.extends_nearly_all((*LONG[:38], 77))
    assert not session.extends_nearly_all((*LONG[:25], 77, 78))
    assert session.may_extend((*LONG[:33], 77, 78))


def test_only_the_last_visits_are_kept() -> None:
    session = Session(1, 0.0)
    for worker in (0, *range(MAX_VISITS + 1), 2):
        session.add_visit(Visit(worker, 0.0, worker, 0))
    assert [v.worker for v in session.visits] == [1, 3, 4, 2]


@pytest.mark.parametrize("size", [30_000, 500_000])
@pytest.mark.parametrize(
    ("of_end", "goes_on"),
    [
        (0.0, True),
        (0.9, True),  # a client may change the end, such as a mark for caches
        (1.7, False),
    ],
)
def test_prompt_with_the_first_part_only_is_another_one(
    size: int, of_end: float, goes_on: bool
) -> None:
    whole = tuple(range(1, bisect_right(ENDS, size) + 1))
    end_bytes = SHORT_END_BYTES if size == 30_000 else END_BYTES
    common = bisect_right(ENDS, size - of_end * end_bytes)
    visit = Visit(0, 0.0, 9000, 0, *end_mark(whole, size))
    assert visit.may_go_on((*whole[:common], *range(9001, 9100))) == goes_on
    assert visit.may_go_on(()), "too short to have blocks, or behind a stored response"


def test_visit_without_blocks_is_of_any_prompt() -> None:
    assert end_mark((), 0) == (0, 0)
    assert Visit(0, 0.0, 50, 0, *end_mark((), 0)).may_go_on(LONG)
    assert end_mark(LONG[:2], 300) == (1, 1)


def test_idle_sessions_are_forgotten() -> None:
    sessions = Sessions(max_sessions=3)
    for key in (1, 2, 3, 1, 4):
        sessions.get_or_create(key, 0.0)
    assert [key for key in range(9) if sessions.get(key)] == [1, 3, 4]
    sessions.get_or_create(4, 1.0)
    sessions.get_or_create(5, MAX_IDLE_S)
    assert [key for key in range(9) if sessions.get(key)] == [4, 5]


def test_renamed_session_has_its_new_key_only() -> None:
    sessions = Sessions()
    session = sessions.get_or_create(1, 0.0)
    sessions.rename(session, 2)
    assert (sessions.get(1), sessions.get(2), len(sessions)) == (None, session, 1)


def test_memory_of_a_session() -> None:
    tracemalloc.start()
    sessions, count = Sessions(), 2000
    for number in range(count):
        session = sessions.get_or_create(number << 40, float(number))
        hashes = (number << 41,)
        end = end_mark(hashes, BYTES)
        visit = Visit(3, float(number), 300_000 + number, 10**9 + number, *end)
        sessions.record_turn(session, hashes, BYTES, visit)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / count < 600

"""Prefix affinity across processes."""

from __future__ import annotations

import random

import pytest

from proxy.core.learned.prefix_index import BLOCKS
from proxy.core.learned.sessions import Turn, end_mark
from proxy.core.model.role import Role
from proxy.core.model.types import Outcome
from proxy.processes.shared import prefixes as shared_prefixes
from proxy.processes.shared.process_sheet import LOG, WORD
from proxy.processes.shared.shared_memory import SharedTable
from tests.proxy.core.making import make_info, placed, spec
from tests.proxy.processes.virtual_group import MakeGroup, VirtualGroup

WORKERS = tuple(spec(f"w{i}") for i in range(5))


def submit(group: VirtualGroup, index: int, prefix: tuple[int, ...]) -> str:
    """Place a prompt with this prefix; return its worker's name."""
    lease = placed(group.routers[index].submit(make_info(4000, prefix=prefix), group.now))
    group.end_turn()
    group.finish(index, lease)
    group.now += 1.0
    return lease.worker.name


def test_conversation_stays_on_its_worker_in_any_process(make_all: MakeGroup) -> None:
    group = make_all(3, *WORKERS)
    for start in range(20):
        prefix = tuple(range(1000 * start, 1000 * start + 20))
        first = submit(group, start % 3, prefix)
        for index in range(3):
            prefix = (*prefix, prefix[-1] + 1)
            assert submit(group, index, prefix) == first


def test_session_is_known_in_all_processes(make_all: MakeGroup) -> None:
    group = make_all(3, *WORKERS)
    for number in range(12):
        info = make_info(4000, prefix=(1, 2, 3, *range(10, 20 + number)))
        info.session = 7
        lease = placed(group.routers[number % 3].submit(info, group.now))
        group.end_turn()
        group.finish(number % 3, lease)
        for _ in range(2):  # tokens, then the turn
            group.read_all(after_s=1.0)
        assert lease.decision.turn == (Turn.STAYED if number else Turn.NEW)
        known = [router.fleet.roster.sessions.get(7) for router in group.routers]
        assert len({(s.depth, s.mark, s.tail) for s in known if s is not None}) == 1
        visits = [[(v.tokens, v.depth, v.mark) for v in s.visits] for s in known if s is not None]
        assert visits == [[(4000, *end_mark(info.prefix, info.prefix_bytes))]] * 3


def test_chain_of_responses_is_one_session_in_all_processes(make_group: MakeGroup) -> None:
    group = make_group(3, *WORKERS)
    keys: list[int] = [0]
    for number in range(6):
        info, router = make_info(400), group.routers[number % 3]
        info.is_chained, info.session = True, keys[-1]
        lease = placed(router.submit(info, group.now))
        router.leases.record_response_id(lease, f"resp_{number}", group.now)
        group.end_turn()
        group.finish(number % 3, lease)
        for _ in range(2):
            group.read_all(after_s=1.0)
        assert lease.session is not None
        keys.append(lease.session.key)
        for each in group.routers:
            sessions = each.fleet.roster.sessions
            assert (len(sessions), sessions.get(keys[-1]) is None) == (1, False)
    assert len(set(keys)) == 7


def test_log_of_a_restarted_process_is_read_from_the_start(make_group: MakeGroup) -> None:
    group = make_group(2, *WORKERS)
    submit(group, 0, tuple(range(20)))
    group.read_all()
    group.restart(0)
    prefix = tuple(range(500, 520))
    first = submit(group, 0, prefix)
    assert submit(group, 1, prefix) == first


def known_prefix(group: VirtualGroup, index: int, prefix: tuple[int, ...]) -> bool:
    """Return whether a process knows who has a prompt."""
    return bool(group.routers[index].fleet.roster.prefixes.matches(prefix))


def test_prompts_of_others_are_recorded_once_they_are_asked_for(make_group: MakeGroup) -> None:
    group = make_group(2, *WORKERS)
    for first in (100, 200):
        for end in (1, 2):
            submit(group, 0, (first, first + 1, first + 1 + end))
    group.read_all()
    prefixes = group.routers[1].fleet.roster.prefixes
    assert len(prefixes) == 0
    assert not known_prefix(group, 1, (300,))
    assert known_prefix(group, 1, (100, 101, 103))
    assert len(prefixes) == 4
    assert prefixes.matches((100, 101, 102))[0][0] == 3
    group.read_all()
    assert group.shared_loads[1].sheet.read_log(0)[0] == 0


@pytest.mark.plain("replaces a part")
@pytest.mark.parametrize(("name", "most"), [("MAX_UNREAD", 2), ("MAX_UNREAD_HASHES", 6)])
def test_oldest_unread_prompts_are_dropped(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(shared_prefixes, name, most)
    group = make_group(2, *WORKERS)
    for first in (100, 200, 300):
        submit(group, 0, (first, first + 1, first + 2))
        group.read_all()
    assert [known_prefix(group, 1, (first,)) for first in (100, 200, 300)] == [False, True, True]
    submit(group, 0, (400, 401))  # what was recorded does not count
    submit(group, 0, (500, 501))
    group.read_all()
    assert known_prefix(group, 1, (400,))


def test_unread_prompts_of_a_restarted_worker_are_dropped(make_group: MakeGroup) -> None:
    group = make_group(2, *WORKERS)
    name = submit(group, 0, (100, 101))
    group.read_all()
    group.worker(1, name).up_since += 1.0
    assert not known_prefix(group, 1, (100, 101))


def test_handed_over_prefix_is_shared_after_the_first_token(make_all: MakeGroup) -> None:
    sides = spec("p0", Role.PREFILL), spec("d0", Role.DECODE)
    group = make_all(2, *sides, transfer=True, disaggregate_above=2000)
    prefix = tuple(range(1, 69))
    lease = placed(group.routers[0].submit(make_info(4000, prefix=prefix), group.now))
    group.end_turn()
    other = placed(group.routers[1].submit(make_info(4000, prefix=prefix), group.now))
    assert (lease.prefill is None, other.prefill is None) == (False, False)
    group.finish(1, other, Outcome.CLIENT_GONE)
    group.routers[0].leases.end_prefill(lease, group.now, None)
    group.routers[0].leases.record_first_token(lease, group.now)
    group.end_turn()
    assert (
        placed(group.routers[1].submit(make_info(4000, prefix=prefix), group.now)).prefill is None
    )


def test_log_wraps_around() -> None:
    rng = random.Random(3)
    table = SharedTable.make(1)
    try:
        sheet, reader = table.sheet(0), table.sheet(0)
        read, seen, written = 0, b"", b""
        for _ in range(3000):
            record = rng.randbytes(rng.randint(1, 97) * WORD)
            sheet.write_log(record)
            written += record
            if rng.random() < 0.2:
                read, found = reader.read_log(read)
                seen += found
        assert seen == written[: len(seen)]
        assert len(seen) == read * WORD
        assert read > 5 * LOG
        # A reader that missed a round starts at the current position.
        assert reader.read_log(read - LOG - 1) == (reader.read_log(read)[0], b"")
        read, _ = reader.read_log(read)
        whole = rng.randbytes((1 + len(BLOCKS)) * WORD)  # of the largest body
        sheet.write_log(whole)
        assert reader.read_log(read) == (read + len(whole) // WORD, whole)
        assert reader.read_log(read + len(whole) // WORD)[1] == b""
    finally:
        table.close()

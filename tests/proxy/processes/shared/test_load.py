"""What one process charges, in another one's decisions: fleets in one process, over one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from proxy.core.fleet.leases import FIRST_ATTEMPT, Decision, Lease
from proxy.core.fleet.remote_load import own
from proxy.core.fleet.worker_load import WorkerLoad
from proxy.core.model.role import Role
from proxy.core.model.types import Outcome, Reason
from proxy.core.routing.view import HandoverOffer
from proxy.processes.metrics_merge import MergedFamily, add_up
from proxy.processes.shared.load import (
    FULL_READ_INTERVAL_S,
    READ_INTERVAL_S,
    ROW_REUSE_AFTER_S,
    WorkerRows,
)
from proxy.processes.shared.shared_memory import RING, ProcessSheet
from tests.proxy.core.making import (
    ask,
    idle,
    members,
    placed,
    refused,
    spec,
    waits,
)
from tests.proxy.processes.making import Crew


def test_processes_take_turns_as_one_would(crews: Callable[..., Crew]) -> None:
    crew = crews(3, *(spec(f"w{i}") for i in range(6)))
    leases = [(i % 3, crew.submit(i % 3)) for i in range(12)]
    went = [lease.worker.name for _, lease in leases]
    assert sorted(went[:6]) == sorted(went[6:]) == [f"w{i}" for i in range(6)]
    crew.look()
    for router in crew.routers:
        assert [worker.requests for worker in router.fleet.roster] == [2] * 6
    for index, lease in leases:
        crew.finish(index, lease)
    crew.look()
    for router in crew.routers:
        assert idle(router.fleet.roster)


def test_a_limit_holds_for_all_together(crews: Callable[..., Crew]) -> None:
    crew = crews(2, spec("a", most=3), queue_wait_s=5.0)
    leases = [crew.submit(0), crew.submit(1), crew.submit(0)]
    ticket = waits(crew.routers[1].submit(ask(), crew.now))
    assert not [*crew.routers[1].due(crew.now)]
    crew.finish(0, leases[0])
    [(found, lease)] = crew.routers[1].due(crew.now)
    assert found is ticket
    crew.routers[1].leases.finish(placed(lease), crew.now, Outcome.DONE)


def test_what_was_charged_by_a_process_that_died_is_released(crews: Callable[..., Crew]) -> None:
    crew = crews(2, spec("a", most=2), queue_requests=0)
    crew.submit(0)
    crew.submit(0)
    assert refused(crew.routers[1].submit(ask(), crew.now)).status == 429
    crew.table.clear(0)
    crew.now += 1
    crew.submit(1)
    worker = crew.worker(1, "a")
    assert own(worker).requests == worker.requests == 1


def test_one_who_comes_later_sees_what_is_there(crews: Callable[..., Crew]) -> None:
    crew = crews(2, spec("a"), spec("b"))
    crew.submit(0)
    for _ in range(3):
        crew.routers[0].fleet.health.failed(crew.worker(0, "a"), crew.now)
    crew.tell()
    crew.restart(1)
    assert [worker.requests for worker in crew.routers[1].fleet.roster] == [1, 0]
    assert not crew.worker(1, "a").breaker.closed


def test_a_breaker_is_everybodys(crews: Callable[..., Crew]) -> None:
    crew = crews(3, spec("a"), spec("b"))
    bad = crew.worker(0, "a")
    for _ in range(3):
        crew.routers[0].fleet.health.failed(bad, crew.now)
    crew.tell()
    for index in (1, 2):
        assert crew.submit(index).worker.name == "b"
        assert not crew.worker(index, "a").breaker.closed
    crew.now = bad.breaker.until + 0.01
    trial = next(lease for lease in (crew.submit(1) for _ in range(4)) if lease.worker.name == "a")
    assert trial.trial
    crew.look()
    assert not crew.worker(2, "a").takes(crew.now)
    crew.routers[1].leases.first_token(trial, crew.now)
    crew.tell()
    crew.look()
    assert all(crew.worker(index, "a").breaker.has_no_failures for index in range(3))
    assert [crew.worker(index, "a").breaker.opened["failed"] for index in range(3)] == [1, 1, 1]


def test_a_crash_that_all_see_at_once_is_one_opening(crews: Callable[..., Crew]) -> None:
    crew = crews(3, spec("a"))
    for index in range(3):
        for _ in range(3):
            crew.routers[index].fleet.health.failed(crew.worker(index, "a"), crew.now)
    crew.tell()
    crew.look()
    assert [crew.worker(index, "a").breaker.opened["failed"] for index in range(3)] == [1, 1, 1]
    page = {"proxy_breaker_openings_total": MergedFamily("counter", "", {"a": 1.0})}
    assert add_up([page, page, page]) == page


def test_a_panic_is_every_processs(crews: Callable[..., Crew]) -> None:
    """Breakers are shared, so that what follows from them is."""
    crew = crews(3, *map(spec, "abcd"))
    pool = ("m", False)
    for name, process in (("a", 0), ("b", 1), ("c", 2)):
        for _ in range(3):
            crew.routers[process].fleet.health.failed(crew.worker(process, name), crew.now)
        crew.tell()
        crew.look()
    for index, router in enumerate(crew.routers):
        assert router.fleet.roster.ejections.panics == {pool}
        leases = [crew.submit(index) for _ in range(4)]
        assert {lease.worker.name for lease in leases} == set("abcd")
        one = next(lease for lease in leases if lease.worker.name == "b")
        if index == 2:
            router.leases.first_token(one, crew.now)
        for lease in leases:
            crew.finish(index, lease, Outcome.CLIENT_GONE)
        crew.look()
    assert not any(router.fleet.roster.ejections.panics for router in crew.routers)
    assert [router.fleet.roster.ejections.started[pool] for router in crew.routers] == [1, 1, 1]
    page = {"proxy_pool_panics_total": MergedFamily("counter", "", {"m": 1.0})}
    assert add_up([page, page, page]) == page


def test_a_look_costs_only_now_and_then(crews: Callable[..., Crew]) -> None:
    crew = crews(2, spec("a"))
    crew.submit(0)
    crew.sharings[1].look(crew.now)
    before = crew.now
    crew.routers[0].submit(ask(), crew.now)
    for each in crew.later:
        each()
    crew.sharings[1].look(before)
    assert crew.worker(1, "a").requests == 1
    crew.sharings[1].look(before + READ_INTERVAL_S)
    assert crew.worker(1, "a").requests == 2


def test_a_limit_costs_one_read(
    crews: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = crews(4, spec("a", most=5), spec("b"))
    reads: list[int] = []
    read = ProcessSheet.read_requests

    def seen(sheet: ProcessSheet, row: int) -> int:
        reads.append(row)
        return read(sheet, row)

    a, b = (crew.worker(3, name) for name in "ab")
    crew.look()
    monkeypatch.setattr(ProcessSheet, "read_requests", seen)
    with monkeypatch.context() as patch:
        patch.setattr(ProcessSheet, "read_load", None)  # no more than that while there is room
        assert not crew.sharings[3].have_filled(b, crew.now)
        assert reads == []
        assert not crew.sharings[3].have_filled(a, crew.now)
        assert reads == [0] * 3
    for index in range(3):
        there = Decision(crew.worker(index, "a"), Reason.LEAST_LOADED)
        for _ in range(2):
            crew.routers[index].fleet.charge(ask(), there, crew.now)
    assert a.requests == 0
    assert crew.sharings[3].have_filled(a, crew.now)
    assert a.requests == 6
    assert crew.worker(3, "a").shut


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("turns", ["one after the other", "all at once"])
def test_a_burst_finds_no_room_twice(crews: Callable[..., Crew], size: int, turns: str) -> None:
    """Nothing is told at the end of a turn here, for none of them ends."""
    most, each = 8, 50
    crew = crews(size, spec("a", most=most), spec("b", most=most), queue_wait_s=5.0)
    crew.look()
    order = [index for index in range(size) for _ in range(each)]
    if turns == "all at once":
        order = [*range(size)] * each
    answers = [crew.routers[index].submit(ask(), crew.now) for index in order]
    went = Counter(each.worker.name for each in answers if isinstance(each, Lease))
    assert went == {"a": most, "b": most}
    crew.look()
    for router in crew.routers:
        assert [worker.requests for worker in router.fleet.roster] == [most, most]


def test_a_burst_of_hand_overs_finds_no_room_that_is_gone(crews: Callable[..., Crew]) -> None:
    sides = spec("p", Role.PREFILL, most=3), spec("d", Role.DECODE, most=5)
    crew = crews(3, *sides, queue_wait_s=5.0, transfer=True, disaggregate_above=1)
    crew.look()
    answers = [router.submit(ask(), crew.now) for router in crew.routers for _ in range(20)]
    legs = [each for each in answers if isinstance(each, Lease)]
    handed_over = sum(each.decision.handover is not None for each in legs)
    assert handed_over == 3
    assert len(legs) == 5  # the others whole, while there are seats


def test_decode_legs_that_move_find_no_room_twice(crews: Callable[..., Crew]) -> None:
    sides = spec("p", Role.PREFILL), *(spec(name, Role.DECODE, most=8) for name in ("d1", "d2"))
    crew = crews(2, *sides, queue_wait_s=30.0, transfer=True, disaggregate_above=1)
    crew.look()
    legs: list[tuple[int, Lease]] = []
    for number in range(12):
        router = crew.routers[number % 2]
        legs.append((number % 2, placed(router.submit(ask(), crew.now))))
        crew.tell()
        crew.look()
    assert crew.worker(0, "d2").requests == 6
    for number in (0, 1):
        crew.worker(number, "d1").up = False
    for number, lease in legs:
        if lease.worker.name == "d1":
            crew.routers[number].leases.prefilled(lease, crew.now, None)
            crew.routers[number].leases.reconsider(lease, crew.now, may_move=True)
    crew.tell()
    crew.look()
    assert [crew.worker(number, "d2").requests for number in (0, 1)] == [8, 8]


@pytest.mark.plain("replaces a part")
def test_a_filled_worker_is_tried_later(
    crews: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it would have been served whole, for a seat was long in coming, is no more so then."""
    sides = spec("p", Role.PREFILL), spec("d", Role.DECODE, most=3)
    crew = crews(2, *sides, queue_wait_s=30.0, transfer=True, disaggregate_above=1)
    crew.look()
    for name in ("may_begin", "is_seated"):
        monkeypatch.setattr(HandoverOffer, name, lambda *_: False)
    for _ in range(3):
        decision = Decision(crew.worker(0, "d"), Reason.LEAST_LOADED)
        crew.routers[0].fleet.charge(ask(), decision, crew.now)
    one = ask(1000)
    first = FIRST_ATTEMPT
    assert crew.routers[1].placer.place(one, crew.now, first, explain=False, late=True) is None
    assert one.whole == ""


def test_who_misses_a_round_of_changes_reads_all(crews: Callable[..., Crew]) -> None:
    crew = crews(2, spec("a"), spec("b"))
    lease = crew.submit(0)
    crew.look()
    for _ in range(RING):
        crew.sharings[0].sheet.mark_changed(1)
    crew.finish(0, lease)
    crew.sharings[0].sheet.mark_changed(1)
    crew.look()
    assert idle(members(crew.routers[1].fleet))


def test_a_change_that_was_never_told_is_seen_in_time(crews: Callable[..., Crew]) -> None:
    crew = crews(2, spec("a"))
    crew.look()
    crew.sharings[0].sheet.write_load(0, WorkerLoad(requests=5), 0.0)
    crew.now += READ_INTERVAL_S
    crew.look()
    assert crew.worker(1, "a").requests == 0
    crew.now += FULL_READ_INTERVAL_S
    crew.look()
    assert crew.worker(1, "a").requests == 5


def test_a_worker_that_left_is_told_of_until_its_last_request(crews: Callable[..., Crew]) -> None:
    crew = crews(2, spec("a"), spec("b"))
    leases = [crew.submit(0), crew.submit(0)]
    lease = next(each for each in leases if each.worker.name == "a")
    for index in range(2):
        worker = crew.worker(index, "a")
        crew.routers[index].fleet.roster.remove("a")
        crew.sharings[index].leave(worker)
    assert not crew.sharings[1].is_free(0)
    assert crew.sharings[1].row(lease.worker) is None
    assert crew.sharings[0].row(lease.worker) == 0
    crew.finish(0, lease)
    assert crew.sharings[1].is_free(0)
    assert crew.sharings[0].row(lease.worker) is None


def test_rows_are_given_again_when_nobody_can_use_them(crews: Callable[..., Crew]) -> None:
    crew = crews(2, spec("a"), spec("b"), spec("c"))
    a, b, c = members(crew.routers[0].fleet)
    rows = WorkerRows(crew.sharings[0], lambda: crew.now, max_rows=2)
    first = rows.of(a)
    assert first == (0, crew.now)
    assert rows.of(b) == (1, crew.now)
    assert rows.of(a) == first
    assert rows.of(c) is None
    rows.leave(a)
    assert rows.of(c) is None
    crew.sharings[1].sheet.write_load(0, WorkerLoad(requests=1), 0.0)
    crew.now += ROW_REUSE_AFTER_S
    assert rows.of(c) is None
    crew.sharings[1].sheet.write_load(0, WorkerLoad(), 0.0)
    assert rows.of(c) == (0, crew.now)


def test_another_leader_gives_rows_where_the_last_one_ended(crews: Callable[..., Crew]) -> None:
    crew = crews(2, *(spec(name) for name in "abcd"))
    a, b, c, d = members(crew.routers[0].fleet)
    rows = WorkerRows(crew.sharings[0], lambda: crew.now, max_rows=4)
    rows.adopt({a: (2, 0.5), b: (0, 0.7)})
    assert rows.of(a) == (2, 0.5)
    assert rows.of(c) == (3, crew.now)
    assert rows.of(d) is None
    crew.now += ROW_REUSE_AFTER_S
    assert rows.of(d) == (1, crew.now)


def test_a_breaker_of_the_worker_before_is_not_the_next_ones(crews: Callable[..., Crew]) -> None:
    crew = crews(2, spec("a"), spec("b"))
    for _ in range(3):
        crew.routers[1].fleet.health.failed(crew.worker(1, "a"), crew.now)
    crew.tell()
    crew.now += ROW_REUSE_AFTER_S
    newcomer = crew.routers[0].fleet.roster.add(spec("c"))
    crew.sharings[0].place(newcomer, 0, crew.now)
    assert newcomer.breaker.closed

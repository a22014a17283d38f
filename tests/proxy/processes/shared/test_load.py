"""Load of one process in the decisions of others: routers in one process over one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from proxy.core.fleet.charges import LARGE_PREFILL_TOKENS
from proxy.core.fleet.leases import FIRST_ATTEMPT, Decision, Lease
from proxy.core.fleet.remote_load import own_load
from proxy.core.fleet.worker_load import WorkerLoad
from proxy.core.model.role import Role
from proxy.core.model.types import Outcome, Reason
from proxy.core.routing.view import HandoverOffer
from proxy.processes.metrics_merge import MergedFamily, add_up
from proxy.processes.shared.load import (
    FULL_READ_INTERVAL_S,
    READ_INTERVAL_S,
    REMOTE_INTERVAL_S,
    ROW_REUSE_AFTER_S,
    WorkerRows,
)
from proxy.processes.shared.process_sheet import ProcessSheet
from proxy.processes.shared.shared_memory import LOOK_INTERVAL_S, SETTLE_S
from proxy.processes.shared.urgent_changes import UrgentChanges
from tests.present import present
from tests.proxy.core.making import make_info, placed, refused, spec, waits
from tests.proxy.processes.virtual_group import HostGroup, MakeGroup, VirtualGroup


@pytest.fixture
def host(make_processes: MakeGroup) -> VirtualGroup:
    """Make the only process of a host, whose supervisor awaits urgent changes."""
    group = make_processes(1, spec("a"))
    [shared_load], [table] = group.shared_loads, group.tables
    shared_load.urgent = UrgentChanges(table, shared_load.sheet, lambda: None)
    table.awaits_urgent = True
    return group


def test_urgent_changes_are_reported_after_they_are_written(host: VirtualGroup) -> None:
    [shared_load], [table] = host.shared_loads, host.tables
    tokens: list[int] = []
    row = present(shared_load.row(host.worker(0, "a")))
    shared_load.urgent = UrgentChanges(
        table, shared_load.sheet, lambda: tokens.append(shared_load.sheet.read_load(row)[0][2])
    )
    host.submit(0, prompt=LARGE_PREFILL_TOKENS)
    assert tokens == [LARGE_PREFILL_TOKENS]


def wake_supervisor(group: VirtualGroup) -> None:
    group.tables[0].awaits_urgent = False


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group.routers[0].submit(make_info(LARGE_PREFILL_TOKENS), group.now),
        lambda group: group.open_breaker(0, "a"),
        lambda group: group.routers[0].queue.remote_queues.report_change(),
        wake_supervisor,
    ],
)
def test_urgent_changes_are_found_before_they_are_written(
    host: VirtualGroup, change: Callable[[VirtualGroup], object]
) -> None:
    shared_load = host.shared_loads[0]
    host.end_turn()
    placed(host.routers[0].submit(make_info(), host.now))
    assert not shared_load.has_urgent()
    change(host)
    assert shared_load.has_urgent()
    host.end_turn()
    shared_load.table.awaits_urgent = True
    assert not shared_load.has_urgent()


def test_starts_and_ends_of_large_prompts_are_urgent(host: VirtualGroup) -> None:
    router, shared_load = host.routers[0], host.shared_loads[0]

    def is_urgent() -> bool:
        found = shared_load.has_urgent()
        host.end_turn()
        shared_load.table.awaits_urgent = True
        return found

    small = [router.submit(make_info(LARGE_PREFILL_TOKENS - 1), host.now) for _ in range(20)]
    assert not is_urgent()
    large = [placed(router.submit(make_info(LARGE_PREFILL_TOKENS), host.now)) for _ in range(2)]
    assert is_urgent()
    router.leases.record_first_token(large[0], host.now)
    assert is_urgent()
    for lease in (placed(small[0]), large[0]):
        router.leases.finish(lease, host.now, Outcome.DONE)
        assert not is_urgent()
    router.leases.finish(large[1], host.now, Outcome.CLIENT_GONE)
    assert is_urgent()


def test_worker_limit_holds_across_processes(make_all: MakeGroup) -> None:
    group = make_all(2, spec("a", most=3), queue_wait_s=5.0)
    leases = [group.submit(0), group.submit(1), group.submit(0)]
    ticket = waits(group.routers[1].submit(make_info(), group.now))
    assert not [*group.routers[1].pop_due(group.now)]
    group.finish(0, leases[0])
    [(found, lease)] = group.routers[1].pop_due(group.now)
    assert found is ticket
    group.routers[1].leases.finish(placed(lease), group.now, Outcome.DONE)


def test_charges_of_a_dead_process_are_released(make_group: MakeGroup) -> None:
    group = make_group(2, spec("a", most=2), queue_requests=0)
    group.submit(0)
    group.submit(0)
    assert refused(group.routers[1].submit(make_info(), group.now)).status == 429
    group.crash(0)
    group.now += 1
    group.submit(1)
    worker = group.worker(1, "a")
    assert own_load(worker).requests == worker.requests == 1


def test_breaker_is_shared(make_all: MakeGroup) -> None:
    group = make_all(3, spec("a"), spec("b"))
    bad = group.worker(0, "a")
    group.open_breaker(0, "a")
    group.end_turn()
    for index in (1, 2):
        assert group.submit(index).worker.name == "b"
        assert not group.worker(index, "a").breaker.closed
    group.now = bad.breaker.until + 0.01
    trial = next(lease for lease in (group.submit(1) for _ in range(4)) if lease.worker.name == "a")
    assert trial.trial
    group.read_all()
    assert not group.worker(2, "a").accepts(group.now)
    group.routers[1].leases.record_first_token(trial, group.now)
    group.end_turn()
    group.read_all()
    assert all(group.worker(index, "a").breaker.has_no_failures for index in range(3))
    assert [group.worker(index, "a").breaker.opened["failed"] for index in range(3)] == [1, 1, 1]


def test_crash_seen_by_all_processes_counts_as_one_opening(make_all: MakeGroup) -> None:
    group = make_all(3, spec("a"))
    for index in range(3):
        group.open_breaker(index, "a")
    group.end_turn()
    group.read_all()
    assert [group.worker(index, "a").breaker.opened["failed"] for index in range(3)] == [1, 1, 1]
    page = {"proxy_breaker_openings_total": MergedFamily("counter", "", {"a": 1.0})}
    assert add_up([page, page, page]) == page


def test_panic_is_shared(make_all: MakeGroup) -> None:
    group = make_all(3, *map(spec, "abcd"))
    pool = ("m", False)
    for name, process in (("a", 0), ("b", 1), ("c", 2)):
        group.open_breaker(process, name)
        group.end_turn()
        group.read_all()
    for index, router in enumerate(group.routers):
        assert router.fleet.roster.ejections.panics == {pool}
        leases = [group.submit(index) for _ in range(4)]
        assert {lease.worker.name for lease in leases} == set("abcd")
        lease_b = next(lease for lease in leases if lease.worker.name == "b")
        if index == 2:
            router.leases.record_first_token(lease_b, group.now)
        for lease in leases:
            group.finish(index, lease, Outcome.CLIENT_GONE)
        group.read_all()
    assert not any(router.fleet.roster.ejections.panics for router in group.routers)
    assert [router.fleet.roster.ejections.started[pool] for router in group.routers] == [1, 1, 1]
    page = {"proxy_pool_panics_total": MergedFamily("counter", "", {"m": 1.0})}
    assert add_up([page, page, page]) == page


def test_load_is_read_once_per_interval(make_processes: MakeGroup) -> None:
    group = make_processes(2, spec("a"))
    group.submit(0)
    group.shared_loads[1].read_remote_charges(group.now)
    before = group.now
    group.routers[0].submit(make_info(), group.now)
    for callback in group.callbacks:
        callback()
    group.shared_loads[1].read_remote_charges(before)
    assert group.worker(1, "a").requests == 1
    group.shared_loads[1].read_remote_charges(before + READ_INTERVAL_S)
    assert group.worker(1, "a").requests == 2


@pytest.mark.plain("replaces a part")
def test_limit_check_reads_one_number_per_process(
    make_processes: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_processes(4, spec("a", most=5), spec("b"))
    reads: list[int] = []
    read = ProcessSheet.read_requests

    def recorded(sheet: ProcessSheet, row: int) -> int:
        reads.append(row)
        return read(sheet, row)

    a, b = (group.worker(3, name) for name in "ab")
    group.read_all()
    monkeypatch.setattr(ProcessSheet, "read_requests", recorded)
    with monkeypatch.context() as patch:
        patch.setattr(ProcessSheet, "read_load", None)  # not called while there is room
        roster = group.routers[3].fleet.roster
        assert not roster.is_filled_elsewhere(b, group.now)
        assert reads == []
        assert not roster.is_filled_elsewhere(a, group.now)
        assert reads == [0] * 3
    for index in range(3):
        decision = Decision(group.worker(index, "a"), Reason.LEAST_LOADED)
        for _ in range(2):
            group.routers[index].fleet.charge(make_info(), decision, group.now)
    assert a.requests == 0
    assert group.shared_loads[3].is_filled_by_others(a, group.now)
    assert a.requests == 6
    assert group.worker(3, "a").unavailable


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("turns", ["one after the other", "all at once"])
def test_burst_within_a_turn_keeps_the_limit(
    make_processes: MakeGroup, size: int, turns: str
) -> None:
    """No turn ends here."""
    max_requests, burst = 8, 50
    group = make_processes(
        size, spec("a", most=max_requests), spec("b", most=max_requests), queue_wait_s=5.0
    )
    group.read_all()
    order = [index for index in range(size) for _ in range(burst)]
    if turns == "all at once":
        order = [*range(size)] * burst
    answers = [group.routers[index].submit(make_info(), group.now) for index in order]
    served = Counter(answer.worker.name for answer in answers if isinstance(answer, Lease))
    assert served == {"a": max_requests, "b": max_requests}
    group.read_all()
    for router in group.routers:
        assert [worker.requests for worker in router.fleet.roster] == [max_requests, max_requests]


def test_burst_of_handovers_keeps_the_limits(make_processes: MakeGroup) -> None:
    sides = spec("p", Role.PREFILL, most=3), spec("d", Role.DECODE, most=5)
    group = make_processes(3, *sides, queue_wait_s=5.0, transfer=True, disaggregate_above=1)
    group.read_all()
    answers = [router.submit(make_info(), group.now) for router in group.routers for _ in range(20)]
    leases = [answer for answer in answers if isinstance(answer, Lease)]
    handed_over = sum(lease.decision.handover is not None for lease in leases)
    assert handed_over == 3
    assert len(leases) == 5  # two are served whole


def test_moved_decode_legs_keep_the_limit(make_all: MakeGroup) -> None:
    sides = spec("p", Role.PREFILL), *(spec(name, Role.DECODE, most=8) for name in ("d1", "d2"))
    group = make_all(2, *sides, queue_wait_s=30.0, transfer=True, disaggregate_above=1)
    group.read_all()
    legs: list[tuple[int, Lease]] = []
    for number in range(12):
        router = group.routers[number % 2]
        legs.append((number % 2, placed(router.submit(make_info(), group.now))))
        group.end_turn()
        group.read_all()
    assert group.worker(0, "d2").requests == 6
    for number in (0, 1):
        group.worker(number, "d1").up = False
    for number, lease in legs:
        if lease.worker.name == "d1":
            group.routers[number].leases.end_prefill(lease, group.now, None)
            group.routers[number].leases.recheck_decode_worker(lease, group.now, may_move=True)
    group.end_turn()
    group.read_all()
    assert [group.worker(number, "d2").requests for number in (0, 1)] == [8, 8]


@pytest.mark.plain("replaces a part")
def test_request_at_a_filled_worker_is_reconsidered_later(
    make_processes: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason to serve it whole, a long wait for a seat, does not hold later."""
    sides = spec("p", Role.PREFILL), spec("d", Role.DECODE, most=3)
    group = make_processes(2, *sides, queue_wait_s=30.0, transfer=True, disaggregate_above=1)
    group.read_all()
    for name in ("may_begin", "has_slot"):
        monkeypatch.setattr(HandoverOffer, name, lambda *_: False)
    for _ in range(3):
        decision = Decision(group.worker(0, "d"), Reason.LEAST_LOADED)
        group.routers[0].fleet.charge(make_info(), decision, group.now)
    info = make_info(1000)
    placer = group.routers[1].placer
    _, decision = placer.decide(info, group.now, FIRST_ATTEMPT, late=True)
    assert decision is None
    assert info.why_whole == ""


def test_unpublished_change_is_found_by_a_full_read(make_group: MakeGroup) -> None:
    group = make_group(2, spec("a"))
    group.read_all()
    group.shared_loads[0].sheet.write_load(0, WorkerLoad(requests=5), 0.0)
    group.now += READ_INTERVAL_S
    group.read_all()
    assert group.worker(1, "a").requests == 0
    group.now += FULL_READ_INTERVAL_S
    group.read_all()
    assert group.worker(1, "a").requests == 5


def test_row_of_a_removed_worker_is_kept_until_its_last_request(make_group: MakeGroup) -> None:
    group = make_group(2, spec("a"), spec("b"))
    leases = [group.submit(0), group.submit(0)]
    lease = next(lease for lease in leases if lease.worker.name == "a")
    for index in range(2):
        worker = group.worker(index, "a")
        group.routers[index].fleet.roster.remove("a")
        group.shared_loads[index].forget_worker(worker)
    assert not group.shared_loads[1].is_free(0)
    assert group.shared_loads[1].row(lease.worker) is None
    assert group.shared_loads[0].row(lease.worker) == 0
    group.finish(0, lease)
    assert group.shared_loads[1].is_free(0)
    assert group.shared_loads[0].row(lease.worker) is None


def test_rows_are_reused_when_no_process_uses_them(make_processes: MakeGroup) -> None:
    group = make_processes(2, spec("a"))
    rows = WorkerRows(group.shared_loads[0], lambda: group.now, max_rows=2)
    assert [rows.take() for _ in range(3)] == [0, 1, None]
    rows.release(0)
    assert rows.take() is None
    group.shared_loads[1].sheet.write_load(0, WorkerLoad(requests=1), 0.0)
    group.now += ROW_REUSE_AFTER_S
    assert rows.take() is None
    group.shared_loads[1].sheet.write_load(0, WorkerLoad(), 0.0)
    assert rows.take() == 0


def test_new_leader_continues_the_assignment_of_rows(make_all: MakeGroup) -> None:
    group = make_all(2, spec("a"))
    rows = WorkerRows(group.shared_loads[0], lambda: group.now, max_rows=4)
    rows.adopt({2, 0})
    assert [rows.take() for _ in range(2)] == [3, None]
    group.now += ROW_REUSE_AFTER_S
    assert rows.take() == 1


def test_reused_row_does_not_keep_a_breaker(make_all: MakeGroup) -> None:
    group = make_all(2, spec("a"), spec("b"))
    group.open_breaker(1, "a")
    group.end_turn()
    group.now += ROW_REUSE_AFTER_S
    newcomer = group.routers[0].fleet.roster.add(spec("c"))
    group.shared_loads[0].share_worker(newcomer, 0, group.now)
    assert newcomer.breaker.closed


def test_only_process_of_a_host_reads_other_hosts_after_their_changes(make_any: MakeGroup) -> None:
    group = make_any(HostGroup, 1, spec("a"))
    [shared_load], [table] = group.shared_loads, group.tables
    worker, row = group.worker(0, "a"), shared_load.row(group.worker(0, "a"))
    assert row is not None
    table.remote_in_use = 1
    other = table.sheet(1)
    for requests in (1, 2):
        shared_load.read_remote_charges(group.now)
        other.write_load(row, WorkerLoad(requests), 0.0)
        other.mark_changed(row)
        group.now += 1.1 * REMOTE_INTERVAL_S
        shared_load.read_remote_charges(group.now)
        assert worker.requests == requests - 1
        if requests == 1:
            table.updates += 1
            group.now += 1.1 * REMOTE_INTERVAL_S
        else:
            group.now += LOOK_INTERVAL_S
        shared_load.read_remote_charges(group.now)
        assert worker.requests == requests


@pytest.mark.parametrize(
    "moments",
    [
        [(0.0, 0.3, False), (1.5, 3.3, False), (None, 4.8, True), (None, 5.1, False)],
        [(0.0, 0.0, False), (4.0, 4.5, False), (5.0, 5.5, True)],  # without a pause
    ],
)
def test_messages_of_the_same_moment_are_read_together(
    make_any: MakeGroup, moments: list[tuple[float | None, float, bool]]
) -> None:
    """When a message comes and when it is looked for, in ms: 3 ms are a pause, 5 ms the limit."""
    group = make_any(HostGroup, 1, spec("a"))
    peers, now = group.shared_loads[0].peers, group.now
    peers.settle_s = SETTLE_S
    assert peers.may_have_news(now)
    for heard_ms, looked_ms, expected in moments:
        if heard_ms is not None:
            group.tables[0].note_heard(now + heard_ms / 1000)
        assert peers.may_have_news(now + looked_ms / 1000) is expected

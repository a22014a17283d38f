"""Queues of several processes: shared limits and order."""

from __future__ import annotations

import pytest

from proxy.batches.spare_capacity import has_spare_capacity
from proxy.core.fleet.leases import Lease
from proxy.core.model.types import Outcome, Refusal
from proxy.core.queue.ticket import Ticket
from proxy.core.queue.urgency import Urgency
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from proxy.processes.shared.queue import HOLD_S
from tests.present import present
from tests.proxy.core.making import MODEL, make_info, placed, refused, spec, waits
from tests.proxy.processes.virtual_group import MakeGroup, VirtualGroup


def wait(
    group: VirtualGroup, index: int, *, rank: Rank = Rank.STANDARD, long: bool = False
) -> Ticket:
    info = make_info(long=long)
    info.rank = rank
    ticket = waits(group.routers[index].submit(info, group.now))
    group.end_turn()
    return ticket


def due(group: VirtualGroup, index: int) -> list[Ticket]:
    """Return the tickets that a process dispatches now."""
    found = group.routers[index].pop_due(group.now)
    group.leases |= {ticket: placed(lease) for ticket, lease in found}
    group.end_turn()
    return [ticket for ticket, _ in found]


def test_queue_limit_holds_across_processes(make_processes: MakeGroup) -> None:
    group = make_processes(2, spec("a", most=1), queue_requests=3)
    group.submit(0)
    for index in (0, 1, 1):
        wait(group, index)
    assert refused(group.routers[0].submit(make_info(), group.now)).status == 429
    assert refused(group.routers[1].submit(make_info(), group.now)).status == 429
    group.restart(1)  # its tickets are gone
    group.now += 1
    wait(group, 0)


def test_queue_bytes_and_tokens_count_across_processes(make_processes: MakeGroup) -> None:
    group = make_processes(2, spec("a", most=1), queue_bytes=1000, queue_tokens=500)
    group.submit(0)
    waits(group.routers[0].submit(make_info(100, size=600), group.now))
    group.end_turn()
    assert refused(group.routers[1].submit(make_info(100, size=600), group.now)).status == 429
    group.read_all()
    waits(group.routers[1].submit(make_info(300, size=100), group.now))
    group.end_turn()
    assert refused(group.routers[0].submit(make_info(300, size=100), group.now)).status == 429


def submit(group: VirtualGroup, index: int, name: str, **fields: int) -> Lease | Ticket | Refusal:
    """Submit a request of a tenant, and end the turn."""
    info = make_info(**fields)
    info.tenant = group.routers[index].tenants.get(name)
    answer = group.routers[index].submit(info, group.now)
    group.end_turn()
    return answer


def add_two_tenants(group: VirtualGroup) -> None:
    group.set_tenants(TenantSpec("crowd"), TenantSpec("single"))
    group.submit(0)


def test_full_queue_of_one_tenant_gives_way_in_another_process(make_processes: MakeGroup) -> None:
    """The last tickets of the process with the most waiting are evicted."""
    group = make_processes(2, spec("a", most=1), queue_requests=6)
    add_two_tenants(group)
    crowd = [waits(submit(group, 1, "crowd")) for _ in range(6)]
    assert refused(submit(group, 1, "crowd")).status == 429
    single = waits(submit(group, 0, "single"))
    assert due(group, 0) == [], "it has no more than its share"
    [(ticket, refusal)] = group.routers[1].pop_due(group.now)
    group.end_turn()
    assert (ticket, refused(refusal).status) == (crowd[-1], 429)
    assert group.routers[1].pop_due(group.now) == []
    assert len(group.routers[0].queue) + len(group.routers[1].queue) == 6
    for _ in range(2):
        waits(submit(group, 0, "single"))
    assert refused(submit(group, 0, "single")).status == 429
    assert [ticket for ticket, _ in group.routers[1].pop_due(group.now)] == crowd[4:2:-1]
    assert not single.removed


def test_one_of_two_equal_processes_evicts(make_processes: MakeGroup) -> None:
    group = make_processes(3, spec("a", most=1), queue_requests=6)
    add_two_tenants(group)
    crowd = [waits(submit(group, index, "crowd")) for index in (0, 0, 0, 1, 1, 1)]
    waits(submit(group, 2, "single"))
    found = [
        router.pop_due(group.now) for router in group.routers
    ]  # before any process reads the others
    group.end_turn()
    assert [[ticket for ticket, _ in pairs] for pairs in found] == [[crowd[2]], [], []]
    assert [router.pop_due(group.now) for router in group.routers] == [[], [], []]


def test_request_above_the_limit_is_kept_if_the_queue_was_empty(make_group: MakeGroup) -> None:
    group = make_group(2, spec("a", most=1), queue_tokens=200)
    add_two_tenants(group)
    waits(submit(group, 1, "crowd", prompt=500))
    waits(submit(group, 0, "single", prompt=50))
    assert group.routers[1].pop_due(group.now) == []


@pytest.mark.parametrize("urgent", ["crowd", "single"])
def test_no_key_decides_between_tenants_in_two_processes(
    make_group: MakeGroup, urgent: str
) -> None:
    """Their counters are equal."""
    group = make_group(2, spec("a", most=1))
    running, names = group.submit(0), ("crowd", "single")
    group.set_tenants(*map(TenantSpec, names))
    for index, name in enumerate(names):
        router = group.routers[index]
        info = make_info()
        info.tenant = router.tenants.get(name)
        key = group.now + (0.0 if name == urgent else 5.0)
        router.queue.push(info, group.now, urgency=Urgency(key=key))
        group.end_turn()
    group.finish(0, running)
    dispatched = [name for index, name in enumerate(names) if due(group, index)]
    assert dispatched == [min(names, key=lambda name: Tenant(TenantSpec(name)).mark)]


def test_first_request_goes_first_across_processes(make_group: MakeGroup) -> None:
    group = make_group(2, spec("a", most=1))
    running = group.submit(0)
    first, second = wait(group, 1), wait(group, 0)
    group.finish(0, running)
    assert due(group, 0) == []  # the free place is for process 1
    assert due(group, 1) == [first]
    group.now += 5 * HOLD_S
    assert due(group, 0) == []
    group.finish(1, group.leases[first])
    assert due(group, 0) == [second]


def test_new_request_does_not_overtake_other_processes(make_all: MakeGroup) -> None:
    group = make_all(2, spec("a", most=1))
    running = group.submit(0)
    first = wait(group, 1)
    group.finish(0, running)
    wait(group, 0)
    assert due(group, 1) == [first]


def test_place_not_taken_by_the_first_goes_to_the_next_after_hold_s(
    make_processes: MakeGroup,
) -> None:
    group = make_processes(2, spec("a", most=1))
    running = group.submit(0)
    wait(group, 1)
    others = [wait(group, 0) for _ in range(2)]
    group.finish(0, running)
    assert due(group, 0) == []
    assert group.queues[0].holds_back
    group.now += HOLD_S
    assert due(group, 0) == others[:1]


@pytest.mark.parametrize("polls", [0.2, 0.9, 7.0])
def test_no_request_is_held_back_for_ever(make_group: MakeGroup, polls: float) -> None:
    """The first request, in another process, never takes its place."""
    group = make_group(2, spec("a", most=1))
    running = group.submit(0)
    wait(group, 1)
    waiting = [wait(group, 0) for _ in range(5)]
    dispatched: list[Ticket] = []
    for _ in range(200):
        if not running.released:
            group.finish(0, running)
        for ticket, lease in group.routers[0].pop_due(group.now):
            dispatched.append(ticket)
            running = placed(lease)
        group.end_turn()
        group.now += polls * HOLD_S
    assert dispatched == waiting


def test_ranks_order_requests_across_processes(make_group: MakeGroup) -> None:
    group = make_group(2, spec("a", most=1))
    running = group.submit(0)
    wait(group, 0)
    interactive = wait(group, 1, rank=Rank.INTERACTIVE)
    group.finish(0, running)
    assert due(group, 0) == []
    assert due(group, 1) == [interactive]


def test_batch_waits_for_other_requests_of_all_processes(make_group: MakeGroup) -> None:
    group = make_group(2, spec("a", most=1), spec("b", most=1))
    running = [group.submit(0), group.submit(0)]
    batch = wait(group, 0, rank=Rank.BATCH)
    wait(group, 1, long=True)
    group.finish(0, running[0])
    for _ in range(20):
        assert due(group, 0) == []
        group.now += HOLD_S
    assert len(due(group, 1)) == 1
    group.finish(0, running[1])
    assert due(group, 0) == [batch]


def test_spare_capacity_counts_requests_of_other_processes(make_all: MakeGroup) -> None:
    group = make_all(2, spec("a", most=1))
    lease = group.submit(1)
    group.read_all()
    assert not has_spare_capacity(group.routers[0], MODEL, group.now), "the worker is busy"
    ticket = waits(group.routers[1].submit(make_info(), group.now))
    group.end_turn()
    group.finish(1, lease)
    group.read_all()
    assert not has_spare_capacity(group.routers[0], MODEL, group.now), (
        "the free place is for process 1"
    )
    group.routers[1].withdraw(ticket, group.now)
    group.end_turn()
    group.read_all()
    assert has_spare_capacity(group.routers[0], MODEL, group.now)


PREFIX = tuple(range(1, 140))


def begin_session(group: VirtualGroup) -> Lease:
    """Begin a session's first turn in process 0; return its lease."""
    for router in group.routers:
        for worker in router.fleet.roster:
            worker.pace.prefills, worker.pace.token_s, worker.pace.base_s = 100, 1e-4, 0.02
    running = group.submit(0, prompt=100_000, output=50, long=True, prefix=PREFIX)
    group.routers[0].leases.record_first_token(running, group.now)
    group.end_turn()
    return running


def wait_for_cache(group: VirtualGroup) -> Ticket:
    """Let the session's next turn wait in process 0."""
    turn = make_info(100_000, 50, long=True, prefix=PREFIX)
    turn.session = 5
    ticket = waits(group.routers[0].submit(turn, group.now))
    group.end_turn()
    return ticket


def take_slot(group: VirtualGroup, before: Lease) -> Lease:
    """Let process 1 place a request on the worker of a lease."""
    pinned = make_info(100, 50)
    pinned.pinned = before.worker.name
    lease = placed(group.routers[1].submit(pinned, group.now))
    group.routers[1].leases.record_first_token(lease, group.now)
    group.end_turn()
    return lease


def overtake(group: VirtualGroup, ticket: Ticket, running: Lease, due_s: float) -> float:
    """Let process 1 take each slot, until a turn of process 0 is dispatched; return its wait."""
    while not (found := due(group, 0)):
        assert group.now < ticket.cache_until
        group.now += due_s / 2
        group.routers[1].leases.finish(running, group.now, Outcome.DONE)
        running = take_slot(group, running)
    assert found == [ticket]
    return group.now - ticket.since


def test_turns_that_wait_for_a_cache_in_other_processes_count(make_processes: MakeGroup) -> None:
    group = make_processes(2, spec("a", most=1), spec("b", most=1))
    begin_session(group)
    tickets = [wait_for_cache(group) for _ in range(2)]
    seconds = [present(ticket.cache_wait).seconds for ticket in tickets]
    assert seconds[1] == pytest.approx(3 * seconds[0])


def test_turn_that_waits_for_a_cache_gives_way_to_other_processes(
    make_processes: MakeGroup,
) -> None:
    """Beyond this process's part of the queue, its place is free for the next request of others."""
    group = make_processes(2, spec("a", most=1), spec("b", most=1), queue_requests=2)
    running = begin_session(group)
    tickets = [wait_for_cache(group) for _ in range(2)]
    assert due(group, 0) == tickets[1:]
    pinned = make_info(10)
    pinned.pinned = running.worker.name
    waits(group.routers[1].submit(pinned, group.now))
    group.end_turn()
    assert due(group, 0) == []
    assert not tickets[0].removed


def test_turn_that_another_process_overtakes_goes_elsewhere_in_bounded_time(
    make_group: MakeGroup,
) -> None:
    """Another process takes each slot; the wait ends soon after the slot was due."""
    group = make_group(2, spec("a", most=1), spec("b", most=1))
    running = begin_session(group)
    ticket = wait_for_cache(group)
    due_s = present(ticket.cache_wait).seconds
    group.finish(0, running)
    end_s = overtake(group, ticket, take_slot(group, running), due_s)
    assert group.leases[ticket].worker.name != running.worker.name
    assert end_s < 3 * due_s


def test_turn_that_is_overtaken_awaits_its_own_process_s_request(make_group: MakeGroup) -> None:
    """The slot of that request is surely for the turn."""
    group = make_group(2, spec("a", most=2), spec("b", most=1))
    own = begin_session(group)
    other = take_slot(group, own)
    group.read_all()
    ticket = wait_for_cache(group)
    for _ in range(8):
        group.finish(1, other)
        other = take_slot(group, own)
        assert due(group, 0) == []
        group.now += present(ticket.cache_wait).seconds
    assert group.now < ticket.cache_until
    group.finish(0, own)
    assert due(group, 0) == [ticket]
    assert group.leases[ticket].worker.name == own.worker.name


def test_long_requests_of_other_processes_count_as_waiting(make_all: MakeGroup) -> None:
    group = make_all(2, spec("a", most=1))
    group.submit(0)
    wait(group, 1, long=True)
    group.read_all()
    assert group.routers[0].queue.count_waiting("m", long=True) == 1
    assert group.routers[0].queue.count_waiting("m", long=False) == 0

"""Queues of several processes: one limit, and turns across them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proxy.batches.spare_capacity import has_spare_capacity
from proxy.core.fleet.leases import Lease
from proxy.core.model.types import Refusal
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Rank, TenantSpec
from proxy.processes.shared.queue import HOLD_S
from tests.proxy.core.making import MODEL, ask, placed, refused, spec, waits
from tests.proxy.processes.making import Crew

Crews = Callable[..., Crew]


def wait(crew: Crew, index: int, *, rank: Rank = Rank.STANDARD, long: bool = False) -> Ticket:
    """Have one wait."""
    asked = ask(long=long)
    asked.rank = rank
    ticket = waits(crew.routers[index].submit(asked, crew.now))
    crew.tell()
    return ticket


def due(crew: Crew, index: int) -> list[Ticket]:
    """Have one process look whose turn it is."""
    found = crew.routers[index].due(crew.now)
    crew.leases |= {ticket: placed(lease) for ticket, lease in found}
    crew.tell()
    return [ticket for ticket, _ in found]


def test_the_limit_is_everybodys(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1), queue_requests=3)
    crew.submit(0)
    for index in (0, 1, 1):
        wait(crew, index)
    assert refused(crew.routers[0].submit(ask(), crew.now)).status == 429
    assert refused(crew.routers[1].submit(ask(), crew.now)).status == 429
    crew.restart(1)  # whoever waited there is gone
    crew.now += 1
    wait(crew, 0)


def test_bytes_and_tokens_count_together(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1), queue_bytes=1000, queue_tokens=500)
    crew.submit(0)
    waits(crew.routers[0].submit(ask(100, size=600), crew.now))
    crew.tell()
    assert refused(crew.routers[1].submit(ask(100, size=600), crew.now)).status == 429
    crew.look()
    waits(crew.routers[1].submit(ask(300, size=100), crew.now))
    crew.tell()
    assert refused(crew.routers[0].submit(ask(300, size=100), crew.now)).status == 429


def submit(crew: Crew, index: int, name: str, **fields: int) -> Lease | Ticket | Refusal:
    """Have a tenant ask one process; all look."""
    asked = ask(**fields)
    asked.tenant = crew.routers[index].tenants.get(name)
    answer = crew.routers[index].submit(asked, crew.now)
    crew.tell()
    return answer


def open_to_two(crew: Crew) -> None:
    for router in crew.routers:
        router.tenants.replace([TenantSpec("crowd"), TenantSpec("single")], {})
    crew.submit(0)


def test_a_crowd_in_one_process_leaves_others_the_part_that_is_theirs(crews: Crews) -> None:
    """In another process it finds nobody who would give way; where most wait the last do."""
    crew = crews(2, spec("a", most=1), queue_requests=6)
    open_to_two(crew)
    crowd = [waits(submit(crew, 1, "crowd")) for _ in range(6)]
    assert refused(submit(crew, 1, "crowd")).status == 429
    single = waits(submit(crew, 0, "single"))
    assert due(crew, 0) == [], "it has no more than its part"
    [(ticket, refusal)] = crew.routers[1].due(crew.now)
    crew.tell()
    assert (ticket, refused(refusal).status) == (crowd[-1], 429)
    assert crew.routers[1].due(crew.now) == []
    assert len(crew.routers[0].queue) + len(crew.routers[1].queue) == 6
    for _ in range(2):
        waits(submit(crew, 0, "single"))
    assert refused(submit(crew, 0, "single")).status == 429
    assert [ticket for ticket, _ in crew.routers[1].due(crew.now)] == crowd[4:2:-1]
    assert not single.left


def test_where_two_have_as_much_one_gives_way(crews: Crews) -> None:
    crew = crews(3, spec("a", most=1), queue_requests=6)
    open_to_two(crew)
    crowd = [waits(submit(crew, index, "crowd")) for index in (0, 0, 0, 1, 1, 1)]
    waits(submit(crew, 2, "single"))
    found = [router.due(crew.now) for router in crew.routers]  # before any has heard of another
    crew.tell()
    assert [[ticket for ticket, _ in each] for each in found] == [[crowd[2]], [], []]
    assert [router.due(crew.now) for router in crew.routers] == [[], [], []]


def test_a_few_large_bodies_in_one_process_leave_others_their_part(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1), queue_bytes=1000)
    open_to_two(crew)
    large = [waits(submit(crew, 1, "crowd", size=200)) for _ in range(5)]
    waits(submit(crew, 0, "single", size=10))
    assert [ticket for ticket, _ in crew.routers[1].due(crew.now)] == large[-1:]
    crew.tell()
    assert refused(submit(crew, 0, "single", size=600)).status == 429


def test_one_that_is_more_than_all_may_be_has_its_place_where_nobody_waited(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1), queue_tokens=200)
    open_to_two(crew)
    waits(submit(crew, 1, "crowd", prompt=500))
    waits(submit(crew, 0, "single", prompt=50))
    assert crew.routers[1].due(crew.now) == []


def test_who_came_first_goes_first_wherever_it_waits(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1))
    running = crew.submit(0)
    first, second = wait(crew, 1), wait(crew, 0)
    crew.finish(0, running)
    assert due(crew, 0) == []  # the place is free, but not for its own
    assert due(crew, 1) == [first]
    crew.now += 5 * HOLD_S
    assert due(crew, 0) == []
    crew.finish(1, crew.leases[first])
    assert due(crew, 0) == [second]


def test_a_new_request_does_not_pass_who_waits_elsewhere(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1))
    running = crew.submit(0)
    first = wait(crew, 1)
    crew.finish(0, running)
    wait(crew, 0)
    assert due(crew, 1) == [first]


def test_a_place_that_the_first_does_not_take_is_the_nexts_after_a_beat(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1))
    running = crew.submit(0)
    wait(crew, 1)
    others = [wait(crew, 0) for _ in range(2)]
    crew.finish(0, running)
    assert due(crew, 0) == []
    assert crew.queues[0].held
    crew.now += HOLD_S
    assert due(crew, 0) == others[:1]


@pytest.mark.parametrize("polls", [0.2, 0.9, 7.0])
def test_nobody_is_held_back_for_ever(crews: Crews, polls: float) -> None:
    """Places keep coming free, and who is first elsewhere never takes one."""
    crew = crews(2, spec("a", most=1))
    running = crew.submit(0)
    wait(crew, 1)
    waiting = [wait(crew, 0) for _ in range(5)]
    gone: list[Ticket] = []
    for _ in range(200):
        if not running.released:
            crew.finish(0, running)
        for ticket, lease in crew.routers[0].due(crew.now):
            gone.append(ticket)
            running = placed(lease)
        crew.tell()
        crew.now += polls * HOLD_S
    assert gone == waiting


def test_classes_go_before_each_other_across_processes(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1))
    running = crew.submit(0)
    wait(crew, 0)
    interactive = wait(crew, 1, rank=Rank.INTERACTIVE)
    crew.finish(0, running)
    assert due(crew, 0) == []
    assert due(crew, 1) == [interactive]


def test_batch_waits_for_all_of_its_model_everywhere(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1), spec("b", most=1))
    running = [crew.submit(0), crew.submit(0)]
    batch = wait(crew, 0, rank=Rank.BATCH)
    wait(crew, 1, long=True)
    crew.finish(0, running[0])
    for _ in range(20):
        assert due(crew, 0) == []
        crew.now += HOLD_S
    assert len(due(crew, 1)) == 1
    crew.finish(0, running[1])
    assert due(crew, 0) == [batch]


def test_a_batch_line_waits_for_requests_of_other_processes(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1))
    lease = crew.submit(1)
    crew.look()
    assert not has_spare_capacity(crew.routers[0], MODEL, crew.now), "it is busy"
    ticket = waits(crew.routers[1].submit(ask(), crew.now))
    crew.tell()
    crew.finish(1, lease)
    crew.look()
    assert not has_spare_capacity(crew.routers[0], MODEL, crew.now), "what is free is another's"
    crew.routers[1].withdraw(ticket, crew.now)
    crew.tell()
    crew.look()
    assert has_spare_capacity(crew.routers[0], MODEL, crew.now)


def test_sizes_have_turns_of_their_own(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1))
    running = crew.submit(0)
    wait(crew, 1, long=True)
    short = wait(crew, 0)
    crew.finish(0, running)
    assert due(crew, 0) == [short]


def test_longs_that_wait_elsewhere_have_their_reserve_here(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1))
    crew.submit(0)
    wait(crew, 1, long=True)
    crew.look()
    assert crew.routers[0].queue.waiting("m", long=True) == 1
    assert crew.routers[0].queue.waiting("m", long=False) == 0


def test_nobody_else_waits_where_nobody_does(crews: Crews) -> None:
    crew = crews(2, spec("a", most=1))
    running = crew.submit(1)
    ticket = wait(crew, 0)
    crew.finish(1, running)
    assert due(crew, 0) == [ticket]
    crew.tell()
    crew.look()
    assert crew.queues[1].length == 0
    assert not crew.queues[1].before(("m", "short"), 3)

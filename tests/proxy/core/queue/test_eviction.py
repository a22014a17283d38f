"""A full queue: whoever has most of it gives way, and nobody else."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.fleet.leases import Attempts, Lease
from proxy.core.model.types import Outcome, Reason, RequestInfo
from proxy.core.queue.queue import Queue
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from tests.present import present
from tests.proxy.core.making import ask, placed, refused, router_of, spec, waits

INTERACTIVE, STANDARD, BATCH = Rank
MOST = 12


def tenant(name: str, weight: float = 1.0, rank: Rank = STANDARD, **limits: int) -> Tenant:
    return Tenant(TenantSpec(name, rank, weight, Limits(**limits)))


def of(who: Tenant | None, prompt: int = 100, **fields: Any) -> RequestInfo:
    made = ask(prompt, **fields)
    made.tenant = who
    if who is not None:
        made.rank = who.spec.rank
    return made


class Hall:
    """A queue whose newcomers take the places of those that give way."""

    def __init__(self, most: int = MOST, most_bytes: int = 10**9, **more: Any) -> None:
        self.queue = Queue(most, most_bytes, 30.0, **more)
        self.now = 0.0
        self.inside: list[Ticket] = []

    def came(self, one: RequestInfo) -> list[Ticket] | None:
        """Let one in and return who gave way; None if nobody did and it had to go itself."""
        self.now += 1.0
        gone: list[Ticket] = []
        if not self.queue.room_for(one):
            gone = self.queue.choose_evicted(one)
            if not gone:
                return None
        for ticket in gone:
            assert self.queue.remove(ticket)
            self.inside.remove(ticket)
        assert self.queue.room_for(one)
        self.inside.append(self.queue.push(one, self.now))
        return gone

    def has(self) -> Counter[str]:
        return Counter(t.ask.tenant.name if t.ask.tenant else "" for t in self.inside)


def test_a_flood_leaves_room_for_the_others() -> None:
    hall, flood = Hall(), tenant("flood")
    tickets = [hall.came(of(flood)) for _ in range(MOST + 3)]
    assert tickets == [[]] * MOST + [None] * 3
    last = hall.inside[-1]
    assert hall.came(of(tenant("single"))) == [last], "the last that came"
    assert hall.came(of(flood)) is None


def test_a_share_is_by_weight() -> None:
    hall, one, three = Hall(), tenant("one"), tenant("three", 3.0)
    for _ in range(50):
        hall.came(of(one))
        hall.came(of(three))
    assert hall.has() == {"one": 3, "three": 9}


def test_bytes_count_where_they_are_scarce() -> None:
    hall, large, small = Hall(1000, 10_000), tenant("large"), tenant("small")
    for _ in range(4):
        hall.came(of(large, size=2500))
    for _ in range(9):
        assert hall.came(of(small, size=100)) is not None
    assert hall.has() == {"large": 3, "small": 9}
    assert hall.came(of(large, size=2500)) is None


def test_tokens_too() -> None:
    hall = Hall(1000, most_tokens=10_000)
    large, small = tenant("large"), tenant("small")
    for _ in range(2):
        hall.came(of(large, 5000))
    gone = present(hall.came(of(small, 100)))
    assert len(gone) == 1


def test_batch_gives_way_to_everybody_and_nobody_to_batch() -> None:
    hall = Hall()
    batch, other = tenant("batch", 100.0, BATCH), tenant("other")
    for _ in range(MOST):
        hall.came(of(batch))
    for _ in range(MOST):
        assert hall.came(of(other)) is not None
    assert hall.has() == {"other": MOST}
    assert hall.came(of(batch)) is None


def test_retries_and_the_anonymous_do_not_give_way() -> None:
    hall, who = Hall(2), tenant("who")
    hall.queue.push(of(who), 0.0, Attempts(frozenset({"w"})))
    hall.queue.push(of(who), 0.0, Attempts(frozenset({"w"})))
    assert hall.queue.choose_evicted(of(tenant("other"))) == []
    hall = Hall(2)
    for _ in range(2):
        hall.came(of(None))
    assert hall.came(of(None)) is None


def test_nobody_goes_in_vain() -> None:
    hall, small, large = Hall(1000, 1000), tenant("small"), tenant("large")
    for _ in range(10):
        hall.came(of(small, size=100))
    assert hall.came(of(large, size=900)) is None, "it would have more than they"
    assert hall.has() == {"small": 10}


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 400), st.integers(1, 300)), max_size=120)
)
@settings(deadline=None)
def test_whoever_comes_its_bounds_hold_and_who_gave_way_had_more(
    comers: list[tuple[int, int, int]],
) -> None:
    hall = Hall(MOST, 2000, most_tokens=1500)
    people = [
        tenant(f"t{number}", 1.0 + number % 2, rank)
        for number, rank in enumerate((INTERACTIVE, STANDARD, STANDARD, STANDARD, BATCH))
    ]
    for number, size, prompt in comers:
        before = hall.has()
        gone = hall.came(of(people[number], prompt, size=size))
        for ticket in gone or []:
            name = present(ticket.ask.tenant).name
            assert name != people[number].name
            assert before[name] > 0
            assert ticket.ask.rank is BATCH or people[number].spec.rank is not BATCH
        assert len(hall.queue) == len(hall.inside) <= MOST
        assert hall.queue.bytes == sum(t.ask.body_bytes for t in hall.inside) <= 2000


# In the router


def test_who_gives_way_is_told_and_pays_nothing() -> None:
    router = router_of(spec("w", most=1), queue_requests=2)
    flood = tenant("flood", tokens_per_minute=10_000)
    lease = placed(router.submit(of(flood), 0.0))
    first, last = (waits(router.submit(of(flood), 0.0)) for _ in range(2))
    assert flood.ledger.running == 3
    single = waits(router.submit(of(tenant("single")), 0.0))
    assert (flood.ledger.running, flood.waiting) == (2, 1)
    ((told, refusal),) = router.due(0.0)
    assert told is last
    assert refused(refusal).reason is Reason.QUEUE_FULL
    assert router.due(0.0) == []
    router.leases.finish(lease, 0.0, Outcome.DONE)
    ((next_one, answer),) = router.due(0.0)
    assert isinstance(answer, Lease)
    assert next_one in (first, single)


def test_who_gives_way_may_leave_before_it_is_told() -> None:
    router = router_of(spec("w", most=1), queue_requests=1)
    flood = tenant("flood")
    placed(router.submit(of(flood), 0.0))
    ticket = waits(router.submit(of(flood), 0.0))
    waits(router.submit(of(tenant("single", 10.0)), 0.0))
    router.withdraw(ticket, 0.0)
    assert router.due(0.0) == []

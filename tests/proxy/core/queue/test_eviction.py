"""Eviction from a full queue: the tenant with the largest share loses requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.fleet.leases import Attempts
from proxy.core.model.types import Outcome, Reason, RequestInfo
from proxy.core.queue.eviction import amounts_of
from proxy.core.queue.queue import Queue
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Rank
from tests.present import present
from tests.proxy.core.making import (
    info_of,
    placed,
    pop_one,
    refused,
    router_of,
    spec,
    tenant,
    waits,
)

INTERACTIVE, STANDARD, BATCH = Rank
CAPACITY = 12


class QueueBench:
    """A queue in which new requests replace evicted ones."""

    def __init__(self, capacity: int = CAPACITY, max_bytes: int = 10**9, **options: Any) -> None:
        self.queue = Queue(capacity, max_bytes, 30.0, **options)
        self.now = 0.0
        self.tickets: list[Ticket] = []

    def add(self, info: RequestInfo) -> list[Ticket] | None:
        """Add a request and return the evicted tickets; None if the request was refused."""
        self.now += 1.0
        gone: list[Ticket] = []
        if not self.queue.has_room(amounts_of(info)):
            gone = self.queue.choose_evicted(info)
            if not gone:
                return None
        for ticket in gone:
            assert self.queue.remove(ticket)
            self.tickets.remove(ticket)
        assert self.queue.has_room(amounts_of(info))
        self.tickets.append(self.queue.push(info, self.now))
        return gone

    def counts(self) -> Counter[str]:
        return Counter(t.info.tenant.name if t.info.tenant else "" for t in self.tickets)


def test_flood_leaves_room_for_other_tenants() -> None:
    bench, flood = QueueBench(), tenant("flood")
    tickets = [bench.add(info_of(flood)) for _ in range(CAPACITY + 3)]
    assert tickets == [[]] * CAPACITY + [None] * 3
    last = bench.tickets[-1]
    assert bench.add(info_of(tenant("single"))) == [last], "the newest request"
    assert bench.add(info_of(flood)) is None


def test_shares_follow_weights() -> None:
    bench, light, heavy = QueueBench(), tenant("one"), tenant("three", weight=3.0)
    for _ in range(50):
        bench.add(info_of(light))
        bench.add(info_of(heavy))
    assert bench.counts() == {"one": 3, "three": 9}


@pytest.mark.parametrize("bound", ["max_bytes", "max_tokens"])
def test_bytes_and_tokens_count_if_they_are_scarce(bound: str) -> None:
    bench, large, small = QueueBench(1000, **{bound: 10_000}), tenant("large"), tenant("small")
    for _ in range(4):
        assert bench.add(info_of(large, 2500, size=2500)) == []
    for _ in range(9):
        assert bench.add(info_of(small, 100, size=100)) is not None
    assert bench.counts() == {"large": 3, "small": 9}
    assert bench.add(info_of(large, 2500, size=2500)) is None


def test_batch_is_evicted_first_and_evicts_no_request() -> None:
    bench = QueueBench()
    batch, other = tenant("batch", BATCH, 100.0), tenant("other")
    for _ in range(CAPACITY):
        bench.add(info_of(batch))
    for _ in range(CAPACITY):
        assert bench.add(info_of(other)) is not None
    assert bench.counts() == {"other": CAPACITY}
    assert bench.add(info_of(batch)) is None


def test_retries_and_anonymous_requests_are_not_evicted() -> None:
    bench, owner = QueueBench(2), tenant("who")
    bench.queue.push(info_of(owner), 0.0, Attempts(frozenset({"w"})))
    bench.queue.push(info_of(owner), 0.0, Attempts(frozenset({"w"})))
    assert bench.queue.choose_evicted(info_of(tenant("other"))) == []
    bench = QueueBench(2)
    for _ in range(2):
        bench.add(info_of(None))
    assert bench.add(info_of(None)) is None


def test_no_eviction_if_the_request_would_not_fit() -> None:
    bench, small, large = QueueBench(1000, 1000), tenant("small"), tenant("large")
    for _ in range(10):
        bench.add(info_of(small, size=100))
    assert bench.add(info_of(large, size=900)) is None, "it would have a larger share"
    assert bench.counts() == {"small": 10}


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 400), st.integers(1, 300)), max_size=120)
)
@settings(deadline=None)
def test_bounds_hold_and_evicted_tenants_had_more(requests: list[tuple[int, int, int]]) -> None:
    bench = QueueBench(CAPACITY, 2000, max_tokens=1500)
    tenants = [
        tenant(f"t{number}", rank, 1.0 + number % 2)
        for number, rank in enumerate((INTERACTIVE, STANDARD, STANDARD, STANDARD, BATCH))
    ]
    for number, size, prompt in requests:
        before = bench.counts()
        gone = bench.add(info_of(tenants[number], prompt, size=size))
        for ticket in gone or []:
            name = present(ticket.info.tenant).name
            assert name != tenants[number].name
            assert before[name] > 0
            assert ticket.info.rank is BATCH or tenants[number].spec.rank is not BATCH
        assert len(bench.queue) == len(bench.tickets) <= CAPACITY
        assert bench.queue.bytes == sum(t.info.body_bytes for t in bench.tickets) <= 2000


# In the router


def test_evicted_request_is_refused_and_not_charged() -> None:
    router = router_of(spec("w", most=1), queue_requests=2)
    flood = tenant("flood", tokens_per_minute=10_000)
    lease = placed(router.submit(info_of(flood), 0.0))
    first, last = (waits(router.submit(info_of(flood), 0.0)) for _ in range(2))
    assert flood.ledger.running == 3
    single = waits(router.submit(info_of(tenant("single")), 0.0))
    assert (flood.ledger.running, flood.waiting) == (2, 1)
    evicted, refusal = pop_one(router, 0.0)
    assert evicted is last
    assert refused(refusal).reason is Reason.QUEUE_FULL
    assert router.pop_due(0.0) == []
    router.leases.finish(lease, 0.0, Outcome.DONE)
    next_ticket, answer = pop_one(router, 0.0)
    placed(answer)
    assert next_ticket in (first, single)


@pytest.mark.parametrize("withdrawn", [True, False])
def test_evicted_request_may_be_withdrawn_before_due(withdrawn: bool) -> None:
    router = router_of(spec("w", most=1), queue_requests=1)
    flood = tenant("flood")
    placed(router.submit(info_of(flood), 0.0))
    ticket = waits(router.submit(info_of(flood), 0.0))
    single = waits(router.submit(info_of(tenant("single", weight=10.0)), 0.0))
    router.withdraw(ticket if withdrawn else single, 0.0)
    assert [gone for gone, _ in router.pop_due(0.0)] == ([] if withdrawn else [ticket])

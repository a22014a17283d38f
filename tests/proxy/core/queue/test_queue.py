"""The queue."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.model.types import Reason, Refusal
from proxy.core.queue.dispatch import FinalPlacement
from proxy.core.queue.queue import Queue
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Tenant, TenantSpec
from tests.proxy.core.making import info_of, make_info

END = Refusal(429, Reason.QUEUE_FULL, "over")


def make_queue(capacity: int = 10, max_bytes: int = 10_000, wait_s: float = 30.0) -> Queue:
    return Queue(capacity, max_bytes, wait_s)


def leave(queue: Queue, *tickets: Ticket) -> list[Ticket]:
    """Dispatch these tickets and return them in order."""

    def place(ticket: Ticket, _: float) -> FinalPlacement | None:
        return END if ticket in tickets else None

    return [ticket for ticket, _ in queue.dispatch(place)]


def test_smaller_request_may_pass_blocked_larger_ones() -> None:
    queue = make_queue()
    large, small, same, smaller = (
        queue.push(make_info(tokens), float(i)) for i, tokens in enumerate((900, 300, 300, 100))
    )
    assert leave(queue, same) == []
    assert leave(queue, small, smaller) == [small, smaller]
    assert leave(queue, large, same) == [large, same]


def test_deadline_is_the_wait_at_push_time() -> None:
    queue = make_queue(wait_s=7.0)
    ticket = queue.push(make_info(), 3.0)
    queue.max_wait_s = 1.0
    assert ticket.deadline == 10.0


def test_retry_after_follows_the_dispatch_rate() -> None:
    queue = make_queue(capacity=1000)
    for _ in range(40):
        queue.push(make_info(), 0.0)
    for i in range(100):  # four a second
        queue.record_freed_slot(100 + i / 4)
    assert queue.retry_after_s(125.0) == 11


@pytest.mark.parametrize("capacity", [0, 10])
def test_retry_after_ignores_idle_times(capacity: int) -> None:
    """The machine has been up for days, with idle times."""
    queue = make_queue(capacity)
    for start in (1e6, 1e6 + 30_000):
        if capacity:
            ticket = queue.push(make_info(), start)
        for i in range(1, 10):
            queue.record_freed_slot(start + i / 4)
        assert queue.retry_after_s(start + 2.5) == 1
        if capacity:
            queue.remove(ticket)
    assert queue.wait_s(start + 3600, 0) is None


def test_wait_ignores_a_short_idle_time() -> None:
    queue, now = make_queue(), 1e6
    for idle_s in (0.0, 10.0):
        now += idle_s
        ticket = queue.push(make_info(), now)
        for _ in range(80):  # four a second
            now += 0.25
            queue.record_freed_slot(now)
            assert queue.wait_s(now, 0) == pytest.approx(0.25)
        queue.remove(ticket)


TENANTS = [Tenant(TenantSpec(name)) for name in "abcd"]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_ahead_of_counts_one_turn_per_own_request(steps: list[tuple[int, bool]]) -> None:
    queue, tickets = make_queue(100), list[Ticket]()
    for number, goes in steps:
        if goes and tickets:
            queue.remove(tickets.pop(number % len(tickets)))
        else:
            tickets.append(queue.push(info_of(TENANTS[number]), 0.0))
    lengths = Counter(ticket.info.tenant for ticket in tickets)
    for tenant in TENANTS:
        turns = lengths[tenant] + 1
        ahead = sum(min(length, turns) for length in lengths.values())
        assert queue.ahead_of(info_of(tenant), 0.0) == ahead
    for ticket in tickets:
        queue.remove(ticket)

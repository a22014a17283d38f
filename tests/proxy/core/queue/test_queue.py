"""The queue."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.model.types import Reason, Refusal, RequestInfo
from proxy.core.queue.dispatch import End
from proxy.core.queue.queue import Queue
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import Tenant, TenantSpec
from tests.proxy.core.making import ask

END = Refusal(429, Reason.QUEUE_FULL, "over")


def queue(most: int = 10, most_bytes: int = 10_000, wait: float = 30.0) -> Queue:
    """Make a queue."""
    return Queue(most, most_bytes, wait)


def leave(waiting: Queue, *tickets: Ticket) -> list[Ticket]:
    """Let go these, and say who went in which order."""

    def end(ticket: Ticket) -> End | None:
        return END if ticket in tickets else None

    return [ticket for ticket, _ in waiting.leave(end)]


def test_one_that_needs_less_context_may_go_where_those_before_it_can_not() -> None:
    waiting = queue()
    large, small, same, smaller = (
        waiting.push(ask(tokens), float(i)) for i, tokens in enumerate((900, 300, 300, 100))
    )
    assert leave(waiting, same) == []
    assert leave(waiting, small, smaller) == [small, smaller]
    assert leave(waiting, large, same) == [large, same]


def test_the_oldest_of_all_goes_first() -> None:
    waiting = queue()
    tickets = [waiting.push(ask(long=bool(i % 2)), float(i)) for i in range(6)]
    assert leave(waiting, *tickets) == tickets


def test_models_wait_apart() -> None:
    waiting = queue()
    waiting.push(ask(model="a"), 0.0)
    b = waiting.push(ask(model="b"), 1.0)
    assert leave(waiting, b) == [b]
    assert waiting.waiting("a", long=False) == 1
    assert waiting.waiting("b", long=False) == 0


def test_a_ticket_leaves_once() -> None:
    waiting = queue()
    ticket = waiting.push(ask(size=5), 0.0)
    assert waiting.remove(ticket)
    assert not waiting.remove(ticket)
    assert (len(waiting), waiting.bytes, ticket.left) == (0, 0, True)
    assert leave(waiting, ticket) == []


def test_the_deadline_is_the_wait_it_was_promised() -> None:
    waiting = queue(wait=7.0)
    ticket = waiting.push(ask(), 3.0)
    waiting.max_wait_s = 1.0
    assert ticket.deadline == 10.0


def test_retry_after_follows_the_drain() -> None:
    waiting = queue(most=1000)
    for _ in range(40):
        waiting.push(ask(), 0.0)
    for i in range(100):  # four a second
        waiting.freed(100 + i / 4)
    assert waiting.retry_after_s(125.0) == 11


@pytest.mark.parametrize("most", [0, 10])
def test_retry_after_is_not_of_a_time_when_nobody_waited(most: int) -> None:
    """The machine has been up for days, and the night was quiet."""
    waiting = queue(most)
    for start in (1e6, 1e6 + 30_000):
        if most:
            ticket = waiting.push(ask(), start)
        for i in range(1, 10):
            waiting.freed(start + i / 4)
        assert waiting.retry_after_s(start + 2.5) == 1
        if most:
            waiting.remove(ticket)
    assert waiting.wait_s(start + 3600, 0) is None


TENANTS = [Tenant(TenantSpec(name)) for name in "abcd"]


def of(tenant: Tenant) -> RequestInfo:
    made = ask()
    made.tenant = tenant
    return made


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_ahead_of_one_each_tenant_has_a_turn_for_each_of_its_own(
    steps: list[tuple[int, bool]],
) -> None:
    waiting, tickets = queue(100), list[Ticket]()
    for number, goes in steps:
        if goes and tickets:
            waiting.remove(tickets.pop(number % len(tickets)))
        else:
            tickets.append(waiting.push(of(TENANTS[number]), 0.0))
    lengths = Counter(ticket.ask.tenant for ticket in tickets)
    for tenant in TENANTS:
        turns = lengths[tenant] + 1
        ahead = sum(min(length, turns) for length in lengths.values())
        assert waiting.ahead_of(of(tenant)) == ahead
    for ticket in tickets:
        waiting.remove(ticket)

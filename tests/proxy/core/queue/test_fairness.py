"""Fair shares of the queue: the order of dispatch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proxy.core.model.types import Outcome, Reason, Refusal, RequestInfo
from proxy.core.queue import fairness
from proxy.core.queue.dispatch import FinalPlacement
from proxy.core.queue.fairness import FairnessSettings
from proxy.core.queue.queue import Queue
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router
from proxy.core.tenants.tenants import Rank, Tenant
from tests.present import present
from tests.proxy.core.making import (
    LONG,
    SHORT,
    info_of,
    placed,
    pop_one,
    router_of,
    serve,
    spec,
    tenant,
    waits,
)

INTERACTIVE, STANDARD, BATCH = Rank
SETTINGS = FairnessSettings()
PLACED = Refusal(200, Reason.LEAST_LOADED, "placed")  # the queue does not read the end


def cost(info: RequestInfo) -> float:
    return info.prompt_tokens + SETTINGS.output_weight * info.expected_output


@dataclass
class QueueBench:
    """A queue, and the requests dispatched from it."""

    queue: Queue = field(default_factory=lambda: Queue(10_000, 10**12, 1e9, None, SETTINGS))
    now: float = 0.0
    served: Counter[str] = field(default_factory=Counter)
    order: list[Ticket] = field(default_factory=list)

    def push(self, info: RequestInfo) -> Ticket:
        return self.queue.push(info, self.now)

    def place(self, slots: int = 1) -> list[Ticket]:
        """Dispatch requests and charge them as the router does."""
        left = slots

        def place(ticket: Ticket, _: float) -> FinalPlacement | None:
            nonlocal left
            info = ticket.info
            if not left:
                return None
            left -= 1
            if info.tenant is not None:
                fairness.charge(SETTINGS, info.tenant, info, 0)
                self.served[info.tenant.name] += int(cost(info))
            return PLACED

        gone = [ticket for ticket, _ in self.queue.dispatch(place, self.now)]
        self.order += gone
        return gone

    def names(self) -> list[str]:
        return [ticket.info.tenant.name for ticket in self.order if ticket.info.tenant]


SIZES = st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 500)), min_size=1, max_size=12)


@given(SIZES, SIZES, st.sampled_from([0.25, 1.0, 3.0]), st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_service_of_two_backlogged_tenants_differs_by_one_request(
    a_sizes: list[tuple[int, int]], b_sizes: list[tuple[int, int]], weight: float, slots: int
) -> None:
    """Divided by weight, for any sizes and any duration."""
    bench, a, b = QueueBench(), tenant("a"), tenant("b", weight=weight)
    largest = 0.0
    for number in range(60):
        for owner, sizes in ((a, a_sizes), (b, b_sizes)):
            while owner.waiting < slots + 1:
                info = info_of(owner, *sizes[number % len(sizes)])
                largest = max(largest, cost(info) / owner.spec.weight)
                bench.push(info)
        assert len(bench.place(slots)) == slots
        assert abs(bench.served["a"] - bench.served["b"] / weight) <= largest + 1e-6


@given(st.integers(1, 6), st.integers(0, 400), st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_service_differs_by_requests_in_flight_if_output_is_unknown(
    ahead: int, likely: int, slots: int
) -> None:
    """Outputs are settled at the end: a's are longer than the estimate, b's shorter."""
    bench, a, b = QueueBench(), tenant("a"), tenant("b")
    truth = {"a": 900, "b": 20}
    running: list[RequestInfo] = []
    service = Counter[str]()
    worst = 100 + SETTINGS.output_weight * 900
    for _ in range(80):
        for owner in (a, b):
            while owner.waiting <= ahead + slots:
                bench.push(info_of(owner, 100, likely))
        gone = [ticket.info for ticket in bench.place(slots)]
        running += gone
        while len(running) > slots * 2:
            info = running.pop(0)
            assert info.tenant is not None
            written = truth[info.tenant.name]
            fairness.charge_output(SETTINGS, info, written - info.bill.prepaid_output)
            service[info.tenant.name] += int(100 + SETTINGS.output_weight * written)
        assert abs(service["a"] - service["b"]) <= worst * (slots * 3 + 1)


def test_share_of_shorts_does_not_reduce_the_share_of_longs() -> None:
    """A tenant whose shorts never wait keeps its share for longs."""
    workers = spec("s", SHORT, 1000), spec("l", LONG, 10_000, most=1)
    router = router_of(*workers, policy="length", short_limit=500)
    chat, job = tenant("chat"), tenant("job")

    def shorts() -> None:
        for _ in range(10):
            serve(router, info_of(chat))

    shorts()
    assert turns(router, job, chat, shorts, prompt=800, long=True)["chat"] == 10


def turns(
    router: Router,
    first: Tenant,
    second: Tenant,
    between: Callable[[], None] = lambda: None,
    **fields: Any,
) -> Counter[str]:
    """Let two tenants wait for one slot; count the tenants of twenty dispatches."""
    lease = placed(router.submit(info_of(tenant("before"), **fields), 0.0))
    for owner in (first, second):
        for _ in range(30):
            waits(router.submit(info_of(owner, **fields), 0.0))
    names = Counter[str]()
    for _ in range(20):
        between()
        router.leases.finish(lease, 0.0, Outcome.DONE)
        ticket, answer = pop_one(router, 0.0)
        lease = placed(answer)
        names[present(ticket.info.tenant).name] += 1
    return names


def test_own_batch_requests_do_not_change_the_share_of_chats() -> None:
    """A tenant that joins batch starts at batch's level, in batch only."""
    bench, night = QueueBench(), tenant("night", BATCH)
    chat, other = tenant("chat"), tenant("other")
    bench.push(info_of(night))
    night.charge(1e9)
    bench.push(replace(info_of(chat), rank=BATCH))
    for _ in range(20):
        bench.push(info_of(other))
        bench.push(info_of(chat))
    bench.place(20)
    assert Counter(bench.names())["chat"] == 10
    for _ in range(20):
        bench.push(info_of(night))
        bench.push(replace(info_of(chat), rank=BATCH))
    bench.place(20)  # the remaining chats
    bench.place(20)
    assert Counter(bench.names()[-20:])["chat"] in range(8, 13), "batch shares are equal too"


def test_blocked_long_lets_shorts_of_lower_classes_pass() -> None:
    bench, first, second = QueueBench(), tenant("first", rank=INTERACTIVE), tenant("second")
    bench.push(info_of(first, long=True))
    short = bench.push(info_of(second))

    def place(ticket: Ticket, _: float) -> FinalPlacement | None:
        return None if ticket.info.long else PLACED

    assert [ticket for ticket, _ in bench.queue.dispatch(place, 0.0)] == [short]


@given(
    st.sampled_from([
        (STANDARD, (INTERACTIVE,)), (BATCH, (INTERACTIVE,)), (BATCH, (STANDARD,)),
        (BATCH, (INTERACTIVE, STANDARD)),
    ]),
    st.integers(1, 6),
    st.floats(0.2, 2.0),
    st.integers(0, 20),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_wait_of_a_class_is_its_age_and_two_slots_at_most(
    classes: tuple[Rank, tuple[Rank, ...]], deep: int, pause: float, old: int
) -> None:
    """Under floods of higher classes, which have aged requests too; a slot is free every `pause`.

    Two aged classes take turns.
    """
    rank, floods = classes
    bench, waiting_tenant = QueueBench(), tenant("patient", rank=rank)
    bench.queue.fairness = FairnessSettings(standard_age_s=2.0, batch_age_s=15.0)
    age = bench.queue.fairness.ages[rank]
    crowds = [tenant(flood.name, rank=flood) for flood in floods]
    for crowd in crowds:
        for _ in range(old):
            bench.push(info_of(crowd))
    bench.push(info_of(waiting_tenant))
    while "patient" not in bench.names() and bench.now <= age + 10 * pause:
        for crowd in crowds:
            while crowd.waiting < deep:
                bench.push(info_of(crowd))
        bench.now += pause
        bench.place()
    assert "patient" in bench.names()
    assert age <= bench.now <= age + (4 if len(floods) > 1 else 2) * pause + 1e-6


def test_any_ahead_of_ignores_lower_classes() -> None:
    bench = QueueBench()
    standard, urgent = tenant("standard"), tenant("urgent", rank=INTERACTIVE)
    batch = tenant("batch", rank=BATCH)
    assert not bench.queue.any_ahead_of(info_of(batch))
    bench.push(info_of(batch))
    assert not bench.queue.any_ahead_of(info_of(standard)), "batch is not ahead"
    bench.push(info_of(standard))
    assert bench.queue.any_ahead_of(info_of(standard))
    assert bench.queue.any_ahead_of(info_of(batch, long=True)), "for any size"
    assert not bench.queue.any_ahead_of(info_of(standard, long=True))
    assert not bench.queue.any_ahead_of(info_of(urgent))


@pytest.mark.parametrize("alike", [True, False])
def test_cost_of_a_dispatch_is_independent_of_the_backlog(alike: bool) -> None:
    """Counted in calls for requests that are pushed, dispatched and charged."""

    def calls(tenants: int) -> int:
        bench = QueueBench()
        owners = [tenant(f"t{n}") for n in range(tenants)]
        for n, owner in enumerate(owners):
            owner.charge(n % 7 * 50.0)
            bench.push(info_of(owner, 100 if alike else 100 + n * 37 % 900))
        count = 0

        def note(_frame: object, event: str, _argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        for n in range(20):
            sys.setprofile(note)
            try:
                bench.push(info_of(owners[n % tenants]))
                bench.push(info_of(tenant(f"new{n}")))
                [gone] = bench.place()
                present(gone.info.tenant).charge(10.0)
                bench.place(0)
                bench.queue.fronts()
            finally:
                sys.setprofile(before)
        return count

    assert calls(2000) < 2.5 * calls(20)


def test_returning_tenant_starts_at_the_least_waiting_standing() -> None:
    bench, a, b, late = QueueBench(), tenant("a"), tenant("b"), tenant("late")
    for owner in (a, b):
        bench.push(info_of(owner))
    a.charge(900.0)
    b.charge(700.0)
    b.charge(-100.0)
    bench.push(info_of(late))
    assert late.standings[STANDARD] == 600.0


class QueueMachine(RuleBasedStateMachine):
    """Pushes, dispatches and removals of all classes at random."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = QueueBench()
        self.tenants = [tenant(f"{rank.name}{n}", rank, n + 1.0) for rank in Rank for n in range(2)]
        self.waiting: list[Ticket] = []

    @rule(
        index=st.integers(0, 5),
        prompt=st.integers(1, 3000),
        long=st.booleans(),
        model=st.sampled_from("xy"),
    )
    def push(self, index: int, prompt: int, long: bool, model: str) -> None:
        info = info_of(self.tenants[index], prompt, long=long, model=model)
        self.waiting.append(self.bench.push(info))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(ticket)
        assert self.bench.queue.remove(ticket)

    @rule(index=st.integers(0, 5), tokens=st.integers(-3000, 3000))
    def charge(self, index: int, tokens: int) -> None:
        self.tenants[index].charge(tokens)

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0, 301.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.now += seconds

    @rule(slots=st.integers(1, 4))
    def dispatch(self, slots: int) -> None:
        before = list(self.waiting)
        gone = self.bench.place(slots)
        assert len(gone) == min(slots, len(before)), "no slot stays free while requests wait"
        for ticket in gone:
            rest = [t for t in before if t.info.model == ticket.info.model]
            if ticket.info.rank is BATCH and not ticket.aged:
                assert all(t.info.rank is BATCH for t in rest), (
                    "batch goes only if no other class waits"
                )
            if not ticket.aged:
                assert ticket.info.rank == min(
                    t.info.rank for t in rest if self.same_size(t, ticket)
                )
            before.remove(ticket)
            self.waiting.remove(ticket)

    @staticmethod
    def same_size(ticket: Ticket, other: Ticket) -> bool:
        return ticket.info.long == other.info.long

    @invariant()
    def totals_match_the_waiting_requests(self) -> None:
        queue = self.bench.queue
        assert len(queue) == len(self.waiting)
        assert queue.bytes == sum(t.info.body_bytes for t in self.waiting)
        assert queue.tokens == sum(t.info.prompt_tokens for t in self.waiting)
        for owner in self.tenants:
            own = [t for t in self.waiting if t.info.tenant is owner]
            assert owner.waiting == len(own)
            assert (owner in queue.shares.waiting(owner.spec.rank)) == bool(own)
        for (place, rank), (front, oldest) in queue.fronts().items():
            fifos = [
                line for line in queue._buckets.by_key.values() if line.key[:2] == (place, rank)
            ]
            assert front == min(fifos, key=lambda fifo: present(fifo.entry)).sort_key
            assert oldest == min(ticket.since for fifo in fifos for ticket in fifo.tickets)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""Shares of the queue: who goes next, whatever comes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proxy.core.model.types import Outcome, Reason, Refusal, RequestInfo
from proxy.core.queue import fairness
from proxy.core.queue.dispatch import End
from proxy.core.queue.fairness import FairnessSettings
from proxy.core.queue.queue import Queue
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from tests.present import present
from tests.proxy.core.making import LONG, SHORT, ask, placed, router_of, spec, waits

INTERACTIVE, STANDARD, BATCH = Rank
SETTINGS = FairnessSettings()
GOES = Refusal(200, Reason.LEAST_LOADED, "placed")  # the queue does not look at what an end is


def tenant(name: str, weight: float = 1.0, rank: Rank = STANDARD) -> Tenant:
    return Tenant(TenantSpec(name, rank, weight))


def of(who: Tenant, prompt: int = 100, output: int = 50, **fields: Any) -> RequestInfo:
    """Make a request of somebody's."""
    made = ask(prompt, output, **fields)
    made.tenant, made.rank = who, who.spec.rank
    return made


def cost(one: RequestInfo) -> float:
    return one.prompt_tokens + SETTINGS.output_weight * one.expected_output


@dataclass
class Hall:
    """A queue before so many places."""

    queue: Queue = field(default_factory=lambda: Queue(10_000, 10**12, 1e9, None, SETTINGS))
    now: float = 0.0
    served: Counter[str] = field(default_factory=Counter)
    order: list[Ticket] = field(default_factory=list)

    def push(self, one: RequestInfo) -> Ticket:
        return self.queue.push(one, self.now)

    def place(self, places: int = 1) -> list[Ticket]:
        """Let so many go, and charge them, as the router does."""
        left = places

        def end(ticket: Ticket) -> End | None:
            nonlocal left
            one = ticket.ask
            if not left:
                return None
            left -= 1
            if one.tenant is not None:
                fairness.charge(SETTINGS, one.tenant, one, 0)
                self.served[one.tenant.name] += int(cost(one))
            return GOES

        gone = [ticket for ticket, _ in self.queue.leave(end, self.now)]
        self.order += gone
        return gone

    def names(self) -> list[str]:
        return [ticket.ask.tenant.name for ticket in self.order if ticket.ask.tenant]


SIZES = st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 500)), min_size=1, max_size=12)


@given(SIZES, SIZES, st.sampled_from([0.25, 1.0, 3.0]), st.integers(1, 5))
@settings(deadline=None)
def test_services_of_two_that_always_wait_differ_by_one_request_at_most(
    a_sizes: list[tuple[int, int]], b_sizes: list[tuple[int, int]], weight: float, places: int
) -> None:
    """Over their weights; whatever each of them asks for, and however long it goes on."""
    hall, a, b = Hall(), tenant("a"), tenant("b", weight)
    largest = 0.0
    for number in range(60):
        for who, sizes in ((a, a_sizes), (b, b_sizes)):
            while who.waiting < places + 1:
                one = of(who, *sizes[number % len(sizes)])
                largest = max(largest, cost(one) / who.spec.weight)
                hall.push(one)
        assert len(hall.place(places)) == places
        assert abs(hall.served["a"] - hall.served["b"] / weight) <= largest + 1e-6


@given(st.integers(1, 6), st.integers(0, 400), st.integers(1, 8))
@settings(deadline=None)
def test_with_answers_of_unknown_length_by_what_is_in_flight_too(
    ahead: int, likely: int, places: int
) -> None:
    """Outputs are settled only at the end: a's are far longer than was likely, b's shorter."""
    hall, a, b = Hall(), tenant("a"), tenant("b")
    truth = {"a": 900, "b": 20}
    running: list[RequestInfo] = []
    service = Counter[str]()
    worst = 100 + SETTINGS.output_weight * 900
    for _ in range(80):
        for who in (a, b):
            while who.waiting <= ahead + places:
                hall.push(of(who, 100, likely))
        gone = [ticket.ask for ticket in hall.place(places)]
        running += gone
        while len(running) > places * 2:
            one = running.pop(0)
            assert one.tenant is not None
            written = truth[one.tenant.name]
            fairness.charge_output(SETTINGS, one, written - one.bill.prepaid)
            service[one.tenant.name] += int(100 + SETTINGS.output_weight * written)
        assert abs(service["a"] - service["b"]) <= worst * (places * 3 + 1)


def test_a_weight_is_a_share() -> None:
    hall, one, three = Hall(), tenant("one"), tenant("three", 3.0)
    for _ in range(100):
        hall.push(of(one))
        hall.push(of(three))
    for _ in range(80):
        hall.place()
    assert Counter(hall.names()) == {"three": 60, "one": 20}


def test_a_crowd_of_one_tenant_holds_nobody_else_up() -> None:
    hall, crowd, single = Hall(), tenant("crowd"), tenant("single")
    for _ in range(500):
        hall.push(of(crowd))
    hall.place(100)
    hall.push(of(single))
    hall.place(2)
    assert "single" in hall.names()[-2:]


def test_nothing_is_saved_up_by_being_away() -> None:
    hall, busy, lazy = Hall(), tenant("busy"), tenant("lazy")
    for _ in range(300):
        hall.push(of(busy))
    for ticket in hall.place(200):  # they end, and come to what was foreseen
        busy.settle(ticket.ask.bill.unsettled, STANDARD)
    for _ in range(50):
        hall.push(of(lazy))
    hall.place(20)
    assert Counter(hall.names()[-20:])["lazy"] in (10, 11), "from here on they share"


def test_nor_what_one_had_of_another_size() -> None:
    """An application whose shorts never wait has its share where its longs do."""
    workers = spec("s", SHORT, 1000), spec("l", LONG, 10_000, most=1)
    router = router_of(*workers, policy="length", short_limit=500)
    chat, job = tenant("chat"), tenant("job")

    def shorts() -> None:
        for _ in range(10):
            router.leases.finish(placed(router.submit(of(chat), 0.0)), 0.0, Outcome.DONE)

    shorts()
    assert turns(router, job, chat, shorts, prompt=800, long=True)["chat"] == 10


def turns(
    router: Router,
    first: Tenant,
    second: Tenant,
    between: Callable[[], None] = lambda: None,
    **fields: Any,
) -> Counter[str]:
    """Have two wait for one place, and count who has how many of twenty turns."""
    lease = placed(router.submit(of(tenant("before"), **fields), 0.0))
    for who in (first, second):
        for _ in range(30):
            waits(router.submit(of(who, **fields), 0.0))
    names = Counter[str]()
    for _ in range(20):
        between()
        router.leases.finish(lease, 0.0, Outcome.DONE)
        [(ticket, answer)] = router.due(0.0)
        lease = placed(answer)
        names[present(ticket.ask.tenant).name] += 1
    return names


def test_batches_of_ones_own_change_nothing_where_one_chats() -> None:
    """Batch has had much in its gaps: who joins there with a batch is as far there, and no more."""
    hall, night, chat, other = Hall(), tenant("night", rank=BATCH), tenant("chat"), tenant("other")
    hall.push(of(night))
    night.charge(1e9)
    line = of(chat)
    line.rank = BATCH
    hall.push(line)
    for _ in range(20):
        hall.push(of(other))
        hall.push(of(chat))
    hall.place(20)
    assert Counter(hall.names())["chat"] == 10
    for _ in range(20):
        hall.push(of(night))
        line = of(chat)
        line.rank = BATCH
        hall.push(line)
    hall.place(20)  # the rest of the chats
    hall.place(20)
    assert Counter(hall.names()[-20:])["chat"] in range(8, 13), "nor the other way round"


def test_a_long_that_waits_lets_shorts_of_lower_classes_pass() -> None:
    hall, first, second = Hall(), tenant("first", rank=INTERACTIVE), tenant("second")
    hall.push(of(first, long=True))
    short = hall.push(of(second))

    def end(ticket: Ticket) -> End | None:
        return None if ticket.ask.long else GOES

    assert [ticket for ticket, _ in hall.queue.leave(end, 0.0)] == [short]


@given(st.integers(1, 4), st.floats(0.2, 2.0), st.sampled_from([STANDARD, BATCH]))
@settings(max_examples=25, deadline=None)
def test_no_class_waits_beyond_its_age_and_two_places_more(
    flood: int, pause: float, rank: Rank
) -> None:
    """Whatever floods the classes above: a place comes free each `pause`, all of them wanted."""
    hall, patient = Hall(), tenant("patient", rank=rank)
    hall.queue.fairness = FairnessSettings(standard_age_s=5.0, batch_age_s=15.0)
    urgent = tenant("urgent", rank=INTERACTIVE)
    hall.push(of(patient))
    age = hall.queue.fairness.ages[rank]
    while "patient" not in hall.names() and hall.now <= age + 3 * pause:
        while urgent.waiting < flood:
            hall.push(of(urgent))
        hall.now += pause
        hall.place()
    assert "patient" in hall.names()
    assert age <= hall.now <= age + 2 * pause + 1e-6


@given(
    st.sampled_from([(INTERACTIVE,), (STANDARD,), (INTERACTIVE, STANDARD)]),
    st.integers(1, 6),
    st.floats(0.2, 2.0),
    st.integers(0, 20),
)
@settings(max_examples=40, deadline=None)
def test_batch_waits_for_its_age_and_few_places_more_whichever_classes_flood(
    floods: tuple[Rank, ...], deep: int, pause: float, old: int
) -> None:
    """Heads of a class with a backlog are of age at all times themselves: then they take turns."""
    hall, patient = Hall(), tenant("patient", rank=BATCH)
    hall.queue.fairness = FairnessSettings(standard_age_s=2.0, batch_age_s=15.0)
    crowds = [tenant(rank.name, rank=rank) for rank in floods]
    for crowd in crowds:
        for _ in range(old):
            hall.push(of(crowd))
    hall.push(of(patient))
    while "patient" not in hall.names() and hall.now <= 15.0 + 10 * pause:
        for crowd in crowds:
            while crowd.waiting < deep:
                hall.push(of(crowd))
        hall.now += pause
        hall.place()
    assert "patient" in hall.names()
    assert hall.now <= 15.0 + (4 if len(floods) > 1 else 2) * pause + 1e-6


def test_two_classes_of_age_share_the_turns_of_the_aged() -> None:
    hall = Hall()
    crowds = [tenant(rank.name, rank=rank) for rank in Rank]
    for _ in range(50):
        for crowd in crowds[1:]:
            hall.push(of(crowd))
    hall.now = SETTINGS.batch_age_s + 1
    for _ in range(30):
        hall.push(of(crowds[0]))
    for _ in range(40):
        hall.place()
    assert Counter(hall.names()) == {"INTERACTIVE": 20, "STANDARD": 10, "BATCH": 10}


def test_batch_comes_of_age_too() -> None:
    hall = Hall()
    batch, other = tenant("batch", rank=BATCH), tenant("other")
    ticket = hall.push(of(batch))
    hall.now = SETTINGS.batch_age_s
    hall.push(of(other))
    hall.push(of(other))
    assert hall.place() == [ticket]
    assert ticket.aged


def test_who_goes_ahead() -> None:
    hall = Hall()
    a, b, c = tenant("a"), tenant("b"), tenant("c", rank=INTERACTIVE)
    for _ in range(10):
        hall.push(of(a))
    for _ in range(3):
        hall.push(of(c))
    assert hall.queue.ahead_of(of(a)) == 13
    assert hall.queue.ahead_of(of(b)) == 4, "one of a's, for its own is one; and all of c's"
    assert hall.queue.ahead_of(of(c)) == 3
    assert hall.queue.ahead_of(of(b, model="other")) == 0


def test_who_stands_before() -> None:
    hall = Hall()
    standard, urgent = tenant("standard"), tenant("urgent", rank=INTERACTIVE)
    batch = tenant("batch", rank=BATCH)
    assert not hall.queue.any_ahead_of(of(batch))
    hall.push(of(batch))
    assert not hall.queue.any_ahead_of(of(standard)), "batch is in nobody's way"
    hall.push(of(standard))
    assert hall.queue.any_ahead_of(of(standard))
    assert hall.queue.any_ahead_of(of(batch, long=True)), "whatever its size"
    assert not hall.queue.any_ahead_of(of(standard, long=True))
    assert not hall.queue.any_ahead_of(of(urgent))


@pytest.mark.parametrize("alike", [True, False])
def test_to_let_one_go_costs_the_same_whoever_waits(alike: bool) -> None:
    """Counted in calls: of what is done for one that comes, goes and is paid for."""

    def calls(tenants: int) -> int:
        hall = Hall()
        everybody = [tenant(f"t{n}") for n in range(tenants)]
        for n, who in enumerate(everybody):
            who.charge(n % 7 * 50.0)
            hall.push(of(who, 100 if alike else 100 + n * 37 % 900))
        count = 0

        def note(_frame: object, event: str, _argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        for n in range(20):
            sys.setprofile(note)
            try:
                hall.push(of(everybody[n % tenants]))
                [gone] = hall.place()
                present(gone.ask.tenant).charge(10.0)
                hall.place(0)
                hall.queue.fronts()
            finally:
                sys.setprofile(before)
        return count

    assert calls(2000) < 2.5 * calls(20)


def test_what_one_is_given_back_or_charged_while_it_waits_changes_its_turn() -> None:
    hall, a, b, c = Hall(), tenant("a"), tenant("b"), tenant("c")
    for who in (a, b, c):
        hall.push(of(who))
    a.charge(500.0)
    b.charge(300.0)
    c.charge(400.0)
    a.charge(-450.0)
    hall.place(3)
    assert hall.names() == ["a", "b", "c"]


def test_who_comes_back_stands_where_the_least_of_those_who_wait_does_now() -> None:
    hall, a, b, late = Hall(), tenant("a"), tenant("b"), tenant("late")
    for who in (a, b):
        hall.push(of(who))
    a.charge(900.0)
    b.charge(700.0)
    b.charge(-100.0)
    hall.push(of(late))
    assert late.standings[STANDARD] == 600.0


class QueueMachine(RuleBasedStateMachine):
    """Tenants of all classes come, go and leave at random."""

    def __init__(self) -> None:
        super().__init__()
        self.hall = Hall()
        self.tenants = [tenant(f"{rank.name}{n}", n + 1.0, rank) for rank in Rank for n in range(2)]
        self.waiting: list[Ticket] = []

    @rule(
        who=st.integers(0, 5),
        prompt=st.integers(1, 3000),
        long=st.booleans(),
        model=st.sampled_from("xy"),
    )
    def comes(self, who: int, prompt: int, long: bool, model: str) -> None:
        one = of(self.tenants[who], prompt, long=long, model=model)
        self.waiting.append(self.hall.push(one))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(ticket)
        assert self.hall.queue.remove(ticket)

    @rule(who=st.integers(0, 5), tokens=st.integers(-3000, 3000))
    def is_charged(self, who: int, tokens: int) -> None:
        self.tenants[who].charge(tokens)

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0, 301.0]))
    def time_passes(self, seconds: float) -> None:
        self.hall.now += seconds

    @rule(places=st.integers(1, 4))
    def places_come_free(self, places: int) -> None:
        before = list(self.waiting)
        gone = self.hall.place(places)
        assert len(gone) == min(places, len(before)), "nothing stands idle while somebody waits"
        for ticket in gone:
            rest = [t for t in before if t.ask.model == ticket.ask.model]
            if ticket.ask.rank is BATCH and not ticket.aged:
                assert all(t.ask.rank is BATCH for t in rest), "batch goes in the gaps"
            if not ticket.aged:
                assert ticket.ask.rank == min(
                    t.ask.rank for t in rest if self.same_place(t, ticket)
                )
            before.remove(ticket)
            self.waiting.remove(ticket)

    @staticmethod
    def same_place(one: Ticket, other: Ticket) -> bool:
        return one.ask.long == other.ask.long

    @invariant()
    def the_books_are_right(self) -> None:
        queue = self.hall.queue
        assert len(queue) == len(self.waiting)
        assert queue.bytes == sum(t.ask.body_bytes for t in self.waiting)
        assert queue.tokens == sum(t.ask.prompt_tokens for t in self.waiting)
        for who in self.tenants:
            own = [t for t in self.waiting if t.ask.tenant is who]
            assert who.waiting == len(own)
            assert (who in queue.turns.waiting(who.spec.rank)) == bool(own)
        for (place, rank), (front, oldest) in queue.fronts().items():
            there = [line for line in queue._lines.by_key.values() if line.key[:2] == (place, rank)]
            assert front == min(line.turn for line in there)
            assert oldest == min(ticket.since for line in there for ticket in line.tickets)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""Charges."""

from __future__ import annotations

from math import inf

import pytest

from proxy.core.fleet.charges import Fleet, _more
from proxy.core.fleet.leases import Decision, HandoverDecision, Lease
from proxy.core.lifecycle.feedback import update_breaker
from proxy.core.model.role import Role
from proxy.core.model.types import Outcome, Reason, RequestInfo
from tests.proxy.core.making import ask, fleet_of, idle, members, spec


def charge(fleet: Fleet, one: RequestInfo, now: float = 0.0, *, cached: int = 0) -> Lease:
    """Charge to the first worker."""
    decision = Decision(members(fleet)[0], Reason.ONLY_CHOICE, cached_tokens=cached)
    return fleet.charge(one, decision, now)


@pytest.fixture
def fleet() -> Fleet:
    """Make a fleet of one."""
    return fleet_of(spec("a"))


def test_a_request_is_charged_when_it_is_sent(fleet: Fleet) -> None:
    charge(fleet, ask(1000, 50, samples=2, long=True))
    worker = members(fleet)[0]
    assert (worker.requests, worker.sequences) == (1, 2)
    assert (worker.prefill_tokens, worker.long_tokens, worker.decode_tokens) == (1000, 1000, 100)
    assert (worker.kv_tokens, worker.decoding) == (1100, 0)


def test_what_is_cached_is_not_charged(fleet: Fleet) -> None:
    members(fleet)[0].pace.missing = 0.0
    charge(fleet, ask(1000), cached=900)
    assert members(fleet)[0].prefill_tokens == 100
    assert members(fleet)[0].kv_tokens == 1050


def test_its_first_token_moves_it_from_prefill_to_decode(fleet: Fleet) -> None:
    lease = charge(fleet, ask(1000, 50, samples=2, long=True))
    worker = members(fleet)[0]
    for _ in range(2):
        fleet.first_token(lease, 1.0)
        assert (worker.prefill_tokens, worker.long_tokens, worker.decoding) == (0, 0, 2)
    assert lease.first_token_at == 1.0
    assert worker.pace.prefills == 1


def test_what_no_engine_computes_says_nothing_of_its_worker(fleet: Fleet) -> None:
    """A /tokenize is answered at once, however long the prefill beside it, or hung."""
    worker = members(fleet)[0]
    charge(fleet, ask(20_000))
    known = (worker.pace.token_s, worker.pace.fixed_s, worker.free_at, worker.due_at)
    for n in range(1, 4):
        lease = charge(fleet, ask(0, None, generates=False), 0.1 * n)
        assert (worker.requests, worker.prefill_tokens) == (2, 20_000)
        fleet.first_token(lease, 0.1 * n + 0.003)
        update_breaker(fleet, lease, 0.1 * n + 0.004, Outcome.DONE, None)
        fleet.release(lease)
    assert (worker.pace.token_s, worker.pace.fixed_s, worker.free_at, worker.due_at) == known
    assert worker.pace.prefills == 0
    assert (worker.requests, worker.prefill_tokens) == (1, 20_000)


@pytest.mark.parametrize("one", [ask(1000, None, generates=False), ask(0, 50)])
def test_what_an_engine_prefills_teaches_its_pace(fleet: Fleet, one: RequestInfo) -> None:
    fleet.first_token(charge(fleet, one), 1.0)
    assert members(fleet)[0].pace.prefills == 1


def test_tokens_are_paid_off_but_not_twice(fleet: Fleet) -> None:
    lease = charge(fleet, ask(100, 50))
    fleet.tokens(lease, 20)
    assert members(fleet)[0].decode_tokens == 30
    fleet.tokens(lease, 70)
    assert members(fleet)[0].decode_tokens == 0
    assert lease.seen_tokens == 90


@pytest.mark.parametrize(("limit", "steps", "left"), [
    (None, [20], 30), (None, [50], 50), (None, [20, 40], 40), (None, [30, 90], 30),
    (80, [60], 20), (80, [50, 10, 15], 5), (80, [80], 0), (80, [50, 30], 0), (80, [500], 0),
])  # fmt: skip
def test_an_answer_longer_than_foreseen_has_as_much_to_go_again(
    fleet: Fleet, limit: int | None, steps: list[int], left: int
) -> None:
    """As far as its limit allows: nobody is to count on what it holds."""
    one = ask(100, limit, samples=2)
    one.expected_output = 25
    if limit is not None:
        one.output_tokens = limit // 2
    lease = charge(fleet, one)
    for step in steps:
        fleet.tokens(lease, step)
    assert members(fleet)[0].decode_tokens == lease.decode_tokens == left
    fleet.release(lease)
    assert idle(fleet.roster)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("written", [0, 20, 999])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("generates", [False, True])
def test_everything_is_given_back_once(
    fleet: Fleet, begun: bool, written: int, stream: bool, generates: bool
) -> None:
    lease = charge(fleet, ask(1000, 50, samples=3, stream=stream, generates=generates, long=True))
    other = charge(fleet, ask(7, 7))
    if begun:
        fleet.first_token(lease, 1.0)
    fleet.tokens(lease, written)
    assert fleet.release(lease)
    assert not fleet.release(lease)
    fleet.first_token(lease, 2.0)
    fleet.tokens(lease, 5)
    assert members(fleet)[0].requests == 1
    assert members(fleet)[0].prefill_tokens == 7
    fleet.release(other)
    assert idle(fleet.roster)


def test_one_without_a_stream_is_taken_to_decode_when_it_should(fleet: Fleet) -> None:
    worker = members(fleet)[0]
    lease = charge(fleet, ask(1000, 50, stream=False))
    fleet.settle(0.01)
    assert worker.decoding == 0
    fleet.settle(10.0)
    assert (worker.decoding, worker.prefill_tokens) == (1, 0)
    assert worker.pace.prefills == 0  # nothing was seen
    fleet.release(lease)
    assert idle(fleet.roster)


def test_what_was_released_before_is_not_settled(fleet: Fleet) -> None:
    lease = charge(fleet, ask(1000, 50, stream=False))
    fleet.release(lease)
    fleet.settle(10.0)
    assert idle(fleet.roster)


def test_the_wait_shrinks_as_time_goes_and_what_is_overdue_will_take_as_long_again(
    fleet: Fleet,
) -> None:
    worker = members(fleet)[0]
    worker.pace.token_s, worker.pace.fixed_s = 1e-3, 0.1
    lease = charge(fleet, ask(10_000))
    waits = [worker.wait_s(now, for_long=False) for now in (0.0, 5.0, 9.9, 10.1, 60.1)]
    assert waits == pytest.approx([10.0, 5.0, 2.0, 2.0, 52.0])
    fleet.first_token(lease, 61.0)
    assert worker.wait_s(61.0, for_long=False) == 0.0


def test_a_sign_of_life_gives_the_rest_its_time_anew(fleet: Fleet) -> None:
    worker = members(fleet)[0]
    worker.pace.token_s, worker.pace.fixed_s = 1e-3, 0.0
    worker.pace.first_due = inf  # it is to learn nothing from that
    first = charge(fleet, ask(1000))
    charge(fleet, ask(1000), 0.5)
    assert worker.wait_s(4.0, for_long=False) == pytest.approx(0.4 + 3.0)
    fleet.first_token(first, 4.0)
    assert worker.wait_s(4.0, for_long=False) == pytest.approx(1.0)


def test_behind_longs_a_short_waits_as_far_as_it_is_not_let_past(fleet: Fleet) -> None:
    worker = members(fleet)[0]
    worker.pace.token_s, worker.pace.passing = 1e-3, 0.1
    charge(fleet, ask(9000, long=True))
    charge(fleet, ask(1000))
    assert worker.wait_s(0.0, for_long=True) == pytest.approx(10.0)
    assert worker.wait_s(0.0, for_long=False) == pytest.approx(1.9)


def test_a_trial_that_begins_to_answer_closes_the_breaker(fleet: Fleet) -> None:
    worker = members(fleet)[0]
    fleet.health.failed(worker, 0.0, 1.0)
    assert fleet.roster.ejections.resting == {worker}
    lease = charge(fleet, ask(), 1.0)
    assert lease.trial
    fleet.first_token(lease, 1.5)
    assert worker.breaker.closed
    assert fleet.roster.ejections.resting == set()


def test_prices_follow_those_who_decode(fleet: Fleet) -> None:
    worker = members(fleet)[0]
    alone = worker.prompt_price
    lease = charge(fleet, ask(samples=4))
    fleet.first_token(lease, 0.1)
    assert worker.prompt_price > alone
    assert worker.output_price == pytest.approx(4 * worker.pace.each_s)
    fleet.release(lease)
    assert worker.output_price == 0


def test_the_rest_of_a_hand_over_moves_with_all_that_is_charged_for_it() -> None:
    fleet = fleet_of(spec("p0", Role.PREFILL), spec("d0", Role.DECODE), spec("d1", Role.DECODE))
    first, one, other = members(fleet)
    made = Decision(one, Reason.HANDOVER, handover=HandoverDecision(first, 0, 1000, 1.0, 0.1))
    lease = fleet.charge(ask(1000, 50), made, 0.0)
    fleet.move(lease, other, 1.0)  # not before its prefill is done
    assert lease.worker is one
    fleet.hand_over(lease, 1.0)
    fleet.move(lease, other, 1.0)
    assert idle([first, one])
    assert (other.requests, other.sequences, other.decode_tokens, other.kv_tokens) == (
        1,
        1,
        50,
        1050,
    )
    assert (lease.worker, lease.decision.worker) == (other, other)
    fleet.first_token(lease, 2.0)
    fleet.move(lease, one, 2.0)  # nor once it writes
    assert lease.worker is other
    fleet.release(lease)
    assert idle([first, one, other])


@pytest.mark.parametrize(
    ("seen", "limit", "samples", "more"),
    [(50, None, 1, 50), (60, None, 1, 40), (50, 80, 1, 30), (80, 80, 1, 0), (100, 80, 2, 60)],
)
def test_an_answer_longer_than_foreseen_may_be_as_long_again(
    seen: int, limit: int | None, samples: int, more: int
) -> None:
    one = ask(100, limit, samples=samples)
    one.expected_output = 50
    assert _more(one, seen) == more

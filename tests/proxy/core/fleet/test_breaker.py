"""Breakers."""

from __future__ import annotations

import pytest

from proxy.core.fleet.breaker import (
    BUSY,
    FAILED,
    FAILURES_TO_OPEN,
    MAX_RETRY_AFTER_S,
    MIN_OPEN_S,
    TRIAL_INTERVAL_S,
    Breaker,
    BreakerState,
)


def opened(now: float = 0.0) -> Breaker:
    """Make one that has just opened."""
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(now)
    return breaker


def test_it_tells_how_often_it_opened_and_why() -> None:
    breaker = opened()
    for _ in range(5):  # others that were under way
        breaker.failed(0.1)
    assert breaker.opened == {FAILED: 1, BUSY: 0}
    breaker.sent(MIN_OPEN_S)
    breaker.failed(MIN_OPEN_S, busy=True)  # a trial: it has been open all the time
    assert breaker.opened == {FAILED: 1, BUSY: 0}
    breaker.succeeded()
    breaker.failed(2.0, 1.0, busy=True)
    breaker.succeeded()
    breaker.failed(4.0, 1.0)
    assert breaker.opened == {FAILED: 2, BUSY: 1}


def test_it_knows_what_opened_it_last() -> None:
    breaker, other = Breaker(), Breaker()
    for why in ("reset", "timeout", "502"):
        breaker.failed(0.0, why=why)
    assert breaker.why == "502"
    breaker.failed(0.1, why="reset")  # another that was under way
    assert breaker.why == "502"
    breaker.sent(MIN_OPEN_S)
    breaker.failed(MIN_OPEN_S, why="connect")
    other.take(breaker.snapshot())
    assert (other.why, other.snapshot()) == ("connect", breaker.snapshot())
    breaker.succeeded()
    assert breaker.why == ""


def test_then_one_is_let_through_and_closes_it() -> None:
    breaker = opened()
    now = MIN_OPEN_S
    assert breaker.state(now) is BreakerState.HALF_OPEN
    assert breaker.lets_pass(now)
    assert breaker.sent(now)
    assert not breaker.lets_pass(now)
    breaker.succeeded()
    assert breaker.lets_pass(now)
    assert not breaker.sent(now)


def test_late_failures_of_requests_sent_before_do_not_make_each_rest_longer() -> None:
    breaker = opened()
    for _ in range(8):
        now = breaker.until + 0.1
        breaker.failed(now)
        assert breaker.until == now + 2 * MIN_OPEN_S


@pytest.mark.parametrize(("asked", "rest"), [(7.0, 7.0), (0.0, 0.0), (1e9, MAX_RETRY_AFTER_S)])
def test_retry_after_is_honoured_within_reason(asked: float, rest: float) -> None:
    breaker = Breaker()
    breaker.failed(1.0, asked)
    assert breaker.until == 1.0 + rest


def test_a_trial_that_tells_nothing_bars_nobody_for_long() -> None:
    breaker = opened()
    now = MIN_OPEN_S
    breaker.sent(now)
    assert not breaker.lets_pass(now + TRIAL_INTERVAL_S / 2)
    assert breaker.lets_pass(now + TRIAL_INTERVAL_S)
    breaker.sent(now + TRIAL_INTERVAL_S)
    breaker.abandoned()
    assert breaker.lets_pass(now + TRIAL_INTERVAL_S)


@pytest.mark.parametrize("busy", [True, False])
def test_what_another_process_opened_is_counted_once_by_its_cause(*, busy: bool) -> None:
    there, here = Breaker(), Breaker()
    here.take(there.snapshot())
    assert here.opened == {FAILED: 0, BUSY: 0}
    for _ in range(FAILURES_TO_OPEN):
        there.failed(0.0, 5.0, busy=busy)
    for _ in range(2):
        here.take(there.snapshot())
    assert here.opened == {FAILED: int(not busy), BUSY: int(busy)}

"""Circuit breakers of workers."""

from __future__ import annotations

import pytest

from proxy.core.fleet.breaker import (
    BUSY,
    FAILED,
    FAILURES_TO_OPEN,
    MAX_OPEN_S,
    MAX_RETRY_AFTER_S,
    MIN_OPEN_S,
    TRIAL_INTERVAL_S,
    Breaker,
    BreakerState,
)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.record_failure(now)
    return breaker


def test_openings_are_counted_by_cause() -> None:
    breaker = opened()
    for _ in range(5):  # requests sent before it opened
        breaker.record_failure(0.1)
    assert breaker.opened == {FAILED: 1, BUSY: 0}
    breaker.record_sent(MIN_OPEN_S)
    breaker.record_failure(
        MIN_OPEN_S, busy=True
    )  # a failed trial does not count: the breaker was open
    assert breaker.opened == {FAILED: 1, BUSY: 0}
    breaker.record_success()
    breaker.record_failure(2.0, 1.0, busy=True)
    breaker.record_success()
    breaker.record_failure(4.0, 1.0)
    assert breaker.opened == {FAILED: 2, BUSY: 1}


def test_why_is_the_cause_of_the_last_opening() -> None:
    breaker, other = Breaker(), Breaker()
    for why in ("reset", "timeout", "502"):
        breaker.record_failure(0.0, why=why)
    assert breaker.why == "502"
    breaker.record_failure(0.1, why="reset")  # a request sent before it opened
    assert breaker.why == "502"
    breaker.record_sent(MIN_OPEN_S)
    breaker.record_failure(MIN_OPEN_S, why="connect")
    other.copy_state(breaker.snapshot())
    assert (other.why, other.snapshot()) == ("connect", breaker.snapshot())
    breaker.record_success()
    assert breaker.why == ""


def test_one_successful_trial_closes_the_breaker() -> None:
    breaker = opened()
    now = MIN_OPEN_S
    assert breaker.state(now) is BreakerState.HALF_OPEN
    assert breaker.may_send(now)
    assert breaker.record_sent(now)
    assert not breaker.may_send(now)
    breaker.record_success()
    assert breaker.may_send(now)
    assert not breaker.record_sent(now)


def test_late_failures_do_not_lengthen_the_open_time() -> None:
    breaker = opened()
    for _ in range(8):
        now = breaker.until + 0.1
        breaker.record_failure(now)
        assert breaker.until == now + 2 * MIN_OPEN_S


@pytest.mark.parametrize(
    ("retry_after_s", "open_s"), [(7.0, 7.0), (0.0, 0.0), (1e9, MAX_RETRY_AFTER_S)]
)
def test_retry_after_sets_the_open_time_up_to_a_limit(retry_after_s: float, open_s: float) -> None:
    breaker = Breaker()
    breaker.record_failure(1.0, retry_after_s)
    assert breaker.until == 1.0 + open_s


def test_trial_without_result_blocks_one_interval() -> None:
    breaker = opened()
    now = MIN_OPEN_S
    breaker.record_sent(now)
    assert not breaker.may_send(now + TRIAL_INTERVAL_S / 2)
    assert breaker.may_send(now + TRIAL_INTERVAL_S)
    breaker.record_sent(now + TRIAL_INTERVAL_S)
    breaker.abandon_trial()
    assert breaker.may_send(now + TRIAL_INTERVAL_S)


def test_trial_is_due_after_each_opening_and_again_if_one_had_no_result() -> None:
    breaker = Breaker()
    assert not breaker.is_trial_due(0.0)
    breaker = opened()
    assert not breaker.is_trial_due(breaker.until - 0.1)
    now = breaker.until
    assert breaker.is_trial_due(now)
    breaker.record_sent(now)
    assert not breaker.is_trial_due(now + MAX_OPEN_S - 0.1)
    breaker.abandon_trial()
    assert not breaker.is_trial_due(now + 1.0)
    assert breaker.is_trial_due(now + MAX_OPEN_S)
    breaker.record_failure(now)
    assert breaker.is_trial_due(breaker.until)


def test_trial_in_another_process_is_no_trial_here() -> None:
    remote, local = Breaker(), Breaker()
    for _ in range(FAILURES_TO_OPEN):
        remote.record_failure(0.0)
    now = remote.until
    remote.record_sent(now)
    local.copy_state(remote.snapshot())
    local.abandon_trial()
    assert not local.is_trial_due(now), "a trial began there a moment ago"
    assert local.is_trial_due(now + MAX_OPEN_S)


@pytest.mark.parametrize("busy", [True, False])
def test_opening_in_another_process_is_counted_once_by_cause(*, busy: bool) -> None:
    remote, local = Breaker(), Breaker()
    local.copy_state(remote.snapshot())
    assert local.opened == {FAILED: 0, BUSY: 0}
    for _ in range(FAILURES_TO_OPEN):
        remote.record_failure(0.0, 5.0, busy=busy)
    for _ in range(2):
        local.copy_state(remote.snapshot())
    assert local.opened == {FAILED: int(not busy), BUSY: int(busy)}

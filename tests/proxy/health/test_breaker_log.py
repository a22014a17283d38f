"""Breakers in the log and for operators."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest

from proxy.core.fleet.breaker import FAILURES_TO_OPEN, MAX_OPEN_S, MIN_OPEN_S, TRIAL_INTERVAL_S
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.worker import Worker
from proxy.health.breaker_log import TROUBLES, BreakerLog, describe_breaker
from proxy.wire.worker.connection import WorkerError
from tests.proxy.core.making import fleet_of, spec, take_down

WITHOUT_TEXT = {
    WorkerError.STATUS,
    WorkerError.OURS,
    WorkerError.DRAINED,
    WorkerError.LATE_TOKENS,
}  # a status is shown as it is; the others are no worker's failure


def fail_in_turn(fleet: Fleet, worker: Worker, causes: Iterable[str]) -> float:
    """Fail one request after another, each as soon as the worker gets one; return the time."""
    now = 0.0
    for why in causes:
        fleet.health.record_failure(worker, now, why=why)
        now = max(worker.breaker.until, now)
        worker.breaker.record_sent(now)
    return now


def test_every_worker_error_has_a_text() -> None:
    assert set(TROUBLES) == {trouble.value for trouble in WorkerError} - WITHOUT_TEXT


def test_opening_and_closing_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = fleet_of(spec("a"))
    [worker] = fleet.roster
    fleet.roster.ejections.listener = BreakerLog()
    with caplog.at_level(logging.INFO):
        now = fail_in_turn(fleet, worker, ("502",) * 30)
        fleet.health.record_success(worker)
        fleet.health.record_failure(worker, now, 20.0, busy=True, why="503")
    messages = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert messages == [
        ("WARNING", f"worker a gets no requests for {MIN_OPEN_S:g} s: it returned 502"),
        ("INFO", "worker a responds, and gets requests again"),
        ("INFO", "worker a gets no requests for 20 s: it returned 503"),
    ]


def test_failed_trial_is_logged_for_a_new_cause(caplog: pytest.LogCaptureFixture) -> None:
    """The worker dies, restarts, and then answers every request with 500."""
    fleet = fleet_of(spec("a"))
    [worker] = fleet.roster
    fleet.roster.ejections.listener = BreakerLog()
    with caplog.at_level(logging.INFO):
        fail_in_turn(fleet, worker, ("reset",) * 3 + ("500",) * 20 + ("reset",) * 5)
        fleet.health.record_success(worker)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].endswith(f": {TROUBLES['reset']}")
    assert messages[1].endswith(": it returned 500")
    assert messages[2:] == ["worker a responds, and gets requests again"]


def test_often_busy_worker_is_logged_rarely(caplog: pytest.LogCaptureFixture) -> None:
    fleet = fleet_of(spec("a"), spec("b"))
    busy_worker, other = fleet.roster
    fleet.roster.ejections.listener = BreakerLog()
    with caplog.at_level(logging.INFO):
        for second in range(100):
            fleet.health.record_failure(busy_worker, second, 0.5, busy=True, why="429")
            fleet.health.record_success(busy_worker)
            fleet.health.record_failure(other, second, 0.0, busy=True, why="429")  # without a pause
            fleet.health.record_success(other)
    messages = [record.getMessage() for record in caplog.records]
    line = "worker a gets no requests for 0.5 s: it returned 429"
    assert messages == [line, "worker a responds, and gets requests again"] * 2


def test_panic_and_its_end_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    fleet = fleet_of(*(spec(name) for name in "abc"), clock=lambda: now)
    fleet.roster.ejections.set_threshold(0.5)
    fleet.roster.ejections.listener = BreakerLog()
    with caplog.at_level(logging.INFO):
        for second in range(100):
            now = float(second)
            for worker in fleet.roster:
                for _ in range(FAILURES_TO_OPEN):
                    fleet.health.record_failure(worker, now, why="502")
            for worker in fleet.roster:
                fleet.health.record_success(worker)
    messages = [(record.levelname, record.getMessage()) for record in caplog.records]
    panic = (
        "model m: requests fail on 2 of 3 workers; breakers are ignored until more workers "
        "respond (routing.panic_threshold)"
    )
    end = "model m: requests fail on 1 of 3 workers; breakers are no longer ignored"
    found = [pair for pair in messages if pair[1].startswith("model")]
    assert found == [("WARNING", panic), ("INFO", end)] * 2


def test_end_of_a_panic_is_not_logged_if_all_workers_are_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Requests would fail on 0 of 0 workers."""
    fleet = fleet_of(spec("a"), spec("b"))
    fleet.roster.ejections.set_threshold(0.5)
    fleet.roster.ejections.listener = BreakerLog()
    with caplog.at_level(logging.INFO):
        for worker in fleet.roster:
            for _ in range(FAILURES_TO_OPEN):
                fleet.health.record_failure(worker, 100.0, why="502")
        take_down(fleet, "a", "b")
    assert "breakers are ignored" in caplog.text
    assert not fleet.roster.ejections.panics
    assert "no longer ignored" not in caplog.text


def test_removed_worker_is_forgotten() -> None:
    fleet = fleet_of(spec("a"))
    [worker] = fleet.roster
    fleet.roster.ejections.listener = log = BreakerLog()
    fleet.health.record_failure(worker, 0.0, 20.0)
    assert worker in log._causes
    fleet.roster.remove("a")
    assert not log._causes
    assert not log._logged_at


def test_reason_shows_the_time_of_the_next_request() -> None:
    fleet = fleet_of(spec("a"))
    [worker] = fleet.roster
    for _ in range(FAILURES_TO_OPEN):
        fleet.health.record_failure(worker, 10.0, why="timeout")
    late = "it did not respond in time"
    assert describe_breaker(worker, 10.0) == f"{late}; no requests for 0.5 s more"
    assert describe_breaker(worker, 10.5) == f"{late}; a request may try it"
    worker.breaker.record_sent(11.0)
    assert describe_breaker(worker, 11.5) == f"{late}; a request is trying it"
    assert describe_breaker(worker, 11.0 + TRIAL_INTERVAL_S) == f"{late}; a request may try it"
    fleet.health.record_failure(worker, 14.0, MAX_OPEN_S)
    assert describe_breaker(worker, 14.0) == "requests failed; no requests for 30 s more"
    fleet.health.record_success(worker)
    fleet.health.record_failure(worker, 14.0, 250.0)
    assert describe_breaker(worker, 14.0).endswith("no requests for 250 s more")
    fleet.health.record_success(worker)
    fleet.health.record_failure(worker, 15.0, busy=True)
    assert describe_breaker(worker, 15.0).startswith("it is busy; ")

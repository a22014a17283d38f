"""Who rests, in the log and for operators."""

from __future__ import annotations

import logging

import pytest

from proxy.core.fleet.breaker import FAILURES_TO_OPEN, MAX_OPEN_S, MIN_OPEN_S, TRIAL_INTERVAL_S
from proxy.health.breaker_log import TROUBLES, BreakerLog, describe_breaker
from proxy.wire.worker.connection import WorkerError
from tests.proxy.core.making import fleet_of, spec

NEVER = {
    WorkerError.STATUS,
    WorkerError.OURS,
}  # a status is told itself, and the other is no worker's


def test_every_trouble_has_its_words() -> None:
    assert set(TROUBLES) == {trouble.value for trouble in WorkerError} - NEVER


def test_a_rest_is_a_line_and_its_end_another(caplog: pytest.LogCaptureFixture) -> None:
    fleet = fleet_of(spec("a"))
    [worker] = fleet.roster
    fleet.roster.ejections.listener = BreakerLog()
    with caplog.at_level(logging.INFO):
        now = 0.0
        for _ in range(30):
            fleet.health.failed(worker, now, why="502")
            now = max(worker.breaker.until, now)
            worker.breaker.sent(now)
        fleet.health.succeeded(worker)
        fleet.health.failed(worker, now, 20.0, busy=True, why="503")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("WARNING", f"worker a gets no requests for {MIN_OPEN_S:g} s: it returned 502"),
        ("INFO", "worker a responds, and gets requests again"),
        ("INFO", "worker a gets no requests for 20 s: it returned 503"),
    ]


def test_a_worker_that_is_often_busy_is_logged_rarely(caplog: pytest.LogCaptureFixture) -> None:
    fleet = fleet_of(spec("a"), spec("b"))
    one, other = fleet.roster
    fleet.roster.ejections.listener = BreakerLog()
    with caplog.at_level(logging.INFO):
        for second in range(100):
            fleet.health.failed(one, second, 0.5, busy=True, why="429")
            fleet.health.succeeded(one)
            fleet.health.failed(
                other, second, 0.0, busy=True, why="429"
            )  # may be asked again at once
            fleet.health.succeeded(other)
    said = [record.getMessage() for record in caplog.records]
    rests = "worker a gets no requests for 0.5 s: it returned 429"
    assert said == [rests, "worker a responds, and gets requests again"] * 2


def test_a_panic_and_its_end_are_lines_one_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    fleet = fleet_of(*(spec(name) for name in "abc"), clock=lambda: now)
    fleet.roster.ejections.set_threshold(0.5)
    fleet.roster.ejections.listener = BreakerLog()
    with caplog.at_level(logging.INFO):
        for second in range(100):
            now = float(second)
            for worker in fleet.roster:
                for _ in range(FAILURES_TO_OPEN):
                    fleet.health.failed(worker, now, why="502")
            for worker in fleet.roster:
                fleet.health.succeeded(worker)
    said = [(each.levelname, each.getMessage()) for each in caplog.records]
    panic = (
        "model m: requests fail on 2 of 3 workers; breakers are ignored until more workers "
        "respond (routing.panic_threshold)"
    )
    end = "model m: requests fail on 1 of 3 workers; breakers are no longer ignored"
    found = [each for each in said if each[1].startswith("model")]
    assert found == [("WARNING", panic), ("INFO", end)] * 2


def test_nothing_is_kept_of_one_that_was_taken_out() -> None:
    fleet = fleet_of(spec("a"))
    [worker] = fleet.roster
    fleet.roster.ejections.listener = log = BreakerLog()
    fleet.health.failed(worker, 0.0, 20.0)
    assert worker in log._open
    fleet.roster.remove("a")
    assert not log._open
    assert not log._logged_at


def test_operators_are_told_when_it_is_asked_again() -> None:
    fleet = fleet_of(spec("a"))
    [worker] = fleet.roster
    for _ in range(FAILURES_TO_OPEN):
        fleet.health.failed(worker, 10.0, why="timeout")
    late = "it did not respond in time"
    assert describe_breaker(worker, 10.0) == f"{late}; no requests for 0.5 s more"
    assert describe_breaker(worker, 10.5) == f"{late}; the next request tries it"
    worker.breaker.sent(11.0)
    assert describe_breaker(worker, 11.5) == f"{late}; a request is trying it"
    assert describe_breaker(worker, 11.0 + TRIAL_INTERVAL_S) == f"{late}; the next request tries it"
    fleet.health.failed(worker, 14.0, MAX_OPEN_S)
    assert describe_breaker(worker, 14.0) == "requests failed; no requests for 30 s more"
    fleet.health.succeeded(worker)
    fleet.health.failed(worker, 14.0, 250.0)
    assert describe_breaker(worker, 14.0).endswith("no requests for 250 s more")
    fleet.health.succeeded(worker)
    fleet.health.failed(worker, 15.0, busy=True)
    assert describe_breaker(worker, 15.0).startswith("it is busy; ")

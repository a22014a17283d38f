"""The retry budget."""

from __future__ import annotations

import pytest

from proxy.core.fleet.worker import Worker
from proxy.core.lifecycle.retries import MIN_RESERVE, WINDOW_S, RetryBudget, WorkerFailureEvents
from tests.proxy.core.making import spec

W0, W1 = Worker(spec("w0"), 0), Worker(spec("w1"), 1)


def spent(budget: RetryBudget, now: float) -> int:
    """Spend all there is."""
    count = 0
    while budget.spend(now):
        count += 1
    return count


def test_requests_earn_their_share() -> None:
    budget = RetryBudget(0.2)
    spent(budget, 0.0)
    for _ in range(26):
        budget.earn(0.0)
    assert spent(budget, 0.0) == 5


def test_they_come_back_with_time_but_are_not_hoarded() -> None:
    budget = RetryBudget(0.2)
    spent(budget, 0.0)
    assert spent(budget, 3.0) == 3
    assert spent(budget, 1e6) == MIN_RESERVE


def test_none_at_all() -> None:
    assert spent(RetryBudget(0.0), 1e6) == 0


def test_what_many_requests_have_earned_is_there_at_once() -> None:
    budget = RetryBudget(0.2)
    for second in range(10):
        for _ in range(100):
            budget.earn(float(second))
    assert spent(budget, 9.5) == 200


def test_but_only_that_of_the_last_seconds() -> None:
    budget = RetryBudget(0.2)
    for _ in range(1000):
        budget.earn(0.0)
    for _ in range(100):
        budget.earn(20.0)
    assert spent(budget, 20.0) == 20
    for _ in range(1000):
        budget.earn(21.0)
    assert spent(budget, 1e6) == MIN_RESERVE


# Those that fall with their worker


def test_all_that_a_worker_had_when_it_fell_go_over() -> None:
    falls = WorkerFailureEvents()
    assert not falls.spare(W0, 1.0, 9.0, beside=8)  # the first one pays
    assert all(falls.spare(W0, 1.0 + n / 10, 9.0 + n / 100, beside=7) for n in range(60))


def test_a_worker_falls_again_after_a_while_and_not_before() -> None:
    falls = WorkerFailureEvents()
    for each in (9.0, 9.0):
        falls.spare(W0, 1.0, each, beside=8)
    for later in (9.0 + WINDOW_S, 9.1 + WINDOW_S):
        assert not falls.spare(W0, 9.5, later, beside=8)
    assert falls.spare(W0, 9.5, 9.2 + WINDOW_S, beside=8)


def test_a_failure_alone_is_no_fall() -> None:
    """Of the two that fall later both were sent after it."""
    falls = WorkerFailureEvents()
    falls.spare(W0, 1.0, 2.0, beside=2)
    assert not falls.spare(W0, 3.0, 5.0, beside=2)
    assert falls.spare(W0, 3.0, 5.0, beside=2)
    assert not falls.spare(W1, 3.0, 5.0, beside=2)
    assert not falls.spare(W1, 3.0, 5.0, beside=2)  # and now they are half


@pytest.mark.parametrize(("beside", "many"), [(1, 1), (2, 1), (3, 1), (8, 4), (24, 12)])
def test_a_fleet_that_is_ill_pays(beside: int, many: int) -> None:
    falls = WorkerFailureEvents()
    workers = [Worker(spec(f"w{number}"), number) for number in range(beside)]
    for worker in workers:
        falls.spare(worker, 1.0, 9.0, beside)
    spared = [falls.spare(worker, 1.0, 9.0, beside) for worker in workers]
    assert spared.count(True) == many
    # Once that is over, another may fall.
    for _ in range(2):
        last = falls.spare(workers[0], 1.0, 9.0 + 2 * WINDOW_S, beside)
    assert last

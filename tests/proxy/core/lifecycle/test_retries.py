"""The retry budget."""

from __future__ import annotations

import pytest

from proxy.core.fleet.worker import Worker
from proxy.core.lifecycle.retries import MIN_RESERVE, WINDOW_S, RetryBudget, WorkerFailureEvents
from tests.proxy.core.making import spec

W0, W1 = Worker(spec("w0"), 0), Worker(spec("w1"), 1)


def spend_all(budget: RetryBudget, now: float) -> int:
    """Spend the whole budget; return how many retries that was."""
    count = 0
    while budget.spend(now):
        count += 1
    return count


def test_requests_earn_retries_by_the_ratio_for_a_window() -> None:
    budget = RetryBudget(0.2)
    spend_all(budget, 0.0)
    for second in range(10):
        for _ in range(100):
            budget.earn(float(second))
    assert spend_all(budget, 9.5) == 200
    for _ in range(100):
        budget.earn(20.0)
    assert spend_all(budget, 20.0) == 20
    for _ in range(1000):
        budget.earn(21.0)
    assert spend_all(budget, 1e6) == MIN_RESERVE, "retries earned before the window expire"


def test_reserve_refills_with_time_up_to_its_minimum() -> None:
    budget = RetryBudget(0.2)
    assert spend_all(budget, 0.0) == MIN_RESERVE
    assert spend_all(budget, 3.0) == 3
    assert spend_all(budget, 1e6) == MIN_RESERVE
    assert spend_all(RetryBudget(0.0), 1e6) == 0, "no reserve without a budget"


# Requests that fail with their worker


def test_all_requests_of_a_failed_worker_are_spared() -> None:
    failures = WorkerFailureEvents()
    # The first failure takes from the budget.
    assert not failures.take_free_retry(W0, 1.0, 9.0, live_workers=8)
    assert all(
        failures.take_free_retry(W0, 1.0 + n / 10, 9.0 + n / 100, live_workers=7) for n in range(60)
    )
    assert failures.take_free_retry(W0, 9.0, 9.0, live_workers=7)
    assert not failures.take_free_retry(W0, 9.5, 9.6, live_workers=7)  # sent after the failure


def test_worker_fails_again_only_after_the_window() -> None:
    failures = WorkerFailureEvents()
    for at in (9.0, 9.0):
        failures.take_free_retry(W0, 1.0, at, live_workers=8)
    for later in (9.0 + WINDOW_S, 9.1 + WINDOW_S):
        assert not failures.take_free_retry(W0, 9.5, later, live_workers=8)
    assert failures.take_free_retry(W0, 9.5, 9.2 + WINDOW_S, live_workers=8)


def test_single_failure_is_no_worker_failure() -> None:
    failures = WorkerFailureEvents()
    failures.take_free_retry(W0, 1.0, 2.0, live_workers=2)
    assert not failures.take_free_retry(W0, 3.0, 5.0, live_workers=2)
    assert failures.take_free_retry(W0, 3.0, 5.0, live_workers=2)
    for _ in range(2):  # two of two workers: more than half of the fleet
        assert not failures.take_free_retry(W1, 3.0, 5.0, live_workers=2)


@pytest.mark.parametrize(
    ("live_workers", "spared_workers"), [(1, 1), (2, 1), (3, 1), (8, 4), (24, 12)]
)
def test_failures_are_spared_for_half_of_the_fleet(live_workers: int, spared_workers: int) -> None:
    failures = WorkerFailureEvents()
    workers = [Worker(spec(f"w{number}"), number) for number in range(live_workers)]
    for worker in workers:
        failures.take_free_retry(worker, 1.0, 9.0, live_workers)
    spared = [failures.take_free_retry(worker, 1.0, 9.0, live_workers) for worker in workers]
    assert spared.count(True) == spared_workers
    # After the window, another failure counts again.
    for _ in range(2):
        last = failures.take_free_retry(workers[0], 1.0, 9.0 + 2 * WINDOW_S, live_workers)
    assert last

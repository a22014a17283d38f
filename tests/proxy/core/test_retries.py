"""The retry budget."""

from __future__ import annotations

from proxy.core.retries import AT_REST, RetryBudget


def spent(budget: RetryBudget, now: float) -> int:
    """Spend all there is."""
    count = 0
    while budget.spend(now):
        count += 1
    return count


def test_a_quiet_fleet_has_some() -> None:
    assert spent(RetryBudget(0.2), 0.0) == AT_REST


def test_requests_earn_their_share() -> None:
    budget = RetryBudget(0.2)
    spent(budget, 0.0)
    for _ in range(26):
        budget.earn()
    assert spent(budget, 0.0) == 5


def test_they_come_back_with_time_but_are_not_hoarded() -> None:
    budget = RetryBudget(0.2)
    spent(budget, 0.0)
    assert spent(budget, 3.0) == 3
    assert spent(budget, 1e6) == AT_REST


def test_none_at_all() -> None:
    assert spent(RetryBudget(0.0), 1e6) == 0

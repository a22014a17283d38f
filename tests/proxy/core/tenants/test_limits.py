"""Limits of a tenant: what passes in any period, and what a refusal states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.tenants.limits import (
    CELLS_PER_TENANT,
    MINUTE,
    Limit,
    Limits,
    TenantUsage,
    TokenBucket,
)
from tests.present import present

STEPS = st.lists(st.tuples(st.floats(0, 40), st.integers(1, 30)), max_size=60)


def try_charge(bucket: TokenBucket, now: float, amount: float) -> float:
    """Charge an amount if the bucket has it; return the wait otherwise."""
    if not (wait := bucket.wait_s(now, amount)):
        bucket.charge(now, amount)
    return wait


@given(STEPS, st.integers(1, 50))
def test_any_period_passes_one_minute_plus_the_refill(
    steps: list[tuple[float, int]], per_minute: int
) -> None:
    bucket, now = TokenBucket(per_minute), 1000.0
    taken: list[tuple[float, int]] = []
    for pause, amount in steps:
        now += pause
        if amount <= per_minute and not try_charge(bucket, now, amount):
            taken.append((now, amount))
    for first, (start, _) in enumerate(taken):
        for last in range(first, len(taken)):
            passed = sum(amount for _, amount in taken[first : last + 1])
            seconds = taken[last][0] - start
            assert passed <= per_minute * (1 + seconds / MINUTE) + 1e-6


@given(STEPS, st.integers(1, 50))
def test_wait_is_sufficient_and_minimal(steps: list[tuple[float, int]], per_minute: int) -> None:
    bucket, now = TokenBucket(per_minute), 5.0
    for pause, amount in steps:
        now += pause
        if wait := try_charge(bucket, now, amount):
            assert bucket.wait_s(now + wait * 0.99 - 1e-6, amount) > 0
            assert bucket.wait_s(now + wait + 1e-6, amount) == 0
            assert wait <= MINUTE * (1 + 30 / per_minute) + 1e-6


def test_amount_above_capacity_passes_a_full_bucket() -> None:
    bucket = TokenBucket(60)
    assert try_charge(bucket, 0.0, 200) == 0
    assert bucket.remaining(0.0) == -140  # a debt
    assert try_charge(bucket, 0.0, 1) == pytest.approx(141)
    assert try_charge(bucket, 150.0, 200) > 0


@pytest.mark.parametrize(
    ("limits", "expected", "entered"),
    [
        (Limits(requests_per_minute=2), Limit.REQUESTS, 2),
        (Limits(tokens_per_minute=25), Limit.TOKENS, 2),
        (Limits(concurrency=3), Limit.CONCURRENCY, 3),
        (Limits(max_prompt_tokens=5), Limit.PROMPT, 0),
    ],
)
def test_breach_names_the_limit(limits: Limits, expected: Limit, entered: int) -> None:
    ledger = TenantUsage(limits)
    breaches = [ledger.enter(0.0, 10, 8) for _ in range(entered + 1)]
    assert breaches[:-1] == [None] * entered
    breach = present(breaches[-1])
    assert breach.limit is expected
    assert (breach.retry_after_s is None) == (expected is Limit.PROMPT)


def test_changed_limits_keep_usage() -> None:
    ledger = TenantUsage(Limits(requests_per_minute=60, concurrency=9))
    for _ in range(9):
        ledger.enter(0.0, 1, 1)
    ledger.set_limits(Limits(requests_per_minute=6))
    assert ledger.running == 9
    breaches = [ledger.enter(0.0, 1, 1) for _ in range(7)]
    assert breaches[0] is None
    assert breaches[-1] is not None
    ledger.set_limits(Limits())
    assert ledger.enter(0.0, 10**9, 10**9) is None


def test_ledgers_in_shared_memory_share_usage() -> None:
    memory = memoryview(bytearray(8 * CELLS_PER_TENANT)).cast("d")
    limits = Limits(requests_per_minute=3, tokens_per_minute=1000)
    one, other = TenantUsage(limits), TenantUsage(limits)
    assert one.enter(0.0, 10, 1) is None  # before the ledgers share memory
    one.use_shared_cells(memory)
    other.use_shared_cells(memory)
    assert other.enter(0.0, 10, 1) is None
    assert one.enter(0.0, 10, 1) is None
    for ledger in (one, other):
        breach = present(ledger.enter(0.0, 10, 1))
        assert breach.requests == (3, 0, 60.0)


def test_spent_names_the_exhausted_limit_and_takes_nothing() -> None:
    ledger = TenantUsage(Limits(requests_per_minute=2, tokens_per_minute=100, concurrency=1))
    assert ledger.spent_limit(0.0) is None
    assert ledger.enter(0.0, 300, 0) is None  # more than the bucket holds: a debt
    assert present(ledger.spent_limit(0.0)).limit is Limit.CONCURRENCY
    ledger.leave(0.0, 300, 300)
    breach = present(ledger.spent_limit(0.0))
    assert (breach.limit, breach.retry_after_s) == (Limit.TOKENS, pytest.approx(120))
    assert ledger.spent_limit(121.0) is None
    ledger.charge_read(121.0)
    assert ledger.spent_limit(121.0) is None
    ledger.charge_read(121.0)
    breach = present(ledger.spent_limit(121.0))
    assert (breach.limit, breach.retry_after_s) == (Limit.REQUESTS, pytest.approx(30))
    assert ledger.spent_limit(152.0) is None
    assert ledger.running == 0


def test_prompt_above_the_limit_takes_one_request() -> None:
    ledger = TenantUsage(Limits(requests_per_minute=1, tokens_per_minute=100, max_prompt_tokens=10))
    assert present(ledger.enter(0.0, 11, 11)).limit is Limit.PROMPT
    assert ledger.running == 0
    assert ledger.remaining(0.0)[1] == (100, 100, 0.0)
    assert present(ledger.enter(0.0, 5, 5)).limit is Limit.REQUESTS


@pytest.mark.parametrize("tokens", [1, 60, 600])
def test_refund_leaves_a_tenant_as_if_the_request_had_not_come(tokens: int) -> None:
    ledger = TenantUsage(Limits(requests_per_minute=3, tokens_per_minute=1000))
    assert ledger.enter(0.0, 50, 1) is None
    before = ledger.remaining(0.0)
    assert ledger.decide(0.0, tokens) is None
    assert ledger.remaining(0.0) != before
    ledger.refund(0.0, tokens)
    assert ledger.remaining(0.0) == before

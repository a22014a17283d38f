"""Requests that would be answered too late are refused at once; no others are."""

from __future__ import annotations

import pytest

from proxy.core.fleet.leases import Attempts
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import Outcome, Reason
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.router import Router
from proxy.core.tenants.tenants import Rank
from tests.proxy.core.making import (
    make_info,
    placed,
    pop_one,
    refused,
    router_of,
    spec,
    waits,
    worker_of,
)

TARGET_S = 2.0


def make_router(*, most: int | None = None, paced: bool = True, **targets: float) -> Router:
    """Return a router whose one worker prefills a thousand tokens a second."""
    ttft = {Rank[name.upper()]: seconds for name, seconds in targets.items()}
    router = router_of(
        spec("w", most=most), admission=AdmissionSettings(ttft or {Rank.STANDARD: TARGET_S})
    )
    if paced:
        pace = worker_of(router, "w").pace
        pace.prefills, pace.token_s, pace.fixed_s = 100, 0.001, 0.0
    return router


def test_too_long_wait_is_429_with_retry_after() -> None:
    router = make_router()
    placed(router.submit(make_info(5000), 0.0))
    refusal = refused(router.submit(make_info(100), 0.0))
    assert (refusal.status, refusal.reason, refusal.code) == (429, Reason.TOO_SLOW, "too_slow")
    assert refusal.retry_after_s is not None
    assert 2.5 < refusal.retry_after_s < 3.5
    retry = refusal.retry_after_s
    placed(router.submit(make_info(100), retry + 0.2))


def test_no_refusal_before_the_pace_is_learnt() -> None:
    router = make_router(paced=False)
    for _ in range(5):
        placed(router.submit(make_info(50_000), 0.0))


@pytest.mark.parametrize("paced", [True, False])
def test_slow_queue_is_429_with_retry_after(paced: bool) -> None:
    router = make_router(most=1, paced=paced, standard=1.9)
    now = 0.0
    lease = placed(router.submit(make_info(10), now))
    waits(router.submit(make_info(10), now))
    for _ in range(20):  # a slot is free each second, and a request waits
        now += 1.0
        router.leases.finish(lease, now, Outcome.DONE)
        lease = placed(pop_one(router, now)[1])
        waits(router.submit(make_info(10), now))
        queue_moves = router.queue.wait_s(now, 1)
    assert queue_moves == pytest.approx(2.0)
    refusal = refused(router.submit(make_info(10), now))
    assert refusal.reason is Reason.TOO_SLOW
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s >= 1.0


def test_requests_may_wait_before_the_queue_rate_is_known() -> None:
    router = make_router(most=1)
    placed(router.submit(make_info(10), 0.0))
    for _ in range(10):
        waits(router.submit(make_info(10), 0.0))


def test_retry_is_admitted() -> None:
    router = make_router()
    placed(router.submit(make_info(50_000), 0.0))
    placed(router.submit_again(make_info(10), 0.0, Attempts(frozenset({Worker(spec("gone"), 9)}))))

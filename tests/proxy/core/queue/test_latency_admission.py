"""Requests that would be answered too late are told so at once; nobody else is."""

from __future__ import annotations

import pytest

from proxy.core.fleet.leases import Attempts, Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.types import Outcome, Reason
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router
from proxy.core.tenants.tenants import Rank
from tests.proxy.core.making import ask, placed, refused, router_of, spec, waits, worker_of

TARGET_S = 2.0


def router(*, most: int | None = None, paced: bool = True, **targets: float) -> Router:
    """Make a router whose one worker prefills a thousand tokens a second."""
    ttft = {Rank[name.upper()]: seconds for name, seconds in targets.items()}
    made = router_of(
        spec("w", most=most), admission=AdmissionSettings(ttft or {Rank.STANDARD: TARGET_S})
    )
    if paced:
        pace = worker_of(made, "w").pace
        pace.prefills, pace.token_s, pace.fixed_s = 100, 0.001, 0.0
    return made


def test_who_would_wait_too_long_is_told_when_to_come_back() -> None:
    site = router()
    placed(site.submit(ask(5000), 0.0))
    refusal = refused(site.submit(ask(100), 0.0))
    assert (refusal.status, refusal.reason, refusal.code) == (429, Reason.TOO_SLOW, "too_slow")
    assert refusal.retry_after_s is not None
    assert 2.5 < refusal.retry_after_s < 3.5
    retry = refusal.retry_after_s
    placed(site.submit(ask(100), retry + 0.2))


def test_until_its_pace_is_learnt_nobody_is_turned_away() -> None:
    site = router(paced=False)
    for _ in range(5):
        placed(site.submit(ask(50_000), 0.0))


def test_a_queue_that_moves_too_slowly() -> None:
    site = router(most=1)
    now = 0.0
    lease = placed(site.submit(ask(10), now))
    waits(site.submit(ask(10), now))
    for _ in range(20):  # a place comes free each second, and somebody wants it
        now += 1.0
        site.leases.finish(lease, now, Outcome.DONE)
        ((_, answer),) = site.due(now)
        assert isinstance(answer, Lease)
        lease = answer
        waits(site.submit(ask(10), now))
        queue_moves = site.queue.wait_s(now, 1)
    assert queue_moves == pytest.approx(2.0)
    refusal = refused(site.submit(ask(10), now))
    assert refusal.reason is Reason.TOO_SLOW
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s >= 1.0


@pytest.mark.parametrize("idle_s", [0.0, 3600.0])
def test_times_when_nobody_waited_say_nothing_of_a_queue(idle_s: float) -> None:
    """Sixteen places, one free each few milliseconds; before that there was next to nothing."""
    site, now = router(most=16), 1e6
    if idle_s:
        for _ in range(100):
            lease = placed(site.submit(ask(10), now))
            now += 0.1
            site.leases.finish(lease, now, Outcome.DONE)
        now += idle_s
    running = [placed(site.submit(ask(10), now)) for _ in range(16)]
    for _ in range(8):
        waits(site.submit(ask(10), now))
        now += 0.006
        site.leases.finish(running.pop(0), now, Outcome.DONE)
        ((_, answer),) = site.due(now)
        assert isinstance(answer, Lease)
        running.append(answer)
    for _ in range(8):
        waits(site.submit(ask(10), now))
    assert site.queue.retry_after_s(now) == 1


def test_where_nothing_tells_how_fast_it_moves_one_may_wait() -> None:
    site = router(most=1)
    placed(site.submit(ask(10), 0.0))
    for _ in range(10):
        assert isinstance(site.submit(ask(10), 0.0), Ticket)


def test_a_retry_is_let_in() -> None:
    site = router()
    placed(site.submit(ask(50_000), 0.0))
    assert isinstance(
        site.submit(ask(10), 0.0, Attempts(frozenset({Worker(spec("gone"), 9)}))), Lease
    )

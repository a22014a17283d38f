"""The `adaptive` rule: the least cost."""

from __future__ import annotations

import pytest

from proxy.core.fleet.leases import Decision, Lease, LegFailure
from proxy.core.fleet.worker import MAX_UNRANKED
from proxy.core.model.specs import Gauges
from proxy.core.model.types import Outcome, Reason
from proxy.core.router import Router
from tests.proxy.core.making import (
    LONG,
    SHORT,
    chat,
    make_info,
    placed,
    pop_one,
    router_of,
    serve,
    sized,
    spec,
    waits,
    worker_of,
)


def placement(lease: Lease) -> tuple[str, Reason]:
    return lease.worker.name, lease.decision.reason


def test_long_goes_to_an_idle_short_worker_only() -> None:
    def second_long(shorts: int) -> str:
        router = router_of(spec("s", SHORT, 65_536), spec("l", LONG, 65_536))
        for i in range(shorts):
            now = i / 5
            lease = placed(router.submit(make_info(200, 10), now))
            router.leases.record_first_token(lease, now + 0.03)
            router.leases.finish(lease, now + 0.1, Outcome.DONE)
        now = 1 + shorts / 5
        placed(router.submit(make_info(40_000, long=True), now))
        lease = placed(router.submit(make_info(40_000, long=True), now))
        if lease.worker.name == "s":
            assert lease.decision.reason is Reason.SPILL_TO_SHORT
        return lease.worker.name

    assert second_long(shorts=0) == "s"
    assert second_long(shorts=300) == "l"


def test_reserve_is_kept_only_after_recent_longs() -> None:
    router = router_of(spec("l", LONG, 65_536, most=4), spec("s", SHORT, 8192, most=1))
    placed(router.submit(make_info(10, 1), 0.0))
    leases = [placed(router.submit(make_info(10, 1), 0.0)) for _ in range(4)]
    for lease in leases:
        router.leases.finish(lease, 1.0, Outcome.DONE)
    serve(router, make_info(20_000, long=True), 2.0)
    for _ in range(3):
        placed(router.submit(make_info(10, 1), 2.0))
    waits(router.submit(make_info(10, 1), 2.0))
    assert len(router.pop_due(29.0)) == 0
    placed(router.submit(make_info(20_000, long=True), 29.5))


def router_with_reserve(most: int | None, kv_usage: float) -> Router:
    """Return a pair of workers; the long one has only its reserve for longs left."""
    router = router_of(spec("s", SHORT, 8192, most), spec("l", LONG, 65_536, most))
    serve(router, make_info(20_000, long=True), 1.0)
    router.fleet.health.set_gauges("l", Gauges(at=1.0, kv_usage=kv_usage))
    for _ in range((most or 1) - 1):
        assert placed(router.submit(make_info(20_000, long=True), 1.0)).worker.name == "l"
    return router


with_reserves = pytest.mark.parametrize(
    ("most", "kv_usage"), [(None, 0.8), (4, 0.0)], ids=["kv", "most"]
)


@with_reserves
def test_reserve_is_open_to_shorts_whose_worker_fails(most: int | None, kv_usage: float) -> None:
    router = router_with_reserve(most, kv_usage)
    lease = placed(router.submit(make_info(10, 1), 1.5))
    assert lease.worker.name == "s"
    again = router.retry(lease, 1.6, LegFailure(Outcome.FAILED, lease.worker))
    assert placement(placed(again)) == ("l", Reason.RETRY)
    router.leases.finish(placed(again), 1.6, Outcome.DONE)
    router.fleet.health.record_failure(worker_of(router, "s"), 1.6, 60.0)
    assert placement(placed(router.submit(make_info(10, 1), 1.7))) == ("l", Reason.ONLY_CHOICE)


@with_reserves
def test_reserve_is_closed_to_shorts_while_their_worker_is_busy(
    most: int | None, kv_usage: float
) -> None:
    router = router_with_reserve(most, kv_usage)
    router.fleet.health.record_failure(worker_of(router, "s"), 1.5, 1.0, busy=True)
    waits(router.submit(make_info(10, 1), 1.6))
    router.fleet.health.record_success(worker_of(router, "s"))
    assert placed(pop_one(router, 2.6)[1]).worker.name == "s"


def test_foreign_requests_count_as_load() -> None:
    router = router_of(spec("a"), spec("b"))
    for second in (1.0, 2.0):
        router.fleet.health.set_gauges("a", Gauges(at=second, running=20))
        router.fleet.health.set_gauges("b", Gauges(at=second))
    names = [placed(router.submit(make_info(), 2.0)).worker.name for _ in range(5)]
    assert names == ["b"] * 5


def test_total_of_a_score_is_the_sum_of_its_parts() -> None:
    router = router_of(spec("s", SHORT, 8192), spec("l", LONG, 65_536))
    info = sized(router, chat("x" * 9000, max_tokens=100))
    placed(router.submit(info, 0.0))
    for _ in range(3):
        router.leases.record_first_token(placed(router.submit(make_info(900), 0.0)), 0.1)
    info.explain = True
    for score in placed(router.submit(info, 0.2)).decision.scores:
        fixed = worker_of(router, score.worker).pace.fixed_s
        parts = fixed + score.wait_s + score.prefill_s + score.harm_s
        assert score.total == pytest.approx(parts)
        assert score.harm_s >= -1e-12


def test_large_fleet_is_loaded_evenly() -> None:
    count = MAX_UNRANKED * 3
    router = router_of(*(spec(f"w{i}") for i in range(count)))
    for i in range(count * 4):
        placed(router.submit(make_info(500), i / 1000))
    loads = [worker.requests for worker in router.fleet.roster]
    assert max(loads) - min(loads) <= 1


def test_prefix_holder_is_found_in_a_large_fleet() -> None:
    router = router_of(*(spec(f"w{i}") for i in range(MAX_UNRANKED * 3)))
    info = sized(router, chat("x" * 40_000, max_tokens=10))
    holder = worker_of(router, f"w{MAX_UNRANKED * 3 - 1}")
    router.fleet.roster.prefixes.record(info.prefix, holder.index)
    router.fleet.charge(make_info(10), Decision(holder, Reason.PREFIX), 0.0)
    assert placement(placed(router.submit(info, 0.0))) == (holder.name, Reason.PREFIX)

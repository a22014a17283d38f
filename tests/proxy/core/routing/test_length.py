"""The `length` rule: pools by size, regardless of load."""

from __future__ import annotations

from proxy.core.model.types import Outcome, Reason
from tests.proxy.core.making import LONG, SHORT, make_info, placed, router_of, spec, waits


def test_general_workers_belong_to_both_pools() -> None:
    router = router_of(spec("s", SHORT), spec("g"), policy="length")
    assert {placed(router.submit(make_info(), 0.0)).worker.name for _ in range(2)} == {"s", "g"}
    lease = placed(router.submit(make_info(long=True), 0.0))
    assert (lease.worker.name, lease.decision.reason) == ("g", Reason.GENERAL_POOL)


def test_requests_wait_for_a_full_pool() -> None:
    router = router_of(spec("s", SHORT, most=1), spec("l", LONG), policy="length")
    lease = placed(router.submit(make_info(), 0.0))
    ticket = waits(router.submit(make_info(), 0.0))
    assert router.pop_due(0.5) == []
    router.leases.finish(lease, 1.0, Outcome.DONE)
    assert [gone for gone, _ in router.pop_due(1.0)] == [ticket]


def test_long_above_its_pools_limit_goes_to_another_pool() -> None:
    router = router_of(spec("s", SHORT, 65_536), spec("l", LONG, 8192), policy="length")
    assert placed(router.submit(make_info(20_000, long=True), 0.0)).worker.name == "s"

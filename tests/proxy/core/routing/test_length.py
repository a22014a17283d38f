"""The `length` rule: pools by size, regardless of load."""

from __future__ import annotations

from proxy.core.model.types import Reason
from tests.proxy.core.making import LONG, SHORT, ask, placed, router_of, spec


def test_general_workers_belong_to_both_pools() -> None:
    router = router_of(spec("s", SHORT), spec("g"), policy="length")
    assert {placed(router.submit(ask(), 0.0)).worker.name for _ in range(2)} == {"s", "g"}
    lease = placed(router.submit(ask(long=True), 0.0))
    assert (lease.worker.name, lease.decision.reason) == ("g", Reason.GENERAL_POOL)


def test_long_above_its_pools_limit_goes_to_another_pool() -> None:
    router = router_of(spec("s", SHORT, 65_536), spec("l", LONG, 8192), policy="length")
    assert placed(router.submit(ask(20_000, long=True), 0.0)).worker.name == "s"

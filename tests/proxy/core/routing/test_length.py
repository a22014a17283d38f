"""The `length` rule: pools by size, regardless of load."""

from __future__ import annotations

from tests.proxy.core.making import LONG, SHORT, ask, placed, router_of, spec


def test_long_above_its_pools_limit_goes_to_another_pool() -> None:
    router = router_of(spec("s", SHORT, 65_536), spec("l", LONG, 8192), policy="length")
    assert placed(router.submit(ask(20_000, long=True), 0.0)).worker.name == "s"

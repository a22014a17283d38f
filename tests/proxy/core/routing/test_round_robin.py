"""The `round_robin` rule: each worker in turn."""

from __future__ import annotations

from proxy.core.model.types import Outcome, Reason
from tests.proxy.core.making import make_info, placed, router_of, spec


def test_workers_are_chosen_in_turn_regardless_of_load() -> None:
    router = router_of(*(spec(name) for name in "abc"), policy="round_robin")
    leases = [placed(router.submit(make_info(30_000 * (i % 2)), 0.0)) for i in range(6)]
    assert [lease.worker.name for lease in leases] == ["a", "b", "c", "a", "b", "c"]
    assert {lease.decision.reason for lease in leases} == {Reason.ROUND_ROBIN}
    for lease in leases[:3]:
        router.leases.finish(lease, 1.0, Outcome.DONE)
    assert placed(router.submit(make_info(), 1.0)).worker.name == "a"

"""The `least_loaded` rule: the fewest requests."""

from __future__ import annotations

from proxy.core.model.types import Outcome, Reason
from tests.proxy.core.making import make_info, placed, router_of, spec


def test_worker_with_the_fewest_requests_is_chosen() -> None:
    router = router_of(*(spec(name) for name in "abc"), policy="least_loaded")
    leases = [placed(router.submit(make_info(), 0.0)) for _ in range(9)]
    names = [lease.worker.name for lease in leases]
    assert [names.count(name) for name in "abc"] == [3, 3, 3]
    for lease in leases:
        if lease.worker.name == "b":
            router.leases.finish(lease, 1.0, Outcome.DONE)
    again = placed(router.submit(make_info(), 1.0))
    assert (again.worker.name, again.decision.reason) == ("b", Reason.LEAST_LOADED)

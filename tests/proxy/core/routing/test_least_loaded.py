"""The fewest requests."""

from __future__ import annotations

from proxy.core.types import Outcome, Reason
from tests.proxy.core.making import ask, placed, router_of, spec


def test_the_fewest_requests_win() -> None:
    router = router_of(*(spec(name) for name in "abc"), policy="least_loaded")
    leases = [placed(router.submit(ask(), 0.0)) for _ in range(9)]
    names = [lease.worker.name for lease in leases]
    assert [names.count(name) for name in "abc"] == [3, 3, 3]
    for lease in leases:
        if lease.worker.name == "b":
            router.finish(lease, 1.0, Outcome.DONE)
    again = placed(router.submit(ask(), 1.0))
    assert (again.worker.name, again.decision.reason) == ("b", Reason.LEAST_LOADED)


def test_of_equals_the_fewer_tokens_to_prefill() -> None:
    router = router_of(spec("a"), spec("b"), policy="least_loaded")
    assert placed(router.submit(ask(5000), 0.0)).worker.name == "a"
    assert placed(router.submit(ask(10), 0.0)).worker.name == "b"
    assert placed(router.submit(ask(10), 0.0)).worker.name == "b"

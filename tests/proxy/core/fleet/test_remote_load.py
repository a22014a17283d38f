"""What other processes charge to a worker, in the charges that everybody goes by."""

from __future__ import annotations

import pytest

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.remote_load import own
from proxy.core.fleet.worker import Worker
from proxy.core.fleet.worker_load import NO_LOAD, WorkerLoad
from proxy.core.model.types import Outcome
from tests.proxy.core.making import ask, idle, members, placed, router_of, spec, worker_of


class Noted:
    """Other processes that only listen."""

    def __init__(self, fleet: Fleet | None = None) -> None:
        self.fleet = fleet
        self.looks: list[float] = []
        self.told: list[Worker] = []
        self.fills: list[Worker] = []  # who has no room once he is chosen
        self.chosen: list[Worker] = []

    def look(self, now: float) -> None:
        self.looks.append(now)

    def changed(self, worker: Worker) -> None:
        self.told.append(worker)

    def have_filled(self, worker: Worker, now: float) -> bool:
        self.chosen.append(worker)
        if self.fleet is None or worker not in self.fills:
            return False
        self.fills.remove(worker)
        self.fleet.health.charged_elsewhere(worker, WorkerLoad(requests=worker.most), 0.0, now)
        return True


def test_who_was_taken_out_is_told_no_more_of_others() -> None:
    """They would give it back to nobody: whoever comes to its address would have it for good."""
    router = router_of(spec("a", most=2))
    worker = worker_of(router, "a")
    lease = placed(router.submit(ask(), 1.0))
    router.fleet.health.charged_elsewhere(worker, WorkerLoad(requests=1), 0.0, 1.0)
    router.fleet.roster.remove("a")
    router.fleet.health.charged_elsewhere(worker, WorkerLoad(requests=1), 0.0, 1.1)
    router.fleet.release(lease)
    assert worker.requests == 0
    assert router.fleet.roster.add(spec("a")).requests == 0


@pytest.mark.parametrize("times", [1, 3])
def test_what_is_our_own_stays_so(times: int) -> None:
    router = router_of(spec("a"))
    worker = worker_of(router, "a")
    lease = placed(router.submit(ask(700, 30), 1.0))
    mine = own(worker)
    theirs = WorkerLoad(4, 5, 600, 500, 400, 1000, 2, 1, 900, 77)
    for _ in range(times):
        router.fleet.health.charged_elsewhere(worker, theirs, 0.0, 1.0)
    assert own(worker) == mine
    assert worker.requests == mine.requests + 4
    assert worker.decoding == 2
    router.leases.finish(lease, 2.0, Outcome.DONE)
    assert own(worker) == NO_LOAD
    router.fleet.health.charged_elsewhere(worker, NO_LOAD, 0.0, 2.0)
    assert idle([worker])


def test_others_prefills_keep_one_waiting_until_they_are_seen_to_be_done() -> None:
    router = router_of(spec("a"))
    worker = worker_of(router, "a")
    token_s = worker.pace.token_s
    due = 10.0 + token_s * 1000
    router.fleet.health.charged_elsewhere(worker, WorkerLoad(1, 1, 1000), due, 10.0)
    assert worker.wait_s(10.0, for_long=True) == pytest.approx(token_s * 1000)
    half = 10.0 + token_s * 500
    assert worker.wait_s(half, for_long=True) == pytest.approx(token_s * 500)
    router.fleet.health.charged_elsewhere(worker, NO_LOAD, due, half)
    assert worker.wait_s(half, for_long=True) == 0.0


def test_breakers_are_as_whoever_judged_last_says() -> None:
    ours, theirs = (router_of(spec("a"), panic_threshold=0.0) for _ in range(2))
    here, there = worker_of(ours, "a"), worker_of(theirs, "a")
    for _ in range(3):
        theirs.fleet.health.failed(there, 5.0)
    ours.fleet.health.take_breaker(here, there.breaker.snapshot())
    assert not here.breaker.closed
    assert here in ours.fleet.roster.ejections.resting
    assert not here.takes(5.1)
    lease = placed(ours.submit(ask(), 6.0))  # the one on trial
    assert lease.trial
    theirs.fleet.health.take_breaker(there, here.breaker.snapshot())
    assert not there.takes(6.0)  # nor is another sent from there
    ours.leases.first_token(lease, 6.1)
    theirs.fleet.health.take_breaker(there, here.breaker.snapshot())
    assert there.breaker.has_no_failures
    assert there not in theirs.fleet.roster.ejections.resting
    assert there.takes(6.1)


def test_others_are_told_of_every_change_and_asked_before_every_decision() -> None:
    router = router_of(spec("a"))
    [worker] = members(router.fleet)
    others = router.fleet.roster.others = Noted()
    lease = placed(router.submit(ask(), 1.0))
    assert others.looks == [1.0]
    for event in (
        lambda: router.leases.first_token(lease, 2.0),
        lambda: router.leases.finish(lease, 3.0, Outcome.FAILED),
    ):
        others.told.clear()
        event()
        assert worker in others.told


def test_a_worker_that_others_have_filled_by_now_is_not_the_one() -> None:
    router = router_of(spec("a", most=2), spec("b", most=2))
    others = router.fleet.roster.others = Noted(router.fleet)
    others.fills = [*members(router.fleet)][:1]
    filled = others.fills[0]
    got = [placed(router.submit(ask(), 1.0)).worker for _ in range(2)]
    assert filled in others.chosen
    assert filled not in got

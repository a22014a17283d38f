"""What other processes charge to a worker, in the charges that everybody goes by."""

from __future__ import annotations

import pytest

from proxy.core.breaker import LONG_AGO
from proxy.core.elsewhere import NO_LOAD, Load, own
from proxy.core.fleet import Fleet
from proxy.core.records import Gauges
from proxy.core.types import Outcome, Role
from proxy.core.worker import Worker
from tests.proxy.core.making import ask, idle, members, placed, router_of, spec, waits, worker_of


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
        self.fleet.charged_elsewhere(worker, Load(requests=worker.most), 0.0, now)
        return True


def test_a_request_goes_where_others_have_charged_least() -> None:
    router = router_of(spec("a"), spec("b"))
    busy = worker_of(router, "a")
    router.fleet.charged_elsewhere(busy, Load(1, 1, 5000), 0.0, 1.0)
    assert [placed(router.submit(ask(), 1.0)).worker.name for _ in range(3)] == ["b"] * 3
    router.fleet.charged_elsewhere(busy, NO_LOAD, 0.0, 1.0)
    assert placed(router.submit(ask(), 1.0)).worker.name == "a"


def test_who_was_taken_out_is_told_no_more_of_others() -> None:
    """They would give it back to nobody: whoever comes to its address would have it for good."""
    router = router_of(spec("a", most=2))
    worker = worker_of(router, "a")
    lease = placed(router.submit(ask(), 1.0))
    router.fleet.charged_elsewhere(worker, Load(requests=1), 0.0, 1.0)
    router.fleet.remove("a")
    router.fleet.charged_elsewhere(worker, Load(requests=1), 0.0, 1.1)
    router.fleet.release(lease)
    assert worker.requests == 0
    assert router.fleet.add(spec("a")).requests == 0


def test_a_limit_counts_what_others_have_in_flight() -> None:
    router = router_of(spec("a", most=3))
    worker = worker_of(router, "a")
    router.fleet.charged_elsewhere(worker, Load(requests=2), 0.0, 1.0)
    placed(router.submit(ask(), 1.0))
    ticket = waits(router.submit(ask(), 1.0))
    router.fleet.charged_elsewhere(worker, Load(requests=1), 0.0, 2.0)
    assert [found for found, _ in router.due(2.0)] == [ticket]


@pytest.mark.parametrize("times", [1, 3])
def test_what_is_our_own_stays_so(times: int) -> None:
    router = router_of(spec("a"))
    worker = worker_of(router, "a")
    lease = placed(router.submit(ask(700, 30), 1.0))
    mine = own(worker)
    theirs = Load(4, 5, 600, 500, 400, 1000, 2, 1, 900, 77)
    for _ in range(times):
        router.fleet.charged_elsewhere(worker, theirs, 0.0, 1.0)
    assert own(worker) == mine
    assert worker.requests == mine.requests + 4
    assert worker.decoding == 2
    router.finish(lease, 2.0, Outcome.DONE)
    assert own(worker) == NO_LOAD
    router.fleet.charged_elsewhere(worker, NO_LOAD, 0.0, 2.0)
    assert idle([worker])


def test_others_prefills_keep_one_waiting_until_they_are_seen_to_be_done() -> None:
    router = router_of(spec("a"))
    worker = worker_of(router, "a")
    token_s = worker.pace.token_s
    due = 10.0 + token_s * 1000
    router.fleet.charged_elsewhere(worker, Load(1, 1, 1000), due, 10.0)
    assert worker.wait_s(10.0, for_long=True) == pytest.approx(token_s * 1000)
    half = 10.0 + token_s * 500
    assert worker.wait_s(half, for_long=True) == pytest.approx(token_s * 500)
    router.fleet.charged_elsewhere(worker, NO_LOAD, due, half)
    assert worker.wait_s(half, for_long=True) == 0.0


def test_a_worker_is_overdue_only_where_nobody_hears_of_it() -> None:
    router = router_of(spec("a"))
    worker = worker_of(router, "a")
    fleet = router.fleet
    fleet.charged_elsewhere(worker, Load(1, 1, 1000), 1.0, 0.0)
    assert worker.wait_s(50.0, for_long=True) > 40.0  # it hangs
    fleet.charged_elsewhere(worker, Load(1, 1, 1000), 51.0, 50.0)
    assert worker.wait_s(50.0, for_long=True) < 1.0
    # Our own first prefill there has its own time to show, whatever others wait for.
    placed(router.submit(ask(100), 60.0))
    assert worker.due_at > 60.0


def test_what_others_asked_is_not_taken_for_strangers() -> None:
    router = router_of(spec("a"))
    worker = worker_of(router, "a")
    router.fleet.charged_elsewhere(worker, Load(3, 3, 900), 0.0, 1.0)
    for at in (1.0, 2.0):
        page = Gauges(at=at, running=2, waiting=1, extra={"backlog": 900.0})
        router.fleet.set_gauges("a", page)
    assert (worker.strangers, worker.strange_tokens) == (0, 0.0)


def test_a_worker_that_leaves_keeps_what_is_ours_alone() -> None:
    router = router_of(spec("a"), spec("b"))
    worker = worker_of(router, "a")
    fleet = router.fleet
    fleet.drain("b")
    lease = placed(router.submit(ask(), 1.0))
    fleet.charged_elsewhere(worker, Load(2, 2, 200), 0.0, 1.0)
    fleet.remove("a")
    assert own(worker).requests == worker.requests == 1
    router.finish(lease, 2.0, Outcome.DONE)
    assert idle([worker])


def test_breakers_are_as_whoever_judged_last_says() -> None:
    ours, theirs = (router_of(spec("a"), panic_threshold=0.0) for _ in range(2))
    here, there = worker_of(ours, "a"), worker_of(theirs, "a")
    for _ in range(3):
        theirs.fleet.failed(there, 5.0)
    ours.fleet.judged_elsewhere(here, there.breaker.told())
    assert not here.breaker.closed
    assert here in ours.fleet.resting
    assert not here.takes(5.1)
    lease = placed(ours.submit(ask(), 6.0))  # the one on trial
    assert lease.trial
    theirs.fleet.judged_elsewhere(there, here.breaker.told())
    assert not there.takes(6.0)  # nor is another sent from there
    ours.first_token(lease, 6.1)
    theirs.fleet.judged_elsewhere(there, here.breaker.told())
    assert there.breaker.spotless
    assert there not in theirs.fleet.resting
    assert there.takes(6.1)


def test_failures_in_a_row_count_wherever_they_are_seen() -> None:
    routers = [router_of(spec("a")) for _ in range(3)]
    workers = [worker_of(router, "a") for router in routers]
    for router, worker in zip(routers, workers, strict=True):
        router.fleet.failed(worker, 5.0)
        for other, same in zip(routers, workers, strict=True):
            if other is not router:
                other.fleet.judged_elsewhere(same, worker.breaker.told())
    assert not any(worker.breaker.closed for worker in workers)


def test_others_are_told_of_every_change_and_asked_before_every_decision() -> None:
    router = router_of(spec("a"))
    [worker] = members(router.fleet)
    others = router.fleet.others = Noted()
    lease = placed(router.submit(ask(), 1.0))
    assert others.looks == [1.0]
    for event in (
        lambda: router.first_token(lease, 2.0),
        lambda: router.finish(lease, 3.0, Outcome.FAILED),
    ):
        others.told.clear()
        event()
        assert worker in others.told


def test_a_worker_that_others_have_filled_by_now_is_not_the_one() -> None:
    router = router_of(spec("a", most=2), spec("b", most=2))
    others = router.fleet.others = Noted(router.fleet)
    others.fills = [*members(router.fleet)][:1]
    filled = others.fills[0]
    got = [placed(router.submit(ask(), 1.0)).worker for _ in range(2)]
    assert filled in others.chosen
    assert filled not in got


def test_blocks_that_a_prefill_worker_keeps_are_told_and_that_it_does_no_more() -> None:
    router = router_of(
        spec("p", Role.PREFILL), spec("d", Role.DECODE), transfer=True, disaggregate_above=1
    )
    prefill = worker_of(router, "p")
    lease = placed(router.submit(ask(), 1.0))
    others = router.fleet.others = Pins()
    router.prefilled(lease, 2.0, None)
    assert others.pinned[prefill] == prefill.pinned == 1
    router.first_token(lease, 3.0)
    assert others.pinned[prefill] == prefill.pinned == 0


class Pins:
    """Keeps what was told last of the blocks that workers hold."""

    def __init__(self) -> None:
        self.pinned: dict[Worker, int] = {}

    def look(self, now: float) -> None:
        """Take in nothing."""

    def changed(self, worker: Worker) -> None:
        self.pinned[worker] = worker.pinned


def test_a_trial_given_up_is_told() -> None:
    router = router_of(spec("a"))
    [worker] = members(router.fleet)
    for _ in range(3):
        router.fleet.failed(worker, 0.0)
    lease = placed(router.submit(ask(), 5.0))
    others = router.fleet.others = Noted()
    router.finish(lease, 5.1, Outcome.CLIENT_GONE)
    assert worker in others.told
    assert LONG_AGO in worker.breaker.told()


def test_a_fleet_without_others_is_alone() -> None:
    assert Fleet().others is None

"""Charges of other processes to a worker."""

from __future__ import annotations

import pytest

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.remote_load import own_load
from proxy.core.fleet.worker import Worker
from proxy.core.fleet.worker_load import NO_LOAD, WorkerLoad
from proxy.core.model.types import Outcome
from tests.proxy.core.making import idle, make_info, members, placed, router_of, spec, worker_of


class Peers:
    """Other processes, which fill a worker when it is first chosen."""

    def __init__(self, fleet: Fleet, fills: Worker) -> None:
        self.fleet = fleet
        self.fills: Worker | None = fills
        self.look_times: list[float] = []
        self.changes: list[Worker] = []

    def read_remote_charges(self, now: float) -> None:
        self.look_times.append(now)

    def publish_soon(self, worker: Worker) -> None:
        self.changes.append(worker)

    def is_filled_by_others(self, worker: Worker, now: float) -> bool:
        if worker is not self.fills:
            return False
        self.fills = None
        self.fleet.health.apply_remote_load(
            worker, WorkerLoad(requests=worker.request_limit), 0.0, now
        )
        return True


def test_removed_worker_takes_no_remote_charges() -> None:
    """Otherwise the next worker at that address would keep the charge forever."""
    router = router_of(spec("a", most=2))
    worker = worker_of(router, "a")
    lease = placed(router.submit(make_info(), 1.0))
    router.fleet.health.apply_remote_load(worker, WorkerLoad(requests=1), 0.0, 1.0)
    router.fleet.roster.remove("a")
    router.fleet.health.apply_remote_load(worker, WorkerLoad(requests=1), 0.0, 1.1)
    router.fleet.release(lease)
    assert worker.requests == 0
    assert router.fleet.roster.add(spec("a")).requests == 0


def test_remote_charges_do_not_change_own_charges() -> None:
    router = router_of(spec("a"))
    worker = worker_of(router, "a")
    lease = placed(router.submit(make_info(700, 30), 1.0))
    before = own_load(worker)
    remote = WorkerLoad(4, 5, 600, 500, 400, 1000, 2, 1, 900, 77, 8)
    for _ in range(3):
        router.fleet.health.apply_remote_load(worker, remote, 0.0, 1.0)
    assert own_load(worker) == before
    assert worker.requests == before.requests + 4
    assert worker.num_decoding == 2
    router.leases.finish(lease, 2.0, Outcome.DONE)
    assert own_load(worker) == WorkerLoad(total_placed=1), "only the total stays"
    router.fleet.health.apply_remote_load(worker, NO_LOAD, 0.0, 2.0)
    assert idle([worker])


def test_remote_prefills_add_to_the_wait_until_done() -> None:
    router = router_of(spec("a"))
    worker = worker_of(router, "a")
    token_s = worker.pace.token_s
    due = 10.0 + token_s * 1000
    router.fleet.health.apply_remote_load(worker, WorkerLoad(1, 1, 1000), due, 10.0)
    assert worker.wait_s(10.0, for_long=True) == pytest.approx(token_s * 1000)
    half = 10.0 + token_s * 500
    assert worker.wait_s(half, for_long=True) == pytest.approx(token_s * 500)
    router.fleet.health.apply_remote_load(worker, NO_LOAD, due, half)
    assert worker.wait_s(half, for_long=True) == 0.0


def test_latest_breaker_state_of_any_process_applies() -> None:
    local, remote = (router_of(spec("a"), panic_threshold=0.0) for _ in range(2))
    local_worker, remote_worker = worker_of(local, "a"), worker_of(remote, "a")
    for _ in range(3):
        remote.fleet.health.record_failure(remote_worker, 5.0)
    local.fleet.health.take_breaker(local_worker, remote_worker.breaker.snapshot())
    assert not local_worker.breaker.closed
    assert local_worker in local.fleet.roster.ejections.ejected
    assert not local_worker.accepts(5.1)
    lease = placed(local.submit(make_info(), 6.0))  # the trial
    assert lease.trial
    remote.fleet.health.take_breaker(remote_worker, local_worker.breaker.snapshot())
    assert not remote_worker.accepts(6.0)  # no second trial from the other process
    local.leases.record_first_token(lease, 6.1)
    remote.fleet.health.take_breaker(remote_worker, local_worker.breaker.snapshot())
    assert remote_worker.breaker.has_no_failures
    assert remote_worker not in remote.fleet.roster.ejections.ejected
    assert remote_worker.accepts(6.1)


def test_peers_are_read_before_decisions_and_notified_of_changes() -> None:
    router = router_of(spec("a", most=2), spec("b", most=2))
    first, second = members(router.fleet)
    peers = router.fleet.roster.remote_load = Peers(router.fleet, fills=first)
    lease = placed(router.submit(make_info(), 1.0))
    assert (peers.look_times, peers.fills, lease.worker) == ([1.0], None, second)
    for event in (
        lambda: router.leases.record_first_token(lease, 2.0),
        lambda: router.leases.finish(lease, 3.0, Outcome.FAILED),
    ):
        peers.changes.clear()
        event()
        assert second in peers.changes

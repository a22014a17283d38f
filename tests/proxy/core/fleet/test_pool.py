"""The open workers of a pool."""

from __future__ import annotations

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Decision, Lease
from proxy.core.fleet.pool import Pool
from proxy.core.fleet.worker import MAX_UNRANKED, Worker
from proxy.core.model.types import Reason, RequestInfo
from tests.proxy.core.making import LONG, MODEL, SHORT, fleet_of, make_info, members, spec


def open_names(
    pool: Pool, request: RequestInfo, fleet: Fleet | None = None, now: float = 0.0
) -> list[str]:
    ejected = fleet.roster.ejections.ejected if fleet else ()
    return sorted(worker.name for worker in pool.available_workers(request, now, ejected, ()))


def charge(fleet: Fleet, worker: Worker, request: RequestInfo | None = None) -> Lease:
    return fleet.charge(request or make_info(), Decision(worker, Reason.LEAST_LOADED), 0.0)


def test_uncertain_size_goes_to_the_longest_workers() -> None:
    fleet = fleet_of(spec("a", SHORT, 1000), spec("b", LONG, 4000), spec("c", LONG, 4000))
    pool = fleet.roster.pool(MODEL)
    assert open_names(pool, make_info(4100, 50, error=500)) == ["b", "c"]
    assert open_names(pool, make_info(4100, 50, error=100)) == []


def test_models_of_the_same_workers_share_a_pool() -> None:
    fleet = fleet_of(spec("a"), spec("b"))
    for name in "ab":
        fleet.roster.set_served(name, [MODEL, "adapter"])
    assert fleet.roster.pool("adapter") is fleet.roster.pool(MODEL)
    assert open_names(fleet.roster.pool("nothing"), make_info()) == []


def test_new_pool_of_another_model_keeps_the_ranking() -> None:
    fleet = fleet_of(*(spec(f"w{i}") for i in range(MAX_UNRANKED + 8)))
    for i in range(8):
        fleet.roster.set_served(f"w{i}", [MODEL, "adapter"])
    fleet.roster.rank_by(lambda worker: worker.pace.token_s)
    ranked = fleet.roster.pool(MODEL).groups[0].ranked
    for number, worker in enumerate(members(fleet)):
        worker.pace.token_s = 9.0 + number  # learned when a request ends: no new ranking
    fleet.roster.pool("adapter")
    for worker in members(fleet):
        worker.pace.token_s /= 100.0
        charge(fleet, worker)
    assert {worker for _, _, worker in ranked} == set(fleet.roster)
    assert [worker for _, _, worker in ranked] == members(fleet)


def test_pool_is_mixed_if_worker_limits_differ() -> None:
    assert fleet_of(spec("a", SHORT), spec("b", LONG)).roster.pool(MODEL).mixed
    assert fleet_of(spec("a", SHORT), spec("b")).roster.pool(MODEL).mixed
    assert not fleet_of(spec("a"), spec("b")).roster.pool(MODEL).mixed
    assert not fleet_of(spec("a", SHORT), spec("b", SHORT)).roster.pool(MODEL).mixed
    fleet = fleet_of(spec("a", SHORT, 10), spec("b", LONG, 30), spec("c", LONG, 20))
    limits = fleet.roster.pool(MODEL)
    assert limits.boundaries == [10, 20]

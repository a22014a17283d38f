"""Pools: who is looked at."""

from __future__ import annotations

import random

from proxy.core.decisions import Decision, Lease
from proxy.core.fleet import Fleet
from proxy.core.pool import FIRST, SMALL, Pool
from proxy.core.types import Ask, Reason, Role
from proxy.core.worker import NO_LIMIT, Worker
from tests.proxy.core.making import LONG, MODEL, SHORT, ask, fleet_of, members, spec


def names(pool: Pool, one: Ask, fleet: Fleet | None = None, now: float = 0.0) -> list[str]:
    """Name those that are looked at."""
    resting = fleet.resting if fleet else ()
    return sorted(worker.name for worker in pool.open_to(one, now, resting, ()))


def charge(fleet: Fleet, worker: Worker, one: Ask | None = None) -> Lease:
    """Charge something."""
    return fleet.charge(one or ask(), Decision(worker, Reason.LEAST_LOADED), 0.0)


def test_those_that_surely_hold_it_are_looked_at() -> None:
    pool = fleet_of(spec("a", SHORT, 1000), spec("b", LONG, 4000), spec("c")).pool(MODEL)
    assert names(pool, ask(900, 50)) == ["a", "b", "c"]
    assert names(pool, ask(900, 101)) == ["b", "c"]
    assert names(pool, ask(900, 50, error=100)) == ["b", "c"]
    assert names(pool, ask(5000, 50)) == ["c"]


def test_where_nobody_is_sure_the_longest_tries() -> None:
    pool = fleet_of(spec("a", SHORT, 1000), spec("b", LONG, 4000), spec("c", LONG, 4000)).pool(
        MODEL
    )
    assert names(pool, ask(4100, 50, error=500)) == ["b", "c"]
    assert names(pool, ask(4100, 50, error=100)) == []


def test_nobody_else_tries_while_one_that_is_sure_is_full() -> None:
    fleet = fleet_of(spec("a", SHORT, 1000), spec("b", LONG, 4000, most=1))
    charge(fleet, members(fleet)[1])
    assert names(fleet.pool(MODEL), ask(900, 50, error=200)) == []


def test_the_down_the_draining_the_full_and_the_resting_are_not() -> None:
    fleet = fleet_of(*(spec(name, most=1) for name in "abcde"))
    by_name = {worker.name: worker for worker in fleet}
    for _ in range(3):
        fleet.probe_failed("a", 0.0)
    fleet.drain("b")
    charge(fleet, by_name["c"])
    fleet.failed(by_name["d"], 0.0, 5.0)
    assert names(fleet.pool(MODEL), ask(), fleet) == ["e"]
    assert names(fleet.pool(MODEL), ask(), fleet, now=5.0) == ["d", "e"]  # on trial


def test_prefill_workers_are_given_nothing_whole() -> None:
    fleet = fleet_of(spec("p", Role.PREFILL), spec("d", Role.DECODE))
    assert names(fleet.pool(MODEL), ask()) == ["d"]


def test_models_that_the_same_workers_serve_share_a_pool() -> None:
    fleet = fleet_of(spec("a"), spec("b"))
    for name in "ab":
        fleet.set_served(name, [MODEL, "adapter"])
    assert fleet.pool("adapter") is fleet.pool(MODEL)
    assert names(fleet.pool("nothing"), ask()) == []


def test_of_a_large_group_the_least_loaded_are_looked_at() -> None:
    fleet = fleet_of(*(spec(f"w{i}", most=50) for i in range(SMALL * 4)))
    rng = random.Random(1)
    leases: list[Lease] = []
    for _ in range(3000):
        if leases and rng.random() < 0.45:
            fleet.release(leases.pop(rng.randrange(len(leases))))
        else:
            leases.append(charge(fleet, rng.choice(members(fleet))))
    found = fleet.pool(MODEL).open_to(ask(), 0.0, (), ())
    loads = sorted(worker.requests for worker in fleet)
    assert [worker.requests for worker in found] == loads[:FIRST]
    ranked = [worker for _, _, worker in fleet.pool(MODEL).groups[0].ranked]
    assert sorted(w.name for w in ranked) == sorted(w.name for w in fleet)


def test_another_models_pool_leaves_each_where_it_is_found() -> None:
    fleet = fleet_of(*(spec(f"w{i}") for i in range(SMALL + 8)))
    for i in range(8):
        fleet.set_served(f"w{i}", [MODEL, "adapter"])
    fleet.rank_by(lambda worker: worker.pace.token_s)
    ranked = fleet.pool(MODEL).groups[0].ranked
    for number, worker in enumerate(members(fleet)):
        worker.pace.token_s = 9.0 + number  # learnt at the end of a request, which moves nobody
    fleet.pool("adapter")
    for worker in members(fleet):
        worker.pace.token_s /= 100.0
        charge(fleet, worker)
    assert {worker for _, _, worker in ranked} == set(fleet)
    assert [worker for _, _, worker in ranked] == members(fleet)


def test_the_full_are_not_among_the_first() -> None:
    fleet = fleet_of(*(spec(f"w{i}", most=1) for i in range(SMALL + 8)))
    for worker in members(fleet)[:-2]:
        charge(fleet, worker)
    assert len(names(fleet.pool(MODEL), ask())) == 2


def test_a_holder_of_the_prefix_is_looked_at_too() -> None:
    fleet = fleet_of(*(spec(f"w{i}") for i in range(SMALL + 8)))
    last = members(fleet)[-1]
    charge(fleet, last)
    pool = fleet.pool(MODEL)
    assert last not in pool.open_to(ask(), 0.0, (), ())
    assert last in pool.open_to(ask(), 0.0, (), (last,))


def test_where_size_decides() -> None:
    assert fleet_of(spec("a", SHORT), spec("b", LONG)).pool(MODEL).mixed
    assert fleet_of(spec("a", SHORT), spec("b")).pool(MODEL).mixed
    assert not fleet_of(spec("a"), spec("b")).pool(MODEL).mixed
    assert not fleet_of(spec("a", SHORT), spec("b", SHORT)).pool(MODEL).mixed
    limits = fleet_of(spec("a", SHORT, 10), spec("b", LONG, 30), spec("c", LONG, 20)).pool(MODEL)
    assert limits.boundaries == [10, 20]


def test_the_largest_context_is_that_of_one_that_comes_back_too() -> None:
    fleet = fleet_of(spec("a", SHORT, 10), spec("b", LONG, 30), spec("p", Role.PREFILL, 90))
    fleet.drain("b")
    pool = fleet.pool(MODEL)
    assert (pool.most, pool.limit) == (10, 30)
    fleet.add(spec("c", LONG))  # it has not told
    assert fleet.pool(MODEL).limit == NO_LIMIT

"""Whether a decode worker has a free slot, by its metrics page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proxy.core.fleet import slots
from proxy.core.fleet.leases import Decision, Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.model.types import Outcome, Reason, RequestInfo
from proxy.core.router import Router
from proxy.core.routing.registry import RULES
from tests.proxy.core.making import (
    make_info,
    notes,
    placed,
    pop_one,
    router_of,
    spec,
    waits,
    worker_of,
)

P, D = Role.PREFILL, Role.DECODE
LONG = 12_000
CACHE, SMALL_CACHE = 10_000_000, 100_000  # tokens


def make_router(*names: str, **settings: Any) -> Router:
    decodes = [spec(name, D) for name in names or ("d0",)]
    settings = {"disaggregate_above": 1} | settings
    return router_of(spec("p0", P), *decodes, transfer=True, **settings)


def set_page(
    router: Router,
    at: float,
    running: int,
    queued: int = 0,
    *,
    name: str = "d0",
    usage: float = 0.1,
    cache: int = CACHE,
) -> Worker:
    gauges = Gauges(at, running, queued, kv_usage=usage, kv_capacity_tokens=cache)
    router.fleet.health.set_gauges(name, gauges)
    return worker_of(router, name)


def decoding_handovers(router: Router, count: int, info: RequestInfo | None = None) -> list[Lease]:
    """Hand requests over until they decode."""
    leases = [placed(router.submit(info or make_info(LONG), 0.0)) for _ in range(count)]
    for lease in leases:
        router.leases.end_prefill(lease, 0.0, None)
        router.leases.record_first_token(lease, 0.0)
    return leases


# Learning from queued requests


def test_learnt_slots_recover_after_a_queue() -> None:
    router = make_router()
    decoding_handovers(router, 8)
    set_page(router, 1.0, 1, 7)
    assert set_page(router, 2.0, 1, 7).learned_slots == 1.0
    assert set_page(router, 3.0, 8).learned_slots == 2.25
    for second in range(4, 60):
        set_page(router, float(second), 8)
    assert worker_of(router, "d0").learned_slots > 100_000


# Effect on placement


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("foreign_requests", [0, 200])
def test_no_prefill_without_a_decode_slot(rule: str, foreign_requests: int) -> None:
    """Requests of other routers may hold the slots."""
    router = make_router(policy=rule)
    leases = decoding_handovers(router, 4)
    for second in (1.0, 2.0, 3.0):
        set_page(router, second, 4, foreign_requests or 1)
    ticket = waits(router.submit(make_info(LONG), 3.0))
    assert worker_of(router, "p0").requests == 0
    assert router.pop_due(3.0) == []
    for lease in leases:
        router.leases.finish(lease, 4.0, Outcome.DONE)
    set_page(router, 4.0, 0)
    set_page(router, 5.0, 0)
    ended, lease = pop_one(router, 5.0)
    assert (ended, placed(lease).decision.route) == (ticket, "p0>d0")


def test_explain_notes_a_missing_slot() -> None:
    router = make_router(disaggregate_above=1000)
    decoding_handovers(router, 4)
    for second in (1.0, 2.0):
        set_page(router, second, 2, 2)
    found = notes(router, make_info(LONG), 2.0)
    assert found == {"p0": "prefills only", "d0": "no room yet for a hand-over"}


@pytest.mark.parametrize("rule", RULES)
def test_uncharged_cache_usage_of_a_page_takes_room(rule: str) -> None:
    """Requests of other routers or longer answers than expected."""
    router = make_router(policy=rule)
    decoding_handovers(router, 1)
    assert set_page(router, 1.0, 1, usage=0.8, cache=SMALL_CACHE).kv_uncharged == 80_000 - LONG - 50
    assert placed(router.submit(make_info(1000), 1.0)).prefill is not None  # it fits
    ticket = waits(router.submit(make_info(20_000), 1.0))
    assert worker_of(router, "p0").requests == 1
    assert router.pop_due(1.5) == []
    set_page(router, 2.0, 1, 1, usage=0.8, cache=SMALL_CACHE)
    assert router.pop_due(2.0) == []
    set_page(router, 3.0, 1, usage=0.6, cache=SMALL_CACHE)
    ended, lease = pop_one(router, 3.0)
    assert (ended, placed(lease).decision.route) == (ticket, "p0>d0")


@pytest.mark.parametrize("rule", RULES)
def test_another_decode_worker_is_used_if_one_is_full(rule: str) -> None:
    router = make_router("d0", "d1", policy=rule)
    busy = decoding_handovers(router, 6)
    for lease in busy:
        if lease.worker.name == "d0":
            router.leases.finish(lease, 1.0, Outcome.DONE)
    first, second = worker_of(router, "d0"), worker_of(router, "d1")
    router.fleet.charge(make_info(10), Decision(first, Reason.ONLY_CHOICE), 1.0)
    set_page(router, 1.0, 3, name="d1")
    set_page(router, 1.0, 1, usage=0.9, cache=SMALL_CACHE)
    assert (first.requests, second.requests) == (1, 3)
    for _ in range(3):
        assert placed(router.submit(make_info(LONG), 1.0)).decision.route == "p0>d1"


# Slots stated in the fleet file


def router_with_slots(most: int, **settings: Any) -> Router:
    """Return a router with a decode worker with a stated number of slots."""
    second = replace(spec("d0", D), slots=most)
    settings = {"disaggregate_above": 1000} | settings
    return router_of(spec("p0", P), second, transfer=True, **settings)


@pytest.mark.parametrize("rule", RULES)
def test_handovers_do_not_exceed_stated_slots(rule: str) -> None:
    """From the start, without any page."""
    router = router_with_slots(4, policy=rule)
    leases = [placed(router.submit(make_info(LONG), 0.0)) for _ in range(4)]
    ticket = waits(router.submit(make_info(LONG), 0.0))
    router.leases.finish(leases[0], 1.0, Outcome.DONE)
    ended, lease = pop_one(router, 1.0)
    assert ended is ticket
    assert placed(lease).prefill is not None


# When a slot is needed


def test_each_handover_in_transit_needs_a_slot() -> None:
    router = router_with_slots(4)
    decoding_handovers(router, 4, make_info(LONG, 200))
    worker = worker_of(router, "d0")
    one_s = slots.wait_s(worker, 0.0)
    assert one_s == pytest.approx(200 * worker.pace.step_s(4) / 4)
    worker.requests += 1
    worker.decode_tokens += 200
    assert slots.wait_s(worker, 0.0) == pytest.approx(2 * one_s)


@pytest.mark.parametrize("rule", RULES)
def test_answer_past_its_estimate_keeps_its_slot_as_long_again(rule: str) -> None:
    router = router_with_slots(4, policy=rule)
    for lease in decoding_handovers(router, 4, make_info(1500, None)):
        router.leases.record_tokens(lease, lease.info.expected_output)
    worker_of(router, "p0").pace.token_s = 1e-4
    assert slots.wait_s(worker_of(router, "d0"), 0.0) > 0.2
    waits(router.submit(make_info(1500, None), 0.0))


@pytest.mark.parametrize("rule", RULES)
def test_long_slot_wait_ends_in_one_handover_at_a_time(rule: str) -> None:
    """Whole, it would wait for the same slot; so it is handed over, one at a time."""
    router = router_with_slots(4, policy=rule, queue_wait_s=30.0)
    decoding_handovers(router, 4, make_info(LONG, 100_000))
    worker_of(router, "p0").pace.token_s = 1e-4
    first, second = (waits(router.submit(make_info(LONG), 0.0)) for _ in range(2))
    assert router.pop_due(14.9) == []
    ended, lease = pop_one(router, 15.1)
    assert (ended, placed(lease).decision.route) == (first, "p0>d0")
    router.leases.end_prefill(placed(lease), 16.0, None)
    ended, lease = pop_one(router, 16.0)
    assert (ended, placed(lease).decision.route) == (second, "p0>d0")


def test_slot_wait_teaches_neither_pace_nor_transfer_time() -> None:
    router = make_router()
    decoding_handovers(router, 4)
    before = router.placer.transfer_times["m"].all.seen
    pace = worker_of(router, "d0").pace
    short = placed(router.submit(make_info(1), 0.0))
    assert short.prefill is None
    long = placed(router.submit(make_info(LONG), 0.0))
    router.leases.end_prefill(long, 1.0, None)
    set_page(router, 1.0, 4, 1)
    learned = pace.token_s, pace.fixed_s
    router.leases.record_first_token(short, 9.0)
    router.leases.record_first_token(long, 9.0)
    assert (pace.token_s, pace.fixed_s) == learned
    assert router.placer.transfer_times["m"].all.seen == before
    set_page(router, 10.0, 4)
    short = placed(router.submit(make_info(1), 10.0))
    router.leases.record_first_token(short, 10.5)
    assert (pace.token_s, pace.fixed_s) != learned


# The reported share


def test_share_of_taken_slots_counts_present_requests() -> None:
    router = router_with_slots(4)
    worker = worker_of(router, "d0")
    [lease, _] = [placed(router.submit(make_info(LONG), 0.0)) for _ in range(2)]
    assert slots.share_taken(worker, 0.0) == 0
    set_page(router, 0.0, 0, usage=0.99)  # a cache may be full of unused blocks
    assert slots.share_taken(worker, 0.0) == 0
    router.leases.end_prefill(lease, 0.0, None)
    set_page(router, 0.5, 1)
    assert slots.share_taken(worker, 0.5) == 0.25
    for second in (1.0, 2.0):  # requests of other routers
        set_page(router, second, 3)
    assert slots.share_taken(worker, 2.0) == 0.75
    set_page(router, 3.0, 2, usage=0.99)
    assert slots.share_taken(worker, 3.0) == 1
    assert slots.share_taken(worker, 3.1 + slots.MAX_PAGE_AGE_S) == 0.25

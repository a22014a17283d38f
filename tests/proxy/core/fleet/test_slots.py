"""Whether a decode worker has room, by its own page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proxy.core.fleet import slots
from proxy.core.fleet.leases import Decision, Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.model.types import Outcome, Reason
from proxy.core.router import Router
from tests.proxy.core.making import ask, placed, router_of, spec, waits, worker_of

P, D = Role.PREFILL, Role.DECODE
RULES = ["adaptive", "length", "least_loaded", "round_robin"]
LONG = 12_000
CACHE = 10_000_000


def router(*names: str, **settings: Any) -> Router:
    """Make one with a prefill worker and decode workers."""
    decodes = [spec(name, D) for name in names or ("d0",)]
    settings = {"disaggregate_above": 1} | settings
    return router_of(spec("p0", P), *decodes, transfer=True, **settings)


def page(
    here: Router, at: float, running: int, queued: int = 0, *, name: str = "d0", usage: float = 0.1
) -> Worker:
    """Let a worker say how it is."""
    told = Gauges(at, running, queued, kv_usage=usage, kv_capacity_tokens=CACHE)
    here.fleet.health.set_gauges(name, told)
    return worker_of(here, name)


def handed(here: Router, count: int, now: float = 0.0) -> list[Lease]:
    """Hand so many over, and have them decode."""
    leases = [placed(here.submit(ask(LONG), now)) for _ in range(count)]
    for lease in leases:
        here.leases.prefilled(lease, now, None)
        here.leases.first_token(lease, now)
    return leases


# What is learnt of a queue


def test_what_was_learnt_of_a_bad_moment_is_forgotten() -> None:
    here = router()
    handed(here, 8)
    page(here, 1.0, 1, 7)
    assert page(here, 2.0, 1, 7).slots == 1.0
    assert page(here, 3.0, 8).slots == 2.25
    for second in range(4, 60):
        page(here, float(second), 8)
    assert worker_of(here, "d0").slots > 100_000


# What comes of it


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("foreign_requests", [0, 200])
def test_nothing_is_prefilled_for_who_has_no_seat(rule: str, foreign_requests: int) -> None:
    """Be it that others, of whom the router knows nothing, have them."""
    here = router(policy=rule)
    leases = handed(here, 4)
    for second in (1.0, 2.0, 3.0):
        page(here, second, 4, foreign_requests or 1)
    ticket = waits(here.submit(ask(LONG), 3.0))
    assert worker_of(here, "p0").requests == 0
    assert here.due(3.0) == []
    for lease in leases:
        here.leases.finish(lease, 4.0, Outcome.DONE)
    page(here, 4.0, 0)
    page(here, 5.0, 0)
    [(ended, lease)] = here.due(5.0)
    assert ended is ticket
    assert placed(lease).decision.route == "p0>d0"


def test_an_explanation_tells_that_it_waits_for_room() -> None:
    here = router(disaggregate_above=1000)
    handed(here, 4)
    for second in (1.0, 2.0):
        page(here, second, 2, 2)
    told = {score.worker: score.note for score in here.placer.explain(ask(LONG), 2.0).scores}
    assert told == {"p0": "prefills only", "d0": "no room yet for a hand-over"}


def spread(here: Router, now: float, usage: float, queued: int = 0) -> Worker:
    """Let a decode worker with room for 100,000 tokens say how full it is."""
    told = Gauges(now, 1, queued, kv_usage=usage, kv_capacity_tokens=100_000)
    here.fleet.health.set_gauges("d0", told)
    return worker_of(here, "d0")


@pytest.mark.parametrize("rule", RULES)
def test_what_a_page_shows_beyond_what_is_charged_takes_room(rule: str) -> None:
    """Be it strangers', or an answer that is longer than was foreseen."""
    here = router(policy=rule)
    handed(here, 1)
    assert spread(here, 1.0, 0.8).kv_more == 80_000 - LONG - 50
    assert placed(here.submit(ask(1000), 1.0)).prefill is not None  # there is room for that
    ticket = waits(here.submit(ask(20_000), 1.0))
    assert worker_of(here, "p0").requests == 1
    assert here.due(1.5) == []
    spread(here, 2.0, 0.6)
    [(ended, lease)] = here.due(2.0)
    assert (ended, placed(lease).decision.route) == (ticket, "p0>d0")


@pytest.mark.parametrize("rule", RULES)
def test_it_does_so_whoever_waits_there(rule: str) -> None:
    here = router(policy=rule)
    handed(here, 1)
    spread(here, 1.0, 0.8)
    ticket = waits(here.submit(ask(20_000), 1.0))
    spread(here, 2.0, 0.8, queued=1)
    assert here.due(2.0) == []
    spread(here, 3.0, 0.6)
    assert [ended for ended, _ in here.due(3.0)] == [ticket]


def test_so_it_does_while_none_of_ours_is_there() -> None:
    here = router()
    spread(here, 1.0, 0.9)
    handed(here, 1, 1.0)  # there may be nobody else: its engine keeps the order
    waits(here.submit(ask(LONG), 1.0))


@pytest.mark.parametrize("rule", RULES)
def test_where_one_is_full_by_its_page_another_takes_it(rule: str) -> None:
    here = router("d0", "d1", policy=rule)
    busy = handed(here, 6)
    for lease in busy:
        if lease.worker.name == "d0":
            here.leases.finish(lease, 1.0, Outcome.DONE)
    first, second = worker_of(here, "d0"), worker_of(here, "d1")
    here.fleet.charge(ask(10), Decision(first, Reason.ONLY_CHOICE), 1.0)
    page(here, 1.0, 3, name="d1")
    spread(here, 1.0, 0.9)
    assert (first.requests, second.requests) == (1, 3)
    for _ in range(3):
        assert placed(here.submit(ask(LONG), 1.0)).decision.route == "p0>d1"


# As the file says


def stated(most: int, **settings: Any) -> Router:
    """Make one with a decode worker of which it is known how many seats it has."""
    second = replace(spec("d0", D), slots=most)
    settings = {"disaggregate_above": 1000} | settings
    return router_of(spec("p0", P), second, transfer=True, **settings)


@pytest.mark.parametrize("rule", RULES)
def test_no_more_is_handed_over_than_there_are_seats_for(rule: str) -> None:
    """From the first moment on, and with no page at all."""
    here = stated(4, policy=rule)
    leases = [placed(here.submit(ask(LONG), 0.0)) for _ in range(4)]
    ticket = waits(here.submit(ask(LONG), 0.0))
    here.leases.finish(leases[0], 1.0, Outcome.DONE)
    [(ended, lease)] = here.due(1.0)
    assert ended is ticket
    assert placed(lease).prefill is not None


# When one is needed


def decoding(here: Router, count: int, left: int) -> list[Lease]:
    """Have so many decode, each with so much of its answer left."""
    leases = [placed(here.submit(ask(LONG, left), 0.0)) for _ in range(count)]
    for lease in leases:
        here.leases.prefilled(lease, 0.0, None)
        here.leases.first_token(lease, 0.0)
    worker_of(here, "p0").pace.token_s = 1e-4
    return leases


def test_each_that_is_on_its_way_needs_one_of_its_own() -> None:
    here = stated(4)
    decoding(here, 4, 200)
    worker = worker_of(here, "d0")
    one_s = slots.wait_s(worker, 0.0)
    assert one_s == pytest.approx(200 * worker.pace.step_s(4) / 4)
    worker.requests += 1
    worker.decode_tokens += 200
    assert slots.wait_s(worker, 0.0) == pytest.approx(2 * one_s)


@pytest.mark.parametrize("rule", RULES)
def test_who_has_written_all_that_was_foreseen_may_stay_for_as_long_again(rule: str) -> None:
    here = stated(4, policy=rule)
    leases = [placed(here.submit(ask(1500, None), 0.0)) for _ in range(4)]
    for lease in leases:
        here.leases.prefilled(lease, 0.0, None)
        here.leases.first_token(lease, 0.0)
        here.leases.tokens(lease, lease.ask.expected_output)
    worker_of(here, "p0").pace.token_s = 1e-4
    assert slots.wait_s(worker_of(here, "d0"), 0.0) > 0.2
    waits(here.submit(ask(1500, None), 0.0))


@pytest.mark.parametrize("rule", RULES)
def test_one_that_waits_for_a_seat_for_long_is_not_computed_beside_others(rule: str) -> None:
    """Served whole it would wait for the same seat: so it is handed over, one at a time."""
    here = stated(4, policy=rule, queue_wait_s=30.0)
    decoding(here, 4, 100_000)
    first, second = (waits(here.submit(ask(LONG), 0.0)) for _ in range(2))
    assert here.due(14.9) == []
    [(ended, lease)] = here.due(15.1)
    assert (ended, placed(lease).decision.route) == (first, "p0>d0")
    here.leases.prefilled(placed(lease), 16.0, None)
    [(ended, lease)] = here.due(16.0)
    assert (ended, placed(lease).decision.route) == (second, "p0>d0")


def test_the_wait_for_a_seat_is_neither_a_prefill_nor_a_transfer() -> None:
    here = router()
    handed(here, 4)
    before = here.placer.transfer_times("m").all.seen
    pace = worker_of(here, "d0").pace
    short = placed(here.submit(ask(1), 0.0))
    assert short.prefill is None
    long = placed(here.submit(ask(LONG), 0.0))
    here.leases.prefilled(long, 1.0, None)
    page(here, 1.0, 4, 1)
    learnt = pace.token_s, pace.fixed_s
    here.leases.first_token(short, 9.0)
    here.leases.first_token(long, 9.0)
    assert (pace.token_s, pace.fixed_s) == learnt
    assert here.placer.transfer_times("m").all.seen == before
    page(here, 10.0, 4)
    short = placed(here.submit(ask(1), 10.0))
    here.leases.first_token(short, 10.5)
    assert (pace.token_s, pace.fixed_s) != learnt


# A page that says nothing of now


def test_a_page_that_is_old_keeps_nobody_back() -> None:
    here = router(queue_wait_s=1000.0)
    handed(here, 4)
    for second in (1.0, 2.0):
        page(here, second, 2, 2, usage=0.99)
    waits(here.submit(ask(LONG), 2.0))
    assert here.due(2.0 + slots.MAX_PAGE_AGE_S) == []
    [(_, lease)] = here.due(2.1 + slots.MAX_PAGE_AGE_S)
    assert placed(lease).prefill is not None


# What is told of it


def test_a_seat_is_taken_by_who_is_there() -> None:
    here = stated(4)
    worker = worker_of(here, "d0")
    [lease, _] = [placed(here.submit(ask(LONG), 0.0)) for _ in range(2)]
    assert slots.share_taken(worker, 0.0) == 0
    page(here, 0.0, 0, usage=0.99)  # a cache may be full of what nobody uses
    assert slots.share_taken(worker, 0.0) == 0
    here.leases.prefilled(lease, 0.0, None)
    page(here, 0.5, 1)
    assert slots.share_taken(worker, 0.5) == 0.25
    for second in (1.0, 2.0):  # strangers
        page(here, second, 3)
    assert slots.share_taken(worker, 2.0) == 0.75
    page(here, 3.0, 2, usage=0.99)
    assert slots.share_taken(worker, 3.0) == 1
    assert slots.share_taken(worker, 3.1 + slots.MAX_PAGE_AGE_S) == 0.25

"""Gaps: when a line may be sent."""

from __future__ import annotations

from proxy.batches.spare_capacity import has_spare_capacity
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.model_lists import MAX_MODEL_LIST_WAIT_S
from proxy.core.model.role import Role
from proxy.core.router import Router, RouterSettings
from tests.proxy.core.making import MODEL, ask, placed, router_of, spec, waits

LONG = 4 * 12_000  # bytes


def disaggregated() -> Router:
    """Make a fleet whose prefill worker has much ahead of it, and whose decode worker has not."""
    sides = (spec("p", Role.PREFILL), spec("d", Role.DECODE))
    router = router_of(*sides, transfer=True, disaggregate_above=1000)
    assert placed(router.submit(ask(500_000), 0.0)).prefill is not None
    return router


def test_a_short_line_needs_no_prefill_worker_and_a_long_one_does() -> None:
    router = disaggregated()
    assert has_spare_capacity(router, MODEL, 0.0, 100)
    assert not has_spare_capacity(router, MODEL, 0.0, LONG)


def test_an_idle_fleet_has_room_for_either() -> None:
    router = router_of(spec("p", Role.PREFILL), spec("d", Role.DECODE), transfer=True)
    assert has_spare_capacity(router, MODEL, 0.0, 100)
    assert has_spare_capacity(router, "", 0.0, LONG)


def test_only_those_who_wait_for_the_same_model_come_first() -> None:
    router = router_of(spec("a", most=1), spec("b", most=8, model="other"))
    placed(router.submit(ask(), 0.0))
    waits(router.submit(ask(), 0.0))
    assert not has_spare_capacity(router, MODEL, 0.0)
    assert has_spare_capacity(router, "other", 0.0)


def test_what_nobody_serves_may_go_and_be_refused() -> None:
    assert has_spare_capacity(router_of(spec("a")), "nothing", 0.0)
    assert not has_spare_capacity(router_of(), "nothing", 0.0)


def test_not_before_all_have_said_what_they_serve() -> None:
    router = router_of(spec("a"))
    router.fleet.roster.add(spec("late"))
    assert not has_spare_capacity(router, "adapter", 0.0)
    router.fleet.roster.set_served("late", [MODEL, "adapter"])
    router.fleet.health.probe_ok("late", 1.0)
    assert has_spare_capacity(router, "adapter", 1.0)
    assert has_spare_capacity(router, "nothing", 1.0)


def test_nor_for_ever_after_one_that_never_comes_up() -> None:
    now = 50.0
    fleet = Fleet(clock=lambda: now)
    router = Router(RouterSettings(), fleet)
    for name in ("a", "dead"):
        fleet.roster.add(spec(name))
    fleet.health.probe_ok("a", now)
    now += MAX_MODEL_LIST_WAIT_S - 1
    assert not has_spare_capacity(router, "nothing", now)
    now += 1
    assert has_spare_capacity(router, "nothing", now)

"""Spare capacity for lines of batches."""

from __future__ import annotations

from proxy.batches.spare_capacity import has_spare_capacity
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.model_lists import MAX_MODEL_LIST_WAIT_S
from proxy.core.model.role import Role
from proxy.core.router import Router, RouterSettings
from tests.proxy.core.making import MODEL, make_info, placed, router_of, spec, waits

LONG = 4 * 12_000  # bytes


def disaggregated() -> Router:
    """Return a router with a busy prefill worker and an idle decode worker."""
    sides = (spec("p", Role.PREFILL), spec("d", Role.DECODE))
    router = router_of(*sides, transfer=True, disaggregate_above=1000)
    assert placed(router.submit(make_info(500_000), 0.0)).prefill is not None
    return router


def test_only_long_lines_need_a_prefill_worker() -> None:
    router = disaggregated()
    assert has_spare_capacity(router, MODEL, 0.0, 100)
    assert not has_spare_capacity(router, MODEL, 0.0, LONG)


def test_idle_fleet_has_capacity() -> None:
    router = router_of(spec("p", Role.PREFILL), spec("d", Role.DECODE), transfer=True)
    assert has_spare_capacity(router, MODEL, 0.0, 100)
    assert has_spare_capacity(router, "", 0.0, LONG)


def test_only_requests_for_the_same_model_go_first() -> None:
    router = router_of(spec("a", most=1), spec("b", most=8, model="other"))
    placed(router.submit(make_info(), 0.0))
    waits(router.submit(make_info(), 0.0))
    assert not has_spare_capacity(router, MODEL, 0.0)
    assert has_spare_capacity(router, "other", 0.0)


def test_unserved_model_is_sent_to_be_refused() -> None:
    assert has_spare_capacity(router_of(spec("a")), "nothing", 0.0)
    assert not has_spare_capacity(router_of(), "nothing", 0.0)


def test_unknown_model_waits_for_all_model_lists() -> None:
    router = router_of(spec("a"))
    router.fleet.roster.add(spec("late"))
    assert not has_spare_capacity(router, "adapter", 0.0)
    router.fleet.roster.set_served("late", [MODEL, "adapter"])
    router.fleet.health.probe_ok("late", 1.0)
    assert has_spare_capacity(router, "adapter", 1.0)
    assert has_spare_capacity(router, "nothing", 1.0)


def test_unknown_model_wait_is_bounded() -> None:
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

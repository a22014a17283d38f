"""Connections between workers, as they come and go."""

from __future__ import annotations

from proxy.core.fleet import Fleet
from proxy.core.links import PATIENCE_S, Links
from proxy.core.types import Role
from proxy.core.worker import Worker
from tests.proxy.core.making import fleet_of, members, spec


def two() -> tuple[Fleet, Worker, Worker]:
    fleet = fleet_of(spec("p0", Role.PREFILL), spec("d0", Role.DECODE))
    return fleet, *members(fleet)


def test_where_nobody_makes_them_none_is_waited_for() -> None:
    _, prefill, decode = two()
    assert not Links().are_cold(prefill, decode, 0.0)


def test_one_is_cold_until_it_is_made_or_long_overdue() -> None:
    _, prefill, decode = two()
    links = Links()
    links.are_made = True
    assert links.are_cold(prefill, decode, 1.0)
    assert not links.are_cold(prefill, decode, PATIENCE_S)
    links.warm(prefill, decode)
    assert not links.are_cold(prefill, decode, 1.0)
    assert links.knows(prefill, decode)


def test_a_worker_that_went_down_has_to_be_connected_anew() -> None:
    fleet, prefill, decode = two()
    links = Links()
    links.are_made = True
    links.warm(prefill, decode)
    for _ in range(3):
        fleet.probe_failed("d0", 20.0)
    for _ in range(2):
        fleet.probe_ok("d0", 30.0)
    assert links.are_cold(prefill, decode, 31.0)
    assert not links.knows(prefill, decode)
    links.warm(prefill, decode)
    assert not links.are_cold(prefill, decode, 31.0)

"""Connections between workers, as they come and go."""

from __future__ import annotations

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.kv_links import BARRED_S, KvLinks
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from tests.proxy.core.making import fleet_of, members, spec


def two() -> tuple[Fleet, Worker, Worker]:
    fleet = fleet_of(spec("p0", Role.PREFILL), spec("d0", Role.DECODE))
    return fleet, *members(fleet)


def test_one_is_cold_until_it_is_made() -> None:
    _, prefill, decode = two()
    links = KvLinks()
    links.are_made = True
    assert links.are_cold(prefill, decode)
    assert links.is_shut(prefill, decode, 1e6)
    links.unmade(prefill, decode)
    assert links.are_cold(prefill, decode)
    assert "nothing for d0 yet" in links.note(prefill, 1.0)
    links.warm(prefill, decode)
    assert not links.are_cold(prefill, decode)
    assert not links.is_shut(prefill, decode, 1.0)
    assert links.knows(prefill, decode)
    assert links.note(prefill, 1.0) == ""


def test_a_prefill_worker_reaches_whom_it_may_hand_over_to() -> None:
    fleet = fleet_of(
        spec("p0", Role.PREFILL), spec("d0", Role.DECODE), spec("d1", Role.DECODE), spec("g0")
    )
    prefill, first, second, general = members(fleet)
    links = KvLinks()
    links.are_made = True
    assert not links.reaches(prefill, [first, second, general], 1.0)
    links.warm(prefill, general)  # it takes no hand-overs
    assert not links.reaches(prefill, [first, second, general], 1.0)
    links.warm(prefill, second)
    assert links.reaches(prefill, [first, second, general], 1.0)
    for _ in range(3):
        links.failed(prefill, second, 1.0)
    assert not links.reaches(prefill, [first, second], 1.0)
    assert links.reaches(prefill, [first, second], 1.0 + BARRED_S)


def test_what_was_tried_with_a_worker_before_it_was_started_anew_says_nothing() -> None:
    _, prefill, decode = two()
    links = KvLinks()
    links.unmade(prefill, decode)
    decode.up_since = 9.0
    assert links.note(prefill, 10.0) == ""


# Those that fail


def test_a_few_failures_in_a_row_bar_a_link_for_a_while() -> None:
    _, prefill, decode = two()
    links = KvLinks()
    assert [links.failed(prefill, decode, 1.0) for _ in range(4)] == [False, False, True, False]
    assert links.is_barred(prefill, decode, 1.0)
    assert not links.is_barred(prefill, None, 1.0)
    assert links.barred(1.0) == [(prefill, decode)]
    assert links.note(prefill, 1.0) == "prefills nothing for d0 for now: its transfers fail"
    assert not links.is_barred(prefill, decode, 1.0 + BARRED_S)
    assert links.note(prefill, 1.0 + BARRED_S) == ""
    assert links.failed(prefill, decode, 100.0)  # one more will do


def test_one_that_works_begins_anew() -> None:
    _, prefill, decode = two()
    links = KvLinks()
    links.worked(prefill, decode)
    for _ in range(2):
        links.failed(prefill, decode, 1.0)
    links.worked(prefill, decode)
    assert not links.failed(prefill, decode, 1.0)
    assert not links.is_barred(prefill, decode, 1.0)


def test_a_prefill_worker_may_be_barred_by_itself() -> None:
    fleet, prefill, _ = two()
    links = KvLinks()
    for _ in range(3):
        links.failed(prefill, None, 1.0)
    assert links.is_barred(prefill, None, 1.0)
    assert "name no KV blocks to fetch" in links.note(prefill, 1.0)
    for _ in range(3):
        fleet.health.probe_failed("p0", 2.0)
    for _ in range(2):
        fleet.health.probe_ok("p0", 3.0)
    assert not links.is_barred(prefill, None, 4.0)  # it may have been started anew, and right


def test_those_that_left_are_forgotten() -> None:
    _, prefill, decode = two()
    links = KvLinks()
    links.warm(prefill, decode)
    for _ in range(3):
        links.failed(prefill, decode, 1.0)
    links.keep([prefill, decode])
    assert links.knows(prefill, decode)
    assert links.barred(1.0)
    links.keep([prefill])
    assert not links.knows(prefill, decode)
    assert not links.barred(1.0)

"""KV connections between workers."""

from __future__ import annotations

from proxy.core.fleet.kv_links import BARRED_S, KvLinks
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from tests.proxy.core.making import fleet_of, members, spec, take_down


def links_of_a_pair() -> tuple[KvLinks, Worker, Worker]:
    prefill, decode = members(fleet_of(spec("p0", Role.PREFILL), spec("d0", Role.DECODE)))
    return KvLinks(), prefill, decode


def test_link_is_cold_until_warmed() -> None:
    links, prefill, decode = links_of_a_pair()
    links.are_made = True
    assert links.is_cold(prefill, decode)
    assert links.is_unusable(prefill, decode, 1e6)
    links.set_unmade(prefill, decode)
    assert links.is_cold(prefill, decode)
    assert "nothing for d0 yet" in links.describe(prefill, 1.0)
    links.set_warm(prefill, decode)
    assert not links.is_cold(prefill, decode)
    assert not links.is_unusable(prefill, decode, 1.0)
    assert links.is_warm(prefill, decode)
    assert links.describe(prefill, 1.0) == ""


def test_prefill_worker_reaches_decode_workers_with_open_links() -> None:
    fleet = fleet_of(
        spec("p0", Role.PREFILL), spec("d0", Role.DECODE), spec("d1", Role.DECODE), spec("g0")
    )
    prefill, first, second, general = members(fleet)
    links = KvLinks()
    links.are_made = True
    assert not links.can_reach(prefill, [first, second, general], 1.0)
    links.set_warm(prefill, general)  # a general worker takes no hand-overs
    assert not links.can_reach(prefill, [first, second, general], 1.0)
    links.set_warm(prefill, second)
    assert links.can_reach(prefill, [first, second, general], 1.0)
    for _ in range(3):
        links.record_failure(prefill, second, 1.0)
    assert not links.can_reach(prefill, [first, second], 1.0)
    assert links.can_reach(prefill, [first, second], 1.0 + BARRED_S)


def test_failed_warmup_before_a_restart_is_ignored() -> None:
    links, prefill, decode = links_of_a_pair()
    links.set_unmade(prefill, decode)
    decode.up_since = 9.0
    assert links.describe(prefill, 10.0) == ""


# Links that fail


def test_three_failures_in_a_row_bar_a_link() -> None:
    links, prefill, decode = links_of_a_pair()
    bars = [links.record_failure(prefill, decode, 1.0) for _ in range(4)]
    assert bars == [False, False, True, False]
    assert links.is_barred(prefill, decode, 1.0)
    assert not links.is_barred(prefill, None, 1.0)
    assert links.barred_links(1.0) == [(prefill, decode)]
    assert links.describe(prefill, 1.0) == "prefills nothing for d0 for now: its transfers fail"
    assert not links.is_barred(prefill, decode, 1.0 + BARRED_S)
    assert links.describe(prefill, 1.0 + BARRED_S) == ""
    assert links.record_failure(prefill, decode, 100.0)  # one more failure is enough


def test_success_resets_the_failures_of_a_link() -> None:
    links, prefill, decode = links_of_a_pair()
    links.record_success(prefill, decode)
    for _ in range(2):
        links.record_failure(prefill, decode, 1.0)
    links.record_success(prefill, decode)
    assert not links.record_failure(prefill, decode, 1.0)
    assert not links.is_barred(prefill, decode, 1.0)


def test_prefill_worker_without_kv_blocks_is_barred() -> None:
    fleet = fleet_of(spec("p0", Role.PREFILL))
    links, [prefill] = KvLinks(), members(fleet)
    for _ in range(3):
        links.record_failure(prefill, None, 1.0)
    assert links.is_barred(prefill, None, 1.0)
    assert "name no KV blocks to fetch" in links.describe(prefill, 1.0)
    take_down(fleet, "p0")
    for _ in range(2):
        fleet.health.probe_ok("p0", 3.0)
    assert not links.is_barred(prefill, None, 4.0)  # it may have been restarted correctly


def test_keep_forgets_links_of_removed_workers() -> None:
    links, prefill, decode = links_of_a_pair()
    links.set_warm(prefill, decode)
    for _ in range(3):
        links.record_failure(prefill, decode, 1.0)
    links.keep_only([prefill, decode])
    assert links.is_warm(prefill, decode)
    assert links.barred_links(1.0)
    links.keep_only([prefill])
    assert not links.is_warm(prefill, decode)
    assert not links.barred_links(1.0)

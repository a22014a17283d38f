"""The least cost."""

from __future__ import annotations

import pytest

from proxy.core.decisions import Decision, Lease
from proxy.core.pool import SMALL
from proxy.core.prefix import BLOCKS
from proxy.core.records import Gauges
from proxy.core.router import Router
from proxy.core.types import Ask, Outcome, Reason
from tests.proxy.core.making import (
    GENERAL,
    LONG,
    SHORT,
    ask,
    chat,
    placed,
    router_of,
    sized,
    spec,
    waits,
    worker_of,
)

LIMITS = 8192, 65_536


def short_and_long(**settings: object):  # noqa: ANN201
    """Make the usual pair."""
    return router_of(spec("s", SHORT, 8192), spec("l", LONG, 65_536), **settings)


def where(lease: Lease) -> tuple[str, Reason]:
    """Say where it went and why."""
    return lease.worker.name, lease.decision.reason


def test_idle_workers_are_given_what_they_are_there_for() -> None:
    router = short_and_long()
    assert where(placed(router.submit(ask(), 0.0))) == ("s", Reason.SHORT_POOL)
    long = ask(20_000, long=True)
    assert where(placed(router.submit(long, 0.0))) == ("l", Reason.LONG_POOL)
    idle = short_and_long()
    fits = ask(4000, 9000, long=True)
    fits.output_tokens = 2000
    assert where(placed(idle.submit(fits, 0.0))) == ("l", Reason.LONG_POOL)


def test_shorts_spill_where_no_long_is_about() -> None:
    router = short_and_long()
    leases = [placed(router.submit(ask(1000), 0.0)) for _ in range(10)]
    names = [lease.worker.name for lease in leases]
    assert (names.count("s"), names.count("l")) == (5, 5)
    assert {lease.decision.reason for lease in leases} == {
        Reason.SHORT_POOL,
        Reason.SPILL_TO_LONG,
    }


def test_shorts_are_not_put_behind_a_long() -> None:
    router = short_and_long()
    placed(router.submit(ask(30_000, long=True), 0.0))
    names = {placed(router.submit(ask(300), 0.1)).worker.name for _ in range(20)}
    assert names == {"s"}


def test_longs_share_their_pool_by_what_is_charged() -> None:
    router = router_of(spec("l0", LONG), spec("l1", LONG), spec("s", SHORT, 8192))
    names = [placed(router.submit(ask(30_000, long=True), 0.0)).worker.name for _ in range(4)]
    assert sorted(names) == ["l0", "l0", "l1", "l1"]


def test_a_long_goes_to_an_idle_short_worker_but_not_to_a_busy_one() -> None:
    def second_long(shorts: int) -> str:
        router = router_of(spec("s", SHORT, 65_536), spec("l", LONG, 65_536))
        for i in range(shorts):
            now = i / 5
            lease = placed(router.submit(ask(200, 10), now))
            router.first_token(lease, now + 0.03)
            router.finish(lease, now + 0.1, Outcome.DONE)
        now = 1 + shorts / 5
        placed(router.submit(ask(40_000, long=True), now))
        lease = placed(router.submit(ask(40_000, long=True), now))
        if lease.worker.name == "s":
            assert lease.decision.reason is Reason.SPILL_TO_SHORT
        return lease.worker.name

    assert second_long(shorts=0) == "s"
    assert second_long(shorts=300) == "l"


def test_longs_that_wait_keep_the_long_workers_from_shorts() -> None:
    router = router_of(spec("s", SHORT, 8192, most=2), spec("l", LONG, 65_536, most=2))
    held = [placed(router.submit(ask(20_000, long=True), 0.0)) for _ in range(2)]
    waiting = waits(router.submit(ask(20_000, long=True), 0.0))
    for _ in range(2):
        assert placed(router.submit(ask(), 0.1)).worker.name == "s"
    late = waits(router.submit(ask(), 0.2))
    router.finish(held[0], 1.0, Outcome.DONE)
    assert [ticket for ticket, _ in router.due(1.0)] == [waiting]
    router.finish(held[1], 2.0, Outcome.DONE)
    assert router.due(2.0) == []  # the last place is a reserve: a long came lately
    assert [ticket for ticket, _ in router.due(29.0)] == []
    assert late.left is False


def test_nothing_is_reserved_where_nobody_else_is_there_for_shorts() -> None:
    router = router_of(spec("l", LONG, 65_536, most=1))
    lease = placed(router.submit(ask(20_000, long=True), 0.0))
    short = waits(router.submit(ask(), 0.1))
    long = waits(router.submit(ask(20_000, long=True), 0.2))
    router.finish(lease, 1.0, Outcome.DONE)
    [(first, end)] = router.due(1.0)
    assert first is short
    router.finish(placed(end), 2.0, Outcome.DONE)
    assert [ticket for ticket, _ in router.due(2.0)] == [long]


def test_a_reserve_is_kept_only_while_longs_are_about() -> None:
    router = router_of(spec("l", LONG, 65_536, most=4), spec("s", SHORT, 8192, most=1))
    placed(router.submit(ask(10, 1), 0.0))
    leases = [placed(router.submit(ask(10, 1), 0.0)) for _ in range(4)]
    for lease in leases:
        router.finish(lease, 1.0, Outcome.DONE)
    router.finish(placed(router.submit(ask(20_000, long=True), 1.0)), 2.0, Outcome.DONE)
    for _ in range(3):
        placed(router.submit(ask(10, 1), 2.0))
    waits(router.submit(ask(10, 1), 2.0))
    assert len(router.due(29.0)) == 0
    placed(router.submit(ask(20_000, long=True), 29.5))


def with_a_reserve(most: int | None, kv_usage: float) -> Router:
    """Make a pair whose long worker has left only what it keeps for longs, as one came lately."""
    router = router_of(spec("s", SHORT, 8192, most), spec("l", LONG, 65_536, most))
    router.finish(placed(router.submit(ask(20_000, long=True), 0.0)), 1.0, Outcome.DONE)
    router.fleet.set_gauges("l", Gauges(at=1.0, kv_usage=kv_usage))
    for _ in range((most or 1) - 1):
        assert placed(router.submit(ask(20_000, long=True), 1.0)).worker.name == "l"
    return router


RESERVES = pytest.mark.parametrize(
    ("most", "kv_usage"), [(None, 0.8), (4, 0.0)], ids=["kv", "most"]
)


@RESERVES
def test_the_reserve_is_open_to_a_short_whose_own_worker_failed_it(
    most: int | None, kv_usage: float
) -> None:
    router = with_a_reserve(most, kv_usage)
    lease = placed(router.submit(ask(10, 1), 1.5))
    assert lease.worker.name == "s"
    tried = frozenset({lease.worker})
    again = router.retry(lease, 1.6, Outcome.FAILED, tried=tried, after=lease)
    assert where(placed(again)) == ("l", Reason.RETRY)


@RESERVES
def test_the_reserve_is_open_to_shorts_while_their_own_worker_rests(
    most: int | None, kv_usage: float
) -> None:
    router = with_a_reserve(most, kv_usage)
    router.fleet.failed(worker_of(router, "s"), 1.5, 60.0)
    assert where(placed(router.submit(ask(10, 1), 1.6))) == ("l", Reason.ONLY_CHOICE)


@RESERVES
def test_the_reserve_is_none_of_shorts_while_their_own_worker_is_merely_busy(
    most: int | None, kv_usage: float
) -> None:
    router = with_a_reserve(most, kv_usage)
    router.fleet.failed(worker_of(router, "s"), 1.5, 1.0, busy=True)
    waits(router.submit(ask(10, 1), 1.6))
    router.fleet.succeeded(worker_of(router, "s"))
    [(_, end)] = router.due(2.6)
    assert placed(end).worker.name == "s"


def test_the_reserve_is_open_to_a_short_that_its_own_workers_do_not_hold() -> None:
    """One that is full is worth the wait; one that is too small is not."""
    router = router_of(
        spec("s", SHORT, 8192, 1), spec("l", LONG, 65_536, 1), spec("t", SHORT, 512, 1)
    )
    router.finish(placed(router.submit(ask(20_000, long=True), 0.0)), 1.0, Outcome.DONE)
    placed(router.submit(ask(1000, 1), 1.5))
    waits(router.submit(ask(1000, 1), 1.6))
    router.fleet.drain("s")
    [(_, end)] = router.due(1.7)
    assert placed(end).worker.name == "l"


def test_a_cached_prefix_decides_and_says_so() -> None:
    router = router_of(spec("a"), spec("b"))
    body = chat("x" * 20_000, max_tokens=10)
    first = placed(router.submit(sized(router, body), 0.0))
    router.finish(first, 1.0, Outcome.DONE)
    again = placed(router.submit(sized(router, body), 1.0))
    assert again.worker is first.worker
    assert again.decision.reason is Reason.PREFIX
    assert again.decision.cached_tokens > 0.8 * again.ask.prompt_tokens
    assert again.prefill_tokens < 0.3 * again.ask.prompt_tokens


def test_what_everybody_has_cached_decides_nothing() -> None:
    router = router_of(spec("a"), spec("b"))
    one = sized(router, chat("x" * 20_000, max_tokens=10))
    for index in (0, 1):
        router.prefixes.record(one.prefix, index)
    assert where(placed(router.submit(one, 0.0)))[1] is Reason.GENERAL_POOL


def test_a_cached_prefix_is_worth_no_more_than_its_prefill() -> None:
    router = router_of(spec("a"), spec("b"))
    one = sized(router, chat("x" * 4 * BLOCKS[0], max_tokens=10))
    router.prefixes.record(one.prefix, 0)
    placed_on_a = [
        router.fleet.charge(ask(5000), Decision(worker_of(router, "a"), Reason.PREFIX), 0.0)
        for _ in range(3)
    ]
    assert len(placed_on_a) == 3
    assert placed(router.submit(one, 0.0)).worker.name == "b"


def test_those_who_decode_are_spared() -> None:
    router = router_of(spec("a"), spec("b"))
    for _ in range(10):
        lease = router.fleet.charge(ask(), Decision(worker_of(router, "a"), Reason.PREFIX), 0.0)
        router.first_token(lease, 0.1)
    assert placed(router.submit(ask(5000), 1.0)).worker.name == "b"


def test_strangers_count_as_load() -> None:
    router = router_of(spec("a"), spec("b"))
    for second in (1.0, 2.0):
        router.fleet.set_gauges("a", Gauges(at=second, running=20))
        router.fleet.set_gauges("b", Gauges(at=second))
    names = [placed(router.submit(ask(), 2.0)).worker.name for _ in range(5)]
    assert names == ["b"] * 5


def test_what_strangers_have_to_prefill_counts_as_load() -> None:
    router = router_of(spec("a"), spec("b"))
    for second in (1.0, 2.0):
        for name, tokens in (("a", 50_000.0), ("b", 0.0)):
            told = Gauges(at=second, running=1, extra={"backlog": tokens})
            router.fleet.set_gauges(name, told)
    names = [placed(router.submit(ask(), 2.0)).worker.name for _ in range(5)]
    assert names == ["b"] * 5
    decision = router.submit(ask(), 2.0, explain=True).decision
    waits = {score.worker: score.wait_s for score in decision.scores}
    token_s = worker_of(router, "a").pace.token_s
    assert waits["a"] == pytest.approx(50_000 * token_s)


def test_a_full_kv_cache_is_a_wait() -> None:
    router = router_of(spec("a"), spec("b"))
    a = worker_of(router, "a")
    for name in "ab":
        router.fleet.set_gauges(name, Gauges(at=1.0, kv_capacity_tokens=10_000))
    lease = router.fleet.charge(ask(9000, 900), Decision(a, Reason.PREFIX), 1.0)
    router.first_token(lease, 1.1)
    for _ in range(3):  # more decode on b, but there is room
        other = router.fleet.charge(ask(10), Decision(worker_of(router, "b"), Reason.PREFIX), 1.0)
        router.first_token(other, 1.1)
    assert placed(router.submit(ask(2000), 2.0)).worker.name == "b"


def test_of_equals_the_fewest_requests_then_whose_turn_it_is() -> None:
    router = router_of(*(spec(name) for name in "abc"))
    names = []
    for i in range(6):
        lease = placed(router.submit(ask(), float(i)))
        router.finish(lease, i + 0.5, Outcome.DONE)
        names.append(lease.worker.name)
    assert names == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("one", [ask(), ask(20_000, long=True)])
def test_a_single_worker_is_the_only_choice(one: Ask) -> None:
    router = router_of(spec("g", GENERAL, 65_536))
    assert where(placed(router.submit(one, 0.0))) == ("g", Reason.ONLY_CHOICE)


def test_a_short_with_only_a_long_worker_left() -> None:
    router = short_and_long()
    for _ in range(3):
        router.fleet.probe_failed("s", 0.0)
    assert where(placed(router.submit(ask(), 0.0))) == ("l", Reason.ONLY_CHOICE)


def test_the_parts_of_a_score_make_its_whole() -> None:
    router = short_and_long()
    one = sized(router, chat("x" * 9000, max_tokens=100))
    placed(router.submit(one, 0.0))
    for _ in range(3):
        router.first_token(placed(router.submit(ask(900), 0.0)), 0.1)
    for score in placed(router.submit(one, 0.2, explain=True)).decision.scores:
        fixed = worker_of(router, score.worker).pace.fixed_s
        parts = fixed + score.wait_s + score.prefill_s + score.harm_s
        assert score.total == pytest.approx(parts)
        assert score.harm_s >= -1e-12


def test_a_large_fleet_is_shared_evenly_too() -> None:
    count = SMALL * 3
    router = router_of(*(spec(f"w{i}") for i in range(count)))
    for i in range(count * 4):
        placed(router.submit(ask(500), i / 1000))
    loads = [worker.requests for worker in router.fleet]
    assert max(loads) - min(loads) <= 1


def test_the_holder_of_a_prefix_is_found_in_a_large_fleet() -> None:
    router = router_of(*(spec(f"w{i}") for i in range(SMALL * 3)))
    one = sized(router, chat("x" * 40_000, max_tokens=10))
    holder = worker_of(router, f"w{SMALL * 3 - 1}")
    router.prefixes.record(one.prefix, holder.index)
    router.fleet.charge(ask(10), Decision(holder, Reason.PREFIX), 0.0)
    assert where(placed(router.submit(one, 0.0))) == (holder.name, Reason.PREFIX)

"""The workers of a fleet and their state."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from proxy.core.fleet import model_lists
from proxy.core.fleet.breaker import FAILURES_TO_OPEN, Breaker
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Decision, HandoverDecision, Lease
from proxy.core.fleet.model_lists import MAX_MODEL_LIST_WAIT_S
from proxy.core.fleet.monitoring import IDLE_BEFORE_RETRY_S
from proxy.core.fleet.remote_load import own_load
from proxy.core.fleet.slots import MAX_PAGE_AGE_S
from proxy.core.fleet.worker import MAX_IDLE_PAGE_S
from proxy.core.learned.latency import PrefillWork
from proxy.core.learned.prefix_index import BLOCKS
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges
from proxy.core.model.types import Outcome, Reason
from tests.present import present
from tests.proxy.core.making import (
    MODEL,
    BreakerRecorder,
    fleet_of,
    idle,
    make_info,
    members,
    placed,
    router_of,
    spec,
    take_down,
    worker_of,
)


def test_worker_goes_down_and_up_after_several_probes() -> None:
    fleet = fleet_of(spec("a"))
    worker = members(fleet)[0]
    assert [fleet.health.probe_failed("a") for _ in range(4)] == [False, False, True, False]
    assert not worker.up
    assert [fleet.health.probe_ok("a", 0.0) for _ in range(3)] == [False, True, False]
    assert worker.up


def test_events_of_unknown_workers_are_ignored() -> None:
    fleet = Fleet()
    assert not fleet.health.probe_ok("gone", 0.0)
    assert not fleet.health.probe_failed("gone")
    assert not fleet.roster.drain("gone")
    assert fleet.roster.remove("gone") is None
    fleet.roster.set_served("gone", ["m"])
    fleet.health.set_gauges("gone", Gauges())


def test_worker_names_are_unique() -> None:
    fleet = fleet_of(spec("a"))
    with pytest.raises(ValueError, match="'a' is in the fleet already"):
        fleet.roster.add(spec("a"))


def test_models_listed_by_a_worker_replace_the_fleet_files() -> None:
    fleet = fleet_of(spec("a"))
    fleet.roster.set_served("a", ["other", "adapter"], 4096)
    assert members(fleet)[0].max_model_len == 4096
    for model in ("adapter", "other"):
        assert fleet.roster.workers_of(model) == members(fleet)
    assert fleet.roster.workers_of(MODEL) == []
    assert fleet.roster.serves(MODEL)  # the fleet file lists it: 503, not 404
    fleet.roster.set_served("a", [])
    assert fleet.roster.workers_of(MODEL) == [members(fleet)[0]]


class UnlistedFleet:
    """A fleet whose workers have not listed their models yet, and its clock."""

    def __init__(self, *names: str) -> None:
        self.now = 1000.0
        self.fleet = Fleet(clock=lambda: self.now)
        for name in names:
            self.fleet.roster.add(spec(name))

    def all_listed_after(self, seconds: float, model: str = "") -> bool:
        """Advance the clock; return whether no worker can still list the model."""
        self.now += seconds
        return self.fleet.roster.all_listed(model)


def test_model_list_wait_is_ten_minutes_per_worker() -> None:
    setup = UnlistedFleet("a", "dead")
    setup.fleet.roster.set_served("a", [MODEL, "adapter"])
    setup.fleet.health.probe_ok("a", setup.now)
    setup.fleet.roster.set_served("a", [MODEL])
    assert not setup.all_listed_after(MAX_MODEL_LIST_WAIT_S - 1, "adapter")
    setup.fleet.health.probe_failed("dead")
    setup.fleet.roster.add(spec("late"))
    setup.fleet.roster.add(spec("p", Role.PREFILL))  # no request waits for it
    assert not setup.all_listed_after(1, "adapter")
    setup.fleet.roster.drain("late", starts=True)  # as a worker that is not ready yet
    setup.fleet.roster.set_served("a", [MODEL, "another"])
    setup.fleet.roster.replace([spec("a"), spec("dead"), spec("late"), spec("p", Role.PREFILL)])
    assert not setup.all_listed_after(MAX_MODEL_LIST_WAIT_S - 2, "adapter"), (
        "each worker has ten minutes"
    )
    assert setup.all_listed_after(1, "adapter")
    setup.fleet.roster.remove("dead")
    setup.fleet.roster.add(spec("dead"))
    assert not setup.all_listed_after(0, "adapter"), "a new worker of the same name"
    setup.fleet.roster.drain("dead")
    assert setup.all_listed_after(0, "adapter")
    setup.fleet.roster.drain("dead", draining=False)
    assert not setup.all_listed_after(0, "adapter")


def test_number_of_remembered_models_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_lists, "MAX_SERVED_MODELS", 3)
    setup = UnlistedFleet("a")
    setup.fleet.health.probe_ok("a", setup.now)
    for names in (["one", "two"], ["one", "three"], ["four"], [MODEL]):
        setup.fleet.roster.set_served("a", names)
    setup.all_listed_after(MAX_MODEL_LIST_WAIT_S)
    setup.fleet.roster.add(spec("b"))
    listed = {name: setup.all_listed_after(0, name) for name in ("one", "two", "three", "four")}
    assert listed == {"one": True, "two": True, "three": False, "four": False}


def test_empty_pool_is_waited_for_from_when_it_became_empty() -> None:
    setup = UnlistedFleet("a")
    setup.fleet.roster.set_served("a", [MODEL, "adapter"])
    setup.fleet.health.probe_ok("a", setup.now)
    setup.fleet.roster.expect([MODEL, "other"])
    assert not setup.all_listed_after(MAX_MODEL_LIST_WAIT_S - 1)
    setup.fleet.roster.expect([MODEL, "other"])  # a reload
    assert setup.all_listed_after(1)
    setup.fleet.roster.remove("a")  # a new worker may list the same adapters
    assert setup.all_listed_after(0)
    assert not setup.all_listed_after(MAX_MODEL_LIST_WAIT_S - 1, "adapter")
    setup.fleet.roster.add(spec("b"))
    setup.fleet.health.probe_ok("b", setup.now)
    assert setup.all_listed_after(0, "adapter")


def test_context_of_a_model_is_the_longest_of_live_workers() -> None:
    prefill, others = spec("p", Role.PREFILL), [spec(name) for name in "abc"]
    fleet = fleet_of(prefill, *others)
    for name, limit in (("a", 4096), ("b", None), ("c", 8192), ("p", 16384)):
        fleet.roster.set_served(name, [MODEL, "adapter"] if name == "a" else [MODEL], limit)
    assert fleet.roster.contexts() == {MODEL: 8192, "adapter": 4096}
    take_down(fleet, "c")
    assert fleet.roster.contexts() == {MODEL: 4096, "adapter": 4096}
    fleet.roster.drain("a")
    assert fleet.roster.contexts() == {MODEL: None}  # no worker has stated it
    fleet.roster.drain("a", draining=False)
    assert fleet.roster.contexts() == {MODEL: 4096, "adapter": 4096}
    fleet.roster.remove("a")
    assert fleet.roster.contexts() == {MODEL: None}
    fleet.roster.drain("b")
    assert fleet.roster.contexts() == {}


def test_stated_context_limit_overrides_the_workers() -> None:
    fleet = fleet_of(spec("a", limit=1000))
    fleet.roster.set_served("a", [MODEL], 4096)
    assert members(fleet)[0].max_model_len == 1000
    fleet.roster.set_served("a", [MODEL], 512)  # unless the worker has less
    assert members(fleet)[0].max_model_len == 512


def test_prefixes_of_removed_or_down_workers_are_forgotten() -> None:
    fleet = fleet_of(spec("a"), spec("b"))
    hashes = fleet.roster.prefixes.hashes(MODEL, b"x" * BLOCKS[0])
    for index in (0, 1):
        fleet.roster.prefixes.record(hashes, index)
    take_down(fleet, "a")
    for _ in range(2):
        fleet.health.probe_ok("a", 0.0)
    assert fleet.roster.prefixes.matches(hashes) == [(1, 0b10)]
    fleet.roster.remove("b")
    assert fleet.roster.prefixes.matches(hashes) == []


def test_replace_of_many_workers_is_one_version() -> None:
    fleet = fleet_of(*(spec(f"w{number}") for number in range(20)))
    before, indices = fleet.roster.version, {worker.index for worker in fleet.roster}
    moved = [replace(spec(f"w{number}"), url="http://elsewhere") for number in range(10)]
    fleet.roster.replace([*moved, *(spec(f"w{number}") for number in range(15, 30))])
    assert fleet.roster.version == before + 1
    assert fleet.roster.workers_of(MODEL) == members(fleet)
    assert len(fleet.roster) == len(fleet.roster.by_index) == 25
    assert all(fleet.roster.by_index[worker.index] is worker for worker in fleet.roster)
    assert {worker.index for worker in fleet.roster} == indices | set(range(20, 25))


def test_worker_works_while_its_token_totals_grow() -> None:
    fleet = fleet_of(spec("a"))
    worker = members(fleet)[0]
    fleet.health.set_gauges("a", Gauges(at=1.0, prompt_tokens_total=100.0))
    assert not worker.shows_progress(1.0)  # the work may be old
    fleet.health.set_gauges("a", Gauges(at=2.0, prompt_tokens_total=100.0))
    assert not worker.shows_progress(2.0)
    page = Gauges(at=3.0, prompt_tokens_total=100.0, generation_tokens_total=1.0)
    fleet.health.set_gauges("a", page)
    assert worker.shows_progress(3.0 + MAX_IDLE_PAGE_S)
    assert not worker.shows_progress(3.1 + MAX_IDLE_PAGE_S)
    fleet.health.set_gauges("a", replace(page, at=40.0, prompt_tokens_total=101.0))
    assert worker.shows_progress(40.0)
    fleet.health.set_gauges("a", Gauges(at=80.0, prompt_tokens_total=50.0))  # a restart
    assert not worker.shows_progress(80.0)
    worker.worked_at = 80.0
    worker.up = False
    assert not worker.shows_progress(80.0)


def backlog(at: float, running: int, tokens: float, longs: float = 0.0) -> Gauges:
    return Gauges(at=at, running=running, extra={"backlog": tokens, "backlog_long": longs})


def test_foreign_prefill_backlog_adds_to_the_wait() -> None:
    fleet = fleet_of(spec("a"))
    worker = members(fleet)[0]
    worker.pace.token_s, worker.pace.long_share = 0.001, 0.5
    lease = fleet.charge(make_info(2000), Decision(worker, Reason.ONLY_CHOICE), 0.0)
    own = worker.wait_s(0.0, for_long=True)
    fleet.health.set_gauges("a", backlog(1.0, 2, 10_000, 5_000))
    assert worker.foreign_tokens == 0  # one page may be late
    fleet.health.set_gauges("a", backlog(2.0, 2, 12_000, 6_000))
    assert worker.foreign_tokens == 8000
    assert worker.wait_s(0.0, for_long=True) == pytest.approx(own + 8.0)
    assert worker.wait_s(0.0, for_long=False) == pytest.approx(own + 6.0)  # half of the longs
    first_s = worker.pace.first_token_s(100)
    assert worker.ttft_s(make_info(100), 0.0, 0) == pytest.approx(own + 6.0 + first_s)
    fleet.release(lease)
    later = fleet.charge(make_info(100), Decision(worker, Reason.ONLY_CHOICE), 2.0)
    assert (later.ahead_tokens, later.ahead_long_tokens) == pytest.approx((4000, 4000))
    fleet.release(later)
    fleet.health.set_gauges("a", backlog(3.0, 0, 0.0))
    assert worker.wait_s(0.0, for_long=True) == 0


def test_page_of_a_worker_that_is_down_is_dropped() -> None:
    """Its last page would show the cache of a dead process as full."""
    fleet = fleet_of(spec("a"))
    worker = members(fleet)[0]
    for second in (1.0, 2.0):
        fleet.health.set_gauges("a", Gauges(second, 6, 2, 0.95, 8000))
    fleet.health.probe_failed("a")
    assert worker.gauges is not None  # one late probe
    take_down(fleet, "a")
    assert worker.gauges is None
    assert (worker.foreign_requests, worker.queued, worker.kv_capacity) == (0, 0, 8000)


def test_page_of_a_single_good_probe_is_dropped() -> None:
    """A worker that is down needs several; the next may fail."""
    fleet = fleet_of(spec("a"))
    worker = members(fleet)[0]
    take_down(fleet, "a")
    fleet.health.set_gauges("a", Gauges(9.0, 6, 2, 0.95, 8000))
    assert not fleet.health.probe_ok("a", 9.0)
    assert not fleet.health.probe_failed("a")
    assert (worker.up, worker.gauges) == (False, None)


def test_page_values_expire_without_new_pages() -> None:
    fleet = fleet_of(spec("a"))
    worker = members(fleet)[0]
    prices = worker.prompt_price, worker.output_price
    fleet.charge(make_info(samples=2), Decision(worker, Reason.ONLY_CHOICE), 0.0)
    own = worker.wait_s(0.0, for_long=True)
    for second in (1.0, 2.0):
        fleet.health.set_gauges(
            "a", Gauges(second, 6, 2, 0.9, 8000, extra={"backlog": 9000.0, "backlog_long": 3000.0})
        )
    fleet.health.drop_old_gauges("a", 2.0 + MAX_PAGE_AGE_S)  # a page may still come
    assert (worker.foreign_requests, worker.queued, worker.learned_slots) == (6, 2, 6)
    assert worker.wait_s(0.0, for_long=True) > own
    fleet.health.drop_old_gauges("a", 2.1 + MAX_PAGE_AGE_S)
    assert worker.gauges is None
    assert (worker.foreign_requests, worker.queued, worker.learned_slots) == (0, 0, math.inf)
    assert worker.wait_s(0.0, for_long=True) == own
    assert (worker.prompt_price, worker.output_price) == prices
    assert worker.kv_capacity == 8000
    fleet.health.set_gauges("a", Gauges(40.0, running=8))
    assert worker.foreign_requests == 0  # it takes two pages again


def test_slow_idle_worker_drifts_to_the_pace_of_its_peers() -> None:
    fleet = fleet_of(spec("a"), spec("b"))
    a, b = members(fleet)
    for worker, seconds in ((a, 10.0), (b, 0.1)):
        for i in range(20):
            worker.pace.learn_first_token(PrefillWork(1000), seconds, now=i / 20)
    slow = a.pace.token_s
    for second in range(120):
        fleet.health.set_gauges("a", Gauges(at=IDLE_BEFORE_RETRY_S + 1 + second))
    assert a.pace.token_s < 1.1 * b.pace.token_s < slow


def test_new_worker_starts_with_the_pace_of_its_peers() -> None:
    fleet = fleet_of(spec("a"))
    for i in range(20):
        members(fleet)[0].pace.learn_first_token(PrefillWork(1000), 10.0, now=i / 20)
    fleet.roster.add(spec("b"))
    fleet.health.probe_ok("b", 2.0)
    assert members(fleet)[1].pace.token_s == pytest.approx(members(fleet)[0].pace.token_s)


def held(fleet: Fleet, name: str, count: int) -> list[Lease]:
    worker = present(fleet.roster.get(name))
    decision = Decision(worker, Reason.ONLY_CHOICE)
    return [fleet.charge(make_info(), decision, 0.0) for _ in range(count)]


def test_worker_added_again_keeps_running_requests() -> None:
    fleet = fleet_of(spec("a", most=2))
    [lease] = held(fleet, "a", 1)
    fleet.roster.remove("a")
    assert fleet.roster.add(spec("a")).requests == 1
    fleet.release(lease)
    assert members(fleet)[0].requests == 0
    fleet.roster.remove("a")
    assert fleet.roster.add(spec("a")).requests == 0
    assert not fleet.roster.leaving
    assert not fleet.roster._left_by_url


def test_renamed_worker_inherits_charges() -> None:
    """Otherwise `adaptive` would take it for idle."""
    router = router_of(spec("a"), spec("x"))
    fleet = router.fleet
    before = worker_of(router, "a")
    lease = fleet.charge(make_info(4000, 300, samples=2), Decision(before, Reason.ONLY_CHOICE), 0.0)
    fleet.charge(make_info(2000), Decision(worker_of(router, "x"), Reason.ONLY_CHOICE), 0.0)
    for name in "bc":
        fleet.roster.replace([replace(spec("a"), name=name), spec("x")])
        fleet.health.probe_ok(name, 0.0)
    successor, other = worker_of(router, "c"), worker_of(router, "x")
    assert own_load(successor) == own_load(before)
    assert successor.wait_s(0.1, for_long=False) == before.wait_s(0.1, for_long=False) > 0.2
    assert placed(router.submit(make_info(2000), 0.1)).worker is other  # with half the work
    fleet.record_first_token(lease, 0.4)
    assert successor.wait_s(0.4, for_long=False) == 0.0
    assert successor.num_decoding == 2
    assert successor.prompt_price == pytest.approx(before.prompt_price)
    fleet.record_tokens(lease, 100)
    assert successor.decode_tokens == before.decode_tokens == 500
    fleet.release(lease)
    assert idle([successor, before])
    assert successor.free_at <= 0.4
    assert not fleet.roster.leaving


def test_renamed_worker_inherits_first_tokens() -> None:
    """Otherwise it would seem to hang until its own first token."""
    router = router_of(spec("a"))
    before = worker_of(router, "a")
    first, second = (placed(router.submit(make_info(5000), 0.0)) for _ in range(2))
    router.fleet.roster.replace([replace(spec("a"), name="b")])
    successor = worker_of(router, "b")
    overdue = before.due_at + 5.0
    assert successor.wait_s(overdue, for_long=False) > 5.0
    router.leases.record_first_token(first, overdue)
    assert successor.wait_s(overdue, for_long=False) == pytest.approx(before.pace.token_s * 5000)
    router.leases.finish(second, overdue, Outcome.DONE)
    assert successor.wait_s(overdue, for_long=False) == 0.0


def test_renamed_worker_keeps_pinned_blocks_until_fetched() -> None:
    fleet = fleet_of(spec("p", Role.PREFILL), spec("d", Role.DECODE))
    prefill, decode = members(fleet)
    made = Decision(decode, Reason.HANDOVER, handover=HandoverDecision(prefill, 0, 100, 0.1, 0.1))
    lease = fleet.charge(make_info(), made, 0.0)
    fleet.hand_over(lease, 0.1)
    fleet.roster.replace([replace(spec("p", Role.PREFILL), name="q"), spec("d", Role.DECODE)])
    successor = present(fleet.roster.get("q"))
    assert (successor.requests, successor.unfetched_handovers) == (0, 1)
    fleet.record_first_token(lease, 0.2)
    assert successor.unfetched_handovers == 0
    assert not fleet.roster.leaving
    fleet.release(lease)


def test_begin_and_end_of_a_rest_are_reported_once() -> None:
    fleet = fleet_of(spec("a"), spec("b"))
    a, _ = fleet.roster
    recorder = BreakerRecorder(fleet)
    for at in range(10):
        fleet.health.record_failure(a, float(at), why="reset")  # failed trials included
        a.breaker.record_sent(at + 0.5)
    assert recorder.events == [("rests", "a", f"reset at {FAILURES_TO_OPEN - 1}")]
    fleet.health.record_success(a)
    fleet.health.record_success(a)
    assert recorder.events[1:] == [("is back", "a")]
    fleet.health.record_failure(a, 20.0, 60.0, busy=True, why="429")
    assert recorder.events[2:] == [("rests", "a", "429 at 20")]


def test_remote_breaker_changes_are_reported() -> None:
    fleet = fleet_of(spec("a"))
    [a] = fleet.roster
    recorder = BreakerRecorder(fleet)
    other = Breaker()
    other.record_failure(1.0, busy=True, why="503")
    for _ in range(2):
        fleet.health.take_breaker(a, other.snapshot())
    other.record_success()
    fleet.health.take_breaker(a, other.snapshot())
    assert recorder.events == [("rests", "a", "503 at 0"), ("is back", "a")]


def test_removed_worker_reports_no_breaker_events() -> None:
    fleet = fleet_of(spec("a"), spec("b"))
    a, b = fleet.roster
    fleet.health.record_failure(b, 0.0, busy=True)
    recorder = BreakerRecorder(fleet)
    for worker in (a, b):
        fleet.roster.remove(worker.name)
        fleet.health.record_failure(worker, 1.0, busy=True)
        fleet.health.record_success(worker)
    assert recorder.events == []

"""Breakers that are ignored where too few workers of a pool are left."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from proxy.core.breaker import FAILURES, FIRST_REST_S, LONGEST_REST_S
from proxy.core.decisions import Decision, Lease
from proxy.core.ejection import Key
from proxy.core.router import Router
from proxy.core.settings import RouterSettings
from proxy.core.types import Outcome, Reason, Refusal, Role, Ticket, Usage
from proxy.core.worker import Worker
from tests.proxy.core.making import ask, placed, refused, router_of, spec, worker_of

RUNS_S, BREAKS_AFTER_S = 0.1, 0.05
GOOD_RATE = 10.0  # requests a second of the healthy tenant


class World:
    """A tenant with good requests, and one with twice as many on which each worker fails."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.now = 0.0
        self.ends: Counter[str] = Counter()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.tickets: dict[Ticket, bool] = {}
        self.numbers = count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self.events, (when, next(self.numbers), what))

    def play(self, seconds: float) -> None:
        """Send for so long, and let all requests end."""
        for number in range(int(seconds * GOOD_RATE)):
            at = number / GOOD_RATE
            self.at(at, lambda: self.submit(bad=False))
            for late in (0.25, 0.75):
                self.at(at + late / GOOD_RATE, lambda: self.submit(bad=True))
        while self.events:
            self.now, _, what = heapq.heappop(self.events)
            what()
            for ticket, answer in self.router.due(self.now):
                self.goes_on(answer, bad=self.tickets.pop(ticket))

    def submit(self, *, bad: bool) -> None:
        """Send a request."""
        self.goes_on(self.router.submit(ask(), self.now), bad=bad)

    def goes_on(self, answer: Lease | Ticket | Refusal, *, bad: bool) -> None:
        """Have a request run, wait or end."""
        if isinstance(answer, Ticket):
            self.tickets[answer] = bad
        elif isinstance(answer, Refusal):
            self.ends["bad" if bad else "refused"] += 1
        elif bad:
            self.at(self.now + BREAKS_AFTER_S, lambda: self.breaks(answer, frozenset()))
        else:
            self.at(self.now + RUNS_S, lambda: self.serves(answer))

    def serves(self, lease: Lease) -> None:
        """End a good request."""
        self.router.first_token(lease, self.now)
        self.router.finish(lease, self.now, Outcome.DONE, Usage(100, 50))
        self.ends["served"] += 1

    def breaks(self, lease: Lease, tried: frozenset[Worker]) -> None:
        """Have a worker fail on a bad request."""
        tried |= {lease.worker}
        answer = self.router.retry(lease, self.now, Outcome.FAILED, tried=tried, after=lease)
        if isinstance(answer, Lease):
            self.at(self.now + BREAKS_AFTER_S, lambda: self.breaks(answer, tried))
        else:
            self.goes_on(answer, bad=True)


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 40])
def test_requests_that_break_workers_leave_those_of_another_tenant_served(workers: int) -> None:
    """At twice the rate."""
    world = World(router_of(*(spec(f"w{i}") for i in range(workers)), queue_wait_s=5.0))
    world.play(30.0)
    assert world.ends["served"] >= 0.9 * 300


def test_without_the_threshold_they_are_not() -> None:
    workers = (spec(f"w{i}") for i in range(8))
    world = World(router_of(*workers, queue_wait_s=5.0, panic_threshold=0.0))
    world.play(30.0)
    assert world.ends["served"] < 0.5 * 300


def fails(router: Router, name: str, now: float = 0.0, times: int = FAILURES) -> None:
    """Have requests fail on a worker until its breaker opens."""
    for _ in range(times):
        router.fleet.failed(worker_of(router, name), now, why="reset")


def served_by(router: Router, now: float = 0.0, requests: int = 24) -> set[str]:
    """Place requests, and return the workers that have them."""
    leases = [placed(router.submit(ask(), now)) for _ in range(requests)]
    found = {lease.worker.name for lease in leases}
    for lease in leases:
        router.finish(lease, now, Outcome.CLIENT_GONE)
    return found


@pytest.mark.parametrize("policy", ["adaptive", "length", "least_loaded", "round_robin"])
@pytest.mark.parametrize("workers", [4, 40])
def test_breakers_keep_out_no_more_than_the_rest_of_the_share(policy: str, workers: int) -> None:
    names = [f"w{i}" for i in range(workers)]
    router = router_of(*map(spec, names), policy=policy)
    requests = 8 * workers
    for number, name in enumerate(names, 1):
        fails(router, name)
        left = set(names[number:])
        if workers > 4 and number not in (1, workers // 2, workers // 2 + 1, workers):
            continue
        if 2 * number <= workers:
            assert served_by(router, requests=requests) == left
            assert not router.fleet.ejections.panics
        else:
            assert served_by(router, requests=requests) == set(names)
            assert router.fleet.ejections.panics == {("m", False)}


@pytest.mark.parametrize(
    ("threshold", "open_ones"), [(0.0, None), (0.1, 10), (0.3, 8), (0.75, 3), (1.0, 1)]
)
def test_the_share_is_the_operators(threshold: float, open_ones: int | None) -> None:
    router = router_of(*(spec(f"w{i}") for i in range(10)), panic_threshold=threshold)
    found = None
    for number in range(10):
        fails(router, f"w{number}")
        if router.fleet.ejections.panics and found is None:
            found = number + 1
    assert found == open_ones


def test_another_share_holds_from_a_reload_on() -> None:
    router = router_of(spec("a"), spec("b"))
    specs = [worker.spec for worker in router.fleet]
    for name in "ab":
        fails(router, name)
    assert served_by(router) == {"a", "b"}
    router.reconfigure(RouterSettings(panic_threshold=0.0), specs)
    assert refused(router.submit(ask(), 0.0)).reason is Reason.NO_WORKER
    router.reconfigure(RouterSettings(), specs)
    assert served_by(router) == {"a", "b"}


def test_one_worker_alone_is_asked_though_its_breaker_is_open() -> None:
    router = router_of(spec("a"))
    fails(router, "a", times=50)
    assert served_by(router) == {"a"}


def test_one_worker_that_says_it_is_busy_is_left_alone() -> None:
    router = router_of(spec("a"), spec("b"), spec("c"))
    for name in "ab":
        router.fleet.failed(worker_of(router, name), 0.0, 60.0, busy=True, why="503")
    assert served_by(router) == {"c"}
    fails(router, "c")
    assert not router.fleet.ejections.panics, "two of three have not failed"
    router.fleet.succeeded(worker_of(router, "a"))
    for name in "ac":
        fails(router, name)
    assert served_by(router) == {"a", "c"}, "and b has asked to be left alone"


def test_workers_that_are_down_or_drain_stay_out_and_do_not_count() -> None:
    router = router_of(*(spec(name) for name in "abcdef"))
    fleet = router.fleet
    fails(router, "a")
    for _ in range(fleet.down_after):
        for name in "bcd":
            fleet.probe_failed(name, 0.0)
    assert served_by(router) == {"e", "f"}, "one of three that are up"
    fleet.drain("e")
    assert served_by(router) == {"f"}, "one of two"
    fails(router, "f")
    assert served_by(router) == {"a", "f"}
    fleet.drain("e", draining=False)
    assert served_by(router) == {"a", "e", "f"}, "one of three is well"
    for _ in range(fleet.up_after):
        fleet.probe_ok("b", 0.0)
    assert served_by(router) == {"b", "e"}, "two of four"
    fleet.remove("e")
    assert served_by(router) == {"a", "b", "f"}


def test_a_pool_is_a_models_workers_of_all_sizes() -> None:
    """While a long worker is well, it takes the shorts of a short one that fails."""
    router = router_of(spec("s", Role.SHORT), spec("l", Role.LONG), spec("o", model="other"))
    fails(router, "s")
    fails(router, "o")
    assert router.fleet.ejections.panics == {("other", False)}
    assert served_by(router) == {"l"}


def test_prefill_workers_are_a_pool_of_their_own() -> None:
    prefills = [spec(f"p{i}", Role.PREFILL) for i in range(3)]
    decodes = [spec(f"d{i}", Role.DECODE) for i in range(3)]
    router = router_of(*prefills, *decodes, transfer=True, disaggregate_above=0)

    def prefills_of() -> set[str]:
        leases = [placed(router.submit(ask(4000), 0.0)) for _ in range(12)]
        found = {lease.prefill.worker.name for lease in leases if lease.prefill}
        for lease in leases:
            router.finish(lease, 0.0, Outcome.CLIENT_GONE)
        return found

    fails(router, "p0")
    assert prefills_of() == {"p1", "p2"}
    fails(router, "p1")
    assert prefills_of() == {"p0", "p1", "p2"}
    assert router.fleet.ejections.panics == {("m", True)}


def test_a_success_in_panic_closes_a_breaker_and_enough_of_them_end_it() -> None:
    router = router_of(*(spec(f"w{i}") for i in range(4)))
    for number in range(3):
        fails(router, f"w{number}")
    assert router.fleet.ejections.panics
    now = 0.1  # before any trial would be due
    leases = [placed(router.submit(ask(), now)) for _ in range(8)]
    well = next(lease for lease in leases if lease.worker.name == "w0")
    assert well.trial
    router.first_token(well, now)
    assert worker_of(router, "w0").breaker.closed
    assert not router.fleet.ejections.panics
    assert served_by(router, now) == {"w0", "w3"}
    assert not any(worker.in_panic for worker in router.fleet)


def test_failures_in_panic_make_no_rest_longer_until_it_is_over() -> None:
    """Many fail at once; each rest that ends counts one trial."""
    router = router_of(spec("a"))
    breaker = worker_of(router, "a").breaker
    fails(router, "a")
    for _ in range(100):
        lease = placed(router.submit(ask(), 0.1))
        router.finish(lease, 0.1, Outcome.FAILED)
    assert breaker.until == FIRST_REST_S
    now = 0.1
    for _ in range(5000):
        now += 0.05
        router.finish(placed(router.submit(ask(), now)), now, Outcome.FAILED)
    assert breaker.until <= now + LONGEST_REST_S
    assert breaker.opened["failed"] == 1


def test_a_worker_that_is_taken_out_while_its_breaker_is_open_is_forgotten() -> None:
    router = router_of(spec("a"), spec("b"), spec("c"))
    fails(router, "a")
    router.fleet.replace([worker.spec for worker in router.fleet if worker.name != "a"])
    ejections = router.fleet.ejections
    assert not ejections.resting
    assert not any(ejections._out.values())


class Heard:
    """Notes which pools panic."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Key, int, int]] = []

    def rests(self, worker: Worker, now: float) -> None:
        """Of no matter here."""

    def is_back(self, worker: Worker) -> None:
        """Of no matter here."""

    def has_left(self, worker: Worker) -> None:
        """Of no matter here."""

    def panics(self, key: Key, live: int, out: int, now: float) -> None:  # noqa: ARG002
        """Note it."""
        self.said.append(("panics", key, live, out))

    def heeds(self, key: Key, live: int, out: int) -> None:
        """Note it."""
        self.said.append(("heeds", key, live, out))


def test_a_panic_is_told_once_and_so_is_its_end() -> None:
    router = router_of(spec("a"), spec("b"), spec("c"))
    router.fleet.witness = heard = Heard()
    for name in "abc":
        fails(router, name)
    assert heard.said == [("panics", ("m", False), 3, 2)]
    router.fleet.succeeded(worker_of(router, "a"))
    assert len(heard.said) == 1
    router.fleet.succeeded(worker_of(router, "b"))
    assert heard.said[1:] == [("heeds", ("m", False), 3, 1)]
    assert router.fleet.ejections.started == {("m", False): 1}


def test_explain_says_that_a_breaker_is_ignored() -> None:
    router = router_of(spec("a"), spec("b"), spec("c"))
    for name in "ab":
        fails(router, name)
    found = router.explain(ask(), 0.0)
    assert isinstance(found, Decision)
    notes = {score.worker: score.note for score in found.scores}
    assert "panic_threshold" in notes["a"]
    assert "panic_threshold" in notes["b"]
    assert "panic_threshold" not in notes["c"]
    router.fleet.succeeded(worker_of(router, "a"))
    found = router.explain(ask(), 0.0)
    assert isinstance(found, Decision)
    assert {score.worker: score.note for score in found.scores}["b"] == "failed lately"


def test_a_worker_that_becomes_anothers_pool_counts_there() -> None:
    router = router_of(spec("a", Role.PREFILL), spec("b"), spec("c"))
    fails(router, "a")
    assert router.fleet.ejections.panics == {("m", True)}
    specs = [worker.spec for worker in router.fleet]
    router.fleet.replace([replace(specs[0], role=Role.GENERAL), *specs[1:]])
    assert not router.fleet.ejections.panics
    assert served_by(router) == {"b", "c"}

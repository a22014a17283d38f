"""Breakers that are ignored where too few workers of a pool are left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.core.fleet.breaker import FAILURES_TO_OPEN, MAX_OPEN_S, MIN_OPEN_S
from proxy.core.fleet.ejection import Key
from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.settings import RouterSettings
from proxy.core.model.types import Outcome, Reason
from proxy.core.router import Router
from tests.proxy.core.making import ask, placed, refused, router_of, spec, worker_of

RUNS_S, BREAKS_AFTER_S = 0.1, 0.05


def fails(router: Router, name: str, now: float = 0.0, times: int = FAILURES_TO_OPEN) -> None:
    """Have requests fail on a worker until its breaker opens."""
    for _ in range(times):
        router.fleet.health.failed(worker_of(router, name), now, why="reset")


def served_by(router: Router, now: float = 0.0, requests: int = 24) -> set[str]:
    """Place requests, and return the workers that have them."""
    leases = [placed(router.submit(ask(), now)) for _ in range(requests)]
    found = {lease.worker.name for lease in leases}
    for lease in leases:
        router.leases.finish(lease, now, Outcome.CLIENT_GONE)
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
            assert not router.fleet.roster.ejections.panics
        else:
            assert served_by(router, requests=requests) == set(names)
            assert router.fleet.roster.ejections.panics == {("m", False)}


def test_another_share_holds_from_a_reload_on() -> None:
    router = router_of(spec("a"), spec("b"))
    specs = [worker.spec for worker in router.fleet.roster]
    for name in "ab":
        fails(router, name)
    assert served_by(router) == {"a", "b"}
    router.reconfigure(RouterSettings(panic_threshold=0.0), specs)
    assert refused(router.submit(ask(), 0.0)).reason is Reason.NO_WORKER
    router.reconfigure(RouterSettings(), specs)
    assert served_by(router) == {"a", "b"}


def test_workers_that_are_down_or_drain_stay_out_and_do_not_count() -> None:
    router = router_of(*(spec(name) for name in "abcdef"))
    fleet = router.fleet
    fails(router, "a")
    for _ in range(fleet.health.down_after):
        for name in "bcd":
            fleet.health.probe_failed(name, 0.0)
    assert served_by(router) == {"e", "f"}, "one of three that are up"
    fleet.roster.drain("e")
    assert served_by(router) == {"f"}, "one of two"
    fails(router, "f")
    assert served_by(router) == {"a", "f"}
    fleet.roster.drain("e", draining=False)
    assert served_by(router) == {"a", "e", "f"}, "one of three is well"
    for _ in range(fleet.health.up_after):
        fleet.health.probe_ok("b", 0.0)
    assert served_by(router) == {"b", "e"}, "two of four"
    fleet.roster.remove("e")
    assert served_by(router) == {"a", "b", "f"}


def test_a_pool_is_a_models_workers_of_all_sizes() -> None:
    """While a long worker is well, it takes the shorts of a short one that fails."""
    router = router_of(spec("s", Role.SHORT), spec("l", Role.LONG), spec("o", model="other"))
    fails(router, "s")
    fails(router, "o")
    assert router.fleet.roster.ejections.panics == {("other", False)}
    assert served_by(router) == {"l"}


def test_a_success_in_panic_closes_a_breaker_and_enough_of_them_end_it() -> None:
    router = router_of(*(spec(f"w{i}") for i in range(4)))
    for number in range(3):
        fails(router, f"w{number}")
    assert router.fleet.roster.ejections.panics
    now = 0.1  # before any trial would be due
    leases = [placed(router.submit(ask(), now)) for _ in range(8)]
    well = next(lease for lease in leases if lease.worker.name == "w0")
    assert well.trial
    router.leases.first_token(well, now)
    assert worker_of(router, "w0").breaker.closed
    assert not router.fleet.roster.ejections.panics
    assert served_by(router, now) == {"w0", "w3"}
    assert not any(worker.in_panic for worker in router.fleet.roster)


def test_failures_in_panic_make_no_rest_longer_until_it_is_over() -> None:
    """Many fail at once; each rest that ends counts one trial."""
    router = router_of(spec("a"))
    breaker = worker_of(router, "a").breaker
    fails(router, "a")
    for _ in range(100):
        lease = placed(router.submit(ask(), 0.1))
        router.leases.finish(lease, 0.1, Outcome.FAILED)
    assert breaker.until == MIN_OPEN_S
    now = 0.1
    for _ in range(5000):
        now += 0.05
        router.leases.finish(placed(router.submit(ask(), now)), now, Outcome.FAILED)
    assert breaker.until <= now + MAX_OPEN_S
    assert breaker.opened["failed"] == 1


class Heard:
    """Notes which pools panic."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Key, int, int]] = []

    def breaker_opened(self, worker: Worker, now: float) -> None:
        """Of no matter here."""

    def breaker_closed(self, worker: Worker) -> None:
        """Of no matter here."""

    def worker_removed(self, worker: Worker) -> None:
        """Of no matter here."""

    def panic_started(self, key: Key, live: int, out: int, now: float) -> None:  # noqa: ARG002
        """Note it."""
        self.said.append(("panics", key, live, out))

    def panic_ended(self, key: Key, live: int, out: int) -> None:
        """Note it."""
        self.said.append(("heeds", key, live, out))


def test_a_panic_is_told_once_and_so_is_its_end() -> None:
    router = router_of(spec("a"), spec("b"), spec("c"))
    router.fleet.roster.ejections.listener = heard = Heard()
    for name in "abc":
        fails(router, name)
    assert heard.said == [("panics", ("m", False), 3, 2)]
    router.fleet.health.succeeded(worker_of(router, "a"))
    assert len(heard.said) == 1
    router.fleet.health.succeeded(worker_of(router, "b"))
    assert heard.said[1:] == [("heeds", ("m", False), 3, 1)]
    assert router.fleet.roster.ejections.started == {("m", False): 1}


def test_explain_says_that_a_breaker_is_ignored() -> None:
    router = router_of(spec("a"), spec("b"), spec("c"))
    for name in "ab":
        fails(router, name)
    found = router.placer.explain(ask(), 0.0)
    assert isinstance(found, Decision)
    notes = {score.worker: score.note for score in found.scores}
    assert "panic_threshold" in notes["a"]
    assert "panic_threshold" in notes["b"]
    assert "panic_threshold" not in notes["c"]
    router.fleet.health.succeeded(worker_of(router, "a"))
    found = router.placer.explain(ask(), 0.0)
    assert isinstance(found, Decision)
    assert {score.worker: score.note for score in found.scores}["b"] == "failed recently"


def test_a_worker_that_becomes_anothers_pool_counts_there() -> None:
    router = router_of(spec("a", Role.PREFILL), spec("b"), spec("c"))
    fails(router, "a")
    assert router.fleet.roster.ejections.panics == {("m", True)}
    specs = [worker.spec for worker in router.fleet.roster]
    router.fleet.roster.replace([replace(specs[0], role=Role.GENERAL), *specs[1:]])
    assert not router.fleet.roster.ejections.panics
    assert served_by(router) == {"b", "c"}

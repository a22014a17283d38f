"""Panic: breakers are ignored when too few workers of a pool are left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.core.fleet.breaker import FAILURES_TO_OPEN, MAX_OPEN_S, MIN_OPEN_S
from proxy.core.model.role import Role
from proxy.core.model.settings import RouterSettings
from proxy.core.model.types import Outcome, Reason
from proxy.core.router import Router
from proxy.core.routing.candidates import IN_PANIC
from tests.proxy.core.making import (
    BreakerRecorder,
    make_info,
    notes,
    placed,
    refused,
    router_of,
    spec,
    take_down,
    worker_of,
)


def open_breaker(
    router: Router, name: str, now: float = 0.0, times: int = FAILURES_TO_OPEN
) -> None:
    """Fail requests on a worker until its breaker opens."""
    for _ in range(times):
        router.fleet.health.record_failure(worker_of(router, name), now, why="reset")


def served_by(router: Router, now: float = 0.0, requests: int = 24) -> set[str]:
    """Return the names of the workers that requests are placed on."""
    leases = [placed(router.submit(make_info(), now)) for _ in range(requests)]
    found = {lease.worker.name for lease in leases}
    for lease in leases:
        router.leases.finish(lease, now, Outcome.CLIENT_GONE)
    return found


@pytest.mark.parametrize(
    ("policy", "workers"),
    [("adaptive", 4), ("adaptive", 40), ("length", 4), ("least_loaded", 4), ("round_robin", 4)],
)
def test_breakers_exclude_at_most_the_panic_share_of_a_pool(policy: str, workers: int) -> None:
    names = [f"w{i}" for i in range(workers)]
    router = router_of(*map(spec, names), policy=policy)
    requests = 8 * workers
    for number, name in enumerate(names, 1):
        open_breaker(router, name)
        left = set(names[number:])
        if workers > 4 and number not in (1, workers // 2, workers // 2 + 1, workers):
            continue
        if 2 * number <= workers:
            assert served_by(router, requests=requests) == left
            assert not router.fleet.roster.ejections.panics
        else:
            assert served_by(router, requests=requests) == set(names)
            assert router.fleet.roster.ejections.panics == {("m", False)}


def test_reload_changes_the_panic_threshold() -> None:
    router = router_of(spec("a"), spec("b"))
    specs = [worker.spec for worker in router.fleet.roster]
    for name in "ab":
        open_breaker(router, name)
    assert served_by(router) == {"a", "b"}
    router.reconfigure(RouterSettings(panic_threshold=0.0), specs)
    assert refused(router.submit(make_info(), 0.0)).reason is Reason.NO_WORKER
    router.reconfigure(RouterSettings(), specs)
    assert served_by(router) == {"a", "b"}


def test_down_and_draining_workers_do_not_count_for_panic() -> None:
    router = router_of(*(spec(name) for name in "abcdef"))
    fleet = router.fleet
    open_breaker(router, "a")
    take_down(fleet, *"bcd")
    assert served_by(router) == {"e", "f"}, "one of three live workers is out"
    fleet.roster.drain("e")
    assert served_by(router) == {"f"}, "one of two is out"
    open_breaker(router, "f")
    assert served_by(router) == {"a", "f"}
    fleet.roster.drain("e", draining=False)
    assert served_by(router) == {"a", "e", "f"}, "two of three are out"
    for _ in range(fleet.health.up_after):
        fleet.health.probe_ok("b", 0.0)
    assert served_by(router) == {"b", "e"}, "two of four are out"
    fleet.roster.remove("e")
    assert served_by(router) == {"a", "b", "f"}


def test_short_and_long_workers_of_a_model_share_a_pool() -> None:
    """A healthy long worker takes the shorts of a failing short worker."""
    router = router_of(spec("s", Role.SHORT), spec("l", Role.LONG), spec("o", model="other"))
    open_breaker(router, "s")
    open_breaker(router, "o")
    assert router.fleet.roster.ejections.panics == {("other", False)}
    assert served_by(router) == {"l"}


def test_success_in_panic_closes_a_breaker_and_ends_the_panic() -> None:
    router = router_of(*(spec(f"w{i}") for i in range(4)))
    for number in range(3):
        open_breaker(router, f"w{number}")
    assert router.fleet.roster.ejections.panics
    now = 0.1  # before any trial is due
    leases = [placed(router.submit(make_info(), now)) for _ in range(8)]
    trial = next(lease for lease in leases if lease.worker.name == "w0")
    assert trial.trial
    router.leases.record_first_token(trial, now)
    assert worker_of(router, "w0").breaker.closed
    assert not router.fleet.roster.ejections.panics
    assert served_by(router, now) == {"w0", "w3"}
    assert not any(worker.in_panic for worker in router.fleet.roster)


def test_failures_in_panic_do_not_lengthen_the_open_time() -> None:
    """Many requests fail at once; each open time that ends counts one trial."""
    router = router_of(spec("a"))
    breaker = worker_of(router, "a").breaker
    open_breaker(router, "a")
    for _ in range(100):
        lease = placed(router.submit(make_info(), 0.1))
        router.leases.finish(lease, 0.1, Outcome.FAILED)
    assert breaker.until == MIN_OPEN_S
    now = 0.1
    for _ in range(5000):
        now += 0.05
        router.leases.finish(placed(router.submit(make_info(), now)), now, Outcome.FAILED)
    assert breaker.until <= now + MAX_OPEN_S
    assert breaker.opened["failed"] == 1


def test_begin_and_end_of_a_panic_are_reported_once() -> None:
    router = router_of(spec("a"), spec("b"), spec("c"))
    recorder = BreakerRecorder(router.fleet)
    for name in "abc":
        open_breaker(router, name)

    def panics() -> list[object]:
        return [event for event in recorder.events if event[0] in ("panics", "heeds")]

    router.fleet.health.record_success(worker_of(router, "a"))
    assert panics() == [("panics", ("m", False), 3, 2)]
    router.fleet.health.record_success(worker_of(router, "b"))
    assert panics()[1:] == [("heeds", ("m", False), 3, 1)]
    assert router.fleet.roster.ejections.started == {("m", False): 1}


def test_explain_notes_an_ignored_breaker() -> None:
    router = router_of(spec("a"), spec("b"), spec("c"))
    for name in "ab":
        open_breaker(router, name)
    assert notes(router, make_info(), 0.0) == {"a": IN_PANIC, "b": IN_PANIC, "c": ""}
    router.fleet.health.record_success(worker_of(router, "a"))
    assert notes(router, make_info(), 0.0)["b"] == "failed recently"


def test_worker_with_a_new_role_counts_in_its_new_pool() -> None:
    router = router_of(spec("a", Role.PREFILL), spec("b"), spec("c"))
    open_breaker(router, "a")
    assert router.fleet.roster.ejections.panics == {("m", True)}
    specs = [worker.spec for worker in router.fleet.roster]
    router.fleet.roster.replace([replace(specs[0], role=Role.GENERAL), *specs[1:]])
    assert not router.fleet.roster.ejections.panics
    assert served_by(router) == {"b", "c"}

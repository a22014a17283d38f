"""Trials of workers whose breaker is half open: they do not depend on what a rule prefers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from proxy.core.fleet.breaker import FAILURES_TO_OPEN, MAX_OPEN_S, MIN_OPEN_S
from proxy.core.fleet.leases import Lease, LegFailure
from proxy.core.learned.latency import PrefillWork
from proxy.core.model.role import Role
from proxy.core.model.types import Outcome, Reason, RequestInfo
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.router import Router
from proxy.core.routing.registry import RULES
from proxy.core.tenants.tenants import Rank
from tests.proxy.core.making import idle, make_info, placed, router_of, spec, worker_of

PREFIX = tuple(range(1, 9))
TRIED_AT = MIN_OPEN_S  # when the trial is due


def cached(prompt: int = 1000) -> RequestInfo:
    return make_info(prompt, prefix=PREFIX)


def failed_fleet(*, prompt: int = 1000, **settings: Any) -> Router:
    """Return workers a, b and c; a has failed, and b has the cache of all later requests."""
    router = router_of(spec("a"), spec("b"), spec("c"), **settings)
    for _ in range(FAILURES_TO_OPEN):
        router.fleet.health.record_failure(worker_of(router, "a"), 0.0, why="reset")
    router.fleet.roster.expect_prefix(cached(prompt), worker_of(router, "b"))
    return router


def submit(router: Router, now: float, info: RequestInfo | None = None) -> Lease:
    return placed(router.submit(cached() if info is None else info, now))


def serve(router: Router, now: float) -> tuple[str, Reason]:
    """Serve a request to its end; return its worker and why it went there."""
    lease = submit(router, now)
    router.leases.record_first_token(lease, now)
    router.leases.finish(lease, now, Outcome.DONE)
    return lease.worker.name, lease.decision.reason


@pytest.mark.parametrize("policy", RULES)
def test_worker_that_is_well_again_is_tried_by_the_next_request(policy: str) -> None:
    router = failed_fleet(policy=policy)
    worker = worker_of(router, "a")
    assert all(serve(router, TRIED_AT - 0.1)[0] != "a" for _ in range(6))
    trial = submit(router, TRIED_AT)
    assert (trial.worker, trial.decision.reason) == (worker, Reason.TRIAL)
    assert all(serve(router, TRIED_AT + 0.1)[0] != "a" for _ in range(6)), "one at a time"
    router.leases.record_first_token(trial, TRIED_AT + 0.2)
    assert worker.breaker.closed
    router.leases.finish(trial, TRIED_AT + 0.3, Outcome.DONE)
    assert all(serve(router, TRIED_AT + 0.4)[1] is not Reason.TRIAL for _ in range(6))
    assert idle(router.fleet.roster)


def test_worker_that_still_fails_is_tried_once_per_pause_and_no_request_is_lost() -> None:
    router, now, trials = failed_fleet(), 0.0, []
    while now < 300.0:
        now += 0.25
        lease = submit(router, now)
        if lease.worker.name == "a":
            trials.append(now)
            failure = LegFailure(Outcome.FAILED, lease.worker)
            lease = placed(router.retry(lease, now, failure))
        assert lease.worker.name != "a"
        router.leases.record_first_token(lease, now)
        router.leases.finish(lease, now, Outcome.DONE)
    pauses = [later - earlier for earlier, later in pairwise(trials)]
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert max(pauses) == MAX_OPEN_S
    assert len(trials) < 16


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.BUSY])
def test_retry_after_of_nothing_makes_no_trial_of_every_request(outcome: Outcome) -> None:
    router, trials = failed_fleet(policy="round_robin", retry_budget=1.0), 0
    for number in range(1, 401):
        now = number / 4
        lease = submit(router, now)
        trials += lease.decision.reason is Reason.TRIAL
        if lease.worker.name == "a":
            failure = LegFailure(outcome, lease.worker, retry_after_s=0.0)
            lease = placed(router.retry(lease, now, failure))
        router.leases.finish(lease, now, Outcome.DONE)
    assert 1 <= trials < 10


def test_trial_that_hangs_is_the_only_one_and_one_without_result_is_repeated_after_a_pause() -> (
    None
):
    """A client that leaves says nothing of the worker, but a hung worker must not get the next."""
    router = failed_fleet()
    hung = submit(router, TRIED_AT)
    assert hung.worker.name == "a"
    assert serve(router, TRIED_AT + 10 * MAX_OPEN_S)[0] != "a"
    router.leases.finish(hung, TRIED_AT + 10 * MAX_OPEN_S, Outcome.CLIENT_GONE)
    later = TRIED_AT + 10 * MAX_OPEN_S
    left = submit(router, later)
    assert left.worker.name == "a"
    router.leases.finish(left, later + 1.0, Outcome.CLIENT_GONE)
    assert serve(router, later + 1.1)[0] != "a"
    assert serve(router, later + MAX_OPEN_S) == ("a", Reason.TRIAL)


@pytest.mark.parametrize(
    "settings", [{"max_attempts": 1}, {"retry_budget": 0.0}], ids=["attempts", "budget"]
)
def test_request_that_could_not_be_sent_again_is_no_trial(settings: dict[str, Any]) -> None:
    router = failed_fleet(**settings)
    assert serve(router, TRIED_AT)[0] == "b"


def test_request_that_needs_its_time_is_no_trial() -> None:
    router = failed_fleet()
    info = cached()
    info.deadline = TRIED_AT + 60.0
    assert submit(router, TRIED_AT, info).worker.name == "b"
    long = make_info(40_000, prefix=tuple(range(1, 109)))
    router.fleet.roster.expect_prefix(long, worker_of(router, "b"))
    assert submit(router, TRIED_AT, long).worker.name == "b", "its cache saves seconds"
    assert submit(router, TRIED_AT, make_info(40_000)).worker.name == "a", "it has no cache to lose"


def test_admission_refuses_no_request_because_of_a_trial() -> None:
    targets = AdmissionSettings({Rank.STANDARD: 1.0})
    router = failed_fleet(admission=targets)
    pace = worker_of(router, "a").pace
    for second in range(20):  # it hung before it failed
        pace.learn_first_token(PrefillWork(1000), 30.0, float(second))
    assert serve(router, TRIED_AT)[0] == "b"


def test_explain_names_the_trial() -> None:
    router = failed_fleet()
    found = router.placer.explain(cached(), TRIED_AT)
    assert getattr(found, "reason", None) is Reason.TRIAL
    assert getattr(found, "worker", None) is worker_of(router, "a")


def test_prefill_worker_is_tried_by_a_hand_over() -> None:
    router = router_of(
        spec("p0", Role.PREFILL), spec("p1", Role.PREFILL), spec("d0", Role.DECODE),
        transfer=True, disaggregate_above=100,
    )  # fmt: skip
    failed = worker_of(router, "p0")
    for _ in range(FAILURES_TO_OPEN):
        router.fleet.health.record_failure(failed, 0.0, why="reset")
    router.fleet.roster.expect_prefix(cached(), worker_of(router, "p1"))
    assert submit(router, TRIED_AT - 0.1).decision.route == "p1>d0"
    trial = submit(router, TRIED_AT)
    assert trial.decision.route == "p0>d0"
    assert submit(router, TRIED_AT + 0.1).decision.route == "p1>d0"
    router.leases.end_prefill(trial, TRIED_AT + 0.2, None)
    assert failed.breaker.closed

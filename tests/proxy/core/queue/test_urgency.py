"""Order of one tenant's waiting requests, and clients' deadlines, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from proxy.core.model.role import Role
from proxy.core.model.types import Outcome, Reason, Refusal, RequestInfo
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.queue.urgency import PREFILL_WEIGHT
from proxy.core.router import Router
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from tests.proxy.core.making import (
    make_info,
    placed,
    pop_one,
    refused,
    router_of,
    spec,
    waits,
    worker_of,
)

TOKEN_S = 1e-4
FRESH, TURN = 200_000, 300_000
BLOCKS = tuple(range(1, 381))  # of 300,000 tokens, 992 are not covered


def make_router(*names: str, most: int = 1, **settings: object) -> Router:
    """Return a router of workers that prefill ten thousand tokens a second."""
    router = router_of(*(spec(name, most=most) for name in names or ("w",)), **settings)
    for worker in router.fleet.roster:
        pace = worker.pace
        pace.prefills, pace.token_s, pace.fixed_s, pace.evicted_share = 100, TOKEN_S, 0.0, 0.0
    return router


def fresh(tokens: int = FRESH, tenant: Tenant | None = None, deadline: float = inf) -> RequestInfo:
    info = make_info(tokens, long=True)
    info.tenant, info.deadline = tenant, deadline
    return info


def turn(router: Router, tenant: Tenant | None = None) -> RequestInfo:
    """Return a request of which the worker has nearly all tokens."""
    info = make_info(TURN, long=True, prefix=BLOCKS)
    info.tenant = tenant
    router.fleet.roster.expect_prefix(info, worker_of(router, "w"))
    return info


def order(
    router: Router, *requests: tuple[float, RequestInfo], served_at: float
) -> list[RequestInfo]:
    """Let requests arrive while another runs; return them in the order of their service."""
    running = placed(router.submit(make_info(10), 0.0))
    for at, info in requests:
        waits(router.submit(info, at))
    served = []
    for _ in requests:
        router.leases.finish(running, served_at, Outcome.DONE)
        ticket, answer = pop_one(router, served_at)
        running = placed(answer)
        served.append(ticket.info)
    return served


def test_mostly_cached_turn_and_short_prompt_pass_a_fresh_long_prompt_of_their_tenant() -> None:
    router = make_router()
    long, cached, short = fresh(), turn(router), make_info(100)
    found = order(router, (0.0, long), (5.0, cached), (5.1, short), served_at=6.0)
    assert found == [short, cached, long]


def test_what_a_session_knows_counts_as_cached() -> None:
    """Its turn goes first though the prefix index has forgotten the prompt."""
    router = make_router()
    done, long, later = turn(router), fresh(), turn(router)
    done.session = later.session = 7
    lease = placed(router.submit(done, 0.0))
    router.leases.record_first_token(lease, 0.1)
    router.leases.finish(lease, 0.2, Outcome.DONE)
    router.fleet.roster.prefixes.forget(0)
    assert order(router, (1.0, long), (5.0, later), served_at=6.0) == [later, long]


@pytest.mark.parametrize("tokens", [50_000, 400_000])
def test_long_prompt_begins_within_the_usual_wait_beside_turns_without_end(tokens: int) -> None:
    router = make_router()
    running, long = placed(router.submit(make_info(10), 0.0)), fresh(tokens)
    waits(router.submit(long, 0.0))
    for second in range(1, 30):
        waits(router.submit(make_info(100), second - 0.5))
        waits(router.submit(make_info(100), second - 0.4))
        router.leases.finish(running, float(second), Outcome.DONE)
        ticket, answer = pop_one(router, float(second))
        running = placed(answer)
        if ticket.info is long:
            break
    assert ticket.info is long


def test_deadline_is_judged_by_workers_that_may_take_the_request() -> None:
    short, slow = spec("short", Role.SHORT, most=1), spec("slow", most=1)
    router = router_of(short, slow, spec("fast", most=1))
    for worker, token_s in zip(router.fleet.roster, (1e-2, 1e-3, TOKEN_S), strict=True):
        pace = worker.pace
        pace.prefills, pace.token_s, pace.fixed_s, pace.evicted_share = 100, token_s, 0.0, 0.0
    for _ in range(3):
        placed(router.submit(make_info(10), 0.0))
    ticket = waits(router.submit(fresh(20_000, deadline=10.0), 0.0))
    assert ticket.deadline == pytest.approx(8.0), "the fast worker needs 2 s"


@pytest.mark.parametrize("standing", [0.0, 5.0])
def test_no_request_takes_another_tenants_turn(standing: float) -> None:
    router, tenants = make_router(), [Tenant(TenantSpec(name)) for name in "ab"]
    tenants[0].standings[Rank.STANDARD] = standing / 2
    tenants[1].standings[Rank.STANDARD] = standing
    first, second = fresh(tenant=tenants[0]), turn(router, tenants[1])
    second.deadline = 2.0
    assert order(router, (0.0, first), (0.5, second), served_at=1.0)[0] is first


@pytest.mark.parametrize("target_s", [None, 5.0], ids=["a deadline", "a target of its class"])
def test_deadline_or_target_moves_a_request_ahead_of_its_tenants_others(
    target_s: float | None,
) -> None:
    targets = {} if target_s is None else {Rank.STANDARD: target_s}
    router = make_router(admission=AdmissionSettings(targets))
    small, dated = fresh(20_000), fresh(45_000)
    if target_s is None:
        dated.deadline = 8.0
    assert order(router, (0.0, small), (0.1, dated), served_at=0.2) == [dated, small]


@pytest.mark.parametrize("left_s", [0.011, 3.0])
@pytest.mark.parametrize("late", [False, True])
def test_client_without_a_tenant_passes_no_request_that_waited_its_time(
    left_s: float, *, late: bool
) -> None:
    """A deadline, however short, gives a key that is not before the arrival."""
    now = PREFILL_WEIGHT * 20_000 * TOKEN_S + (0.01 if late else -3.1)
    long, dated = fresh(20_000), fresh(100, deadline=now + left_s)
    found = order(make_router(queue_wait_s=1000.0), (0.0, long), (now, dated), served_at=now)
    assert found[0] is (long if late else dated)


def test_deadline_that_prefill_alone_exceeds_is_refused() -> None:
    refusal = refused(make_router().submit(fresh(deadline=19.0), 0.0))
    assert (refusal.status, refusal.reason, refusal.code) == (429, Reason.DEADLINE, "deadline")
    assert refusal.retry_after_s is not None
    assert "about 20 s" in refusal.message
    placed(make_router().submit(fresh(deadline=21.0), 0.0))


def test_waiting_request_is_refused_once_its_deadline_is_out_of_reach() -> None:
    router = make_router()
    placed(router.submit(make_info(10), 0.0))
    waits(router.submit(fresh(40_000, deadline=6.0), 0.0))
    assert router.pop_due(1.9) == []
    answer = refused(pop_one(router, 2.1)[1])
    assert (answer.status, answer.reason) == (429, Reason.DEADLINE)


def test_deadline_is_no_reason_before_the_pace_is_learnt() -> None:
    router = make_router()
    worker_of(router, "w").pace.prefills = 0
    placed(router.submit(make_info(10), 0.0))
    waits(router.submit(fresh(deadline=1.0), 0.0))
    assert router.pop_due(0.9) == []
    assert [type(answer) for _, answer in router.pop_due(1.1)] == [Refusal]


def test_deadline_chooses_a_worker_that_can_meet_it() -> None:
    for deadline, chosen in ((inf, "w"), (6.0, "fast")):
        router = make_router("w", "fast", most=8)
        fast = worker_of(router, "fast")
        # What its decodes lose makes it dearer.
        fast.pace.token_s, fast.pace.sequence_s, fast.num_decoding = TOKEN_S / 4, 100.0, 5
        for worker in router.fleet.roster:
            worker.reprice()
        assert placed(router.submit(fresh(deadline=deadline), 0.0)).worker.name == chosen


@pytest.mark.parametrize(
    ("own", "target_s", "deadline", "left_s"),
    [(None, 3.0, inf, 3.0), (1.0, 3.0, inf, 1.0), (1.0, 3.0, 17.0, 7.0), (None, None, inf, None)],
)
def test_deadline_precedes_the_tenants_target_and_that_its_classes(
    own: float | None, target_s: float | None, deadline: float, left_s: float | None
) -> None:
    targets = AdmissionSettings({} if target_s is None else {Rank.STANDARD: target_s})
    tenant = Tenant(TenantSpec("a", ttft_s=own))
    info = fresh(tenant=tenant, deadline=deadline)
    assert targets.left_s(info, 10.0) == left_s
    assert targets.due(info, 10.0) == (inf if left_s is None else 10.0 + left_s)
    batch = replace(info, rank=Rank.BATCH, deadline=inf)
    assert targets.left_s(batch, 10.0) is None, "targets are those of the tenant's own class"

"""Order of one tenant's waiting requests, and clients' deadlines, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from proxy.core.fleet.leases import Lease
from proxy.core.model.role import Role
from proxy.core.model.types import Outcome, Reason, Refusal, RequestInfo
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.queue.ticket import Ticket
from proxy.core.queue.urgency import WEIGHT
from proxy.core.router import Router
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from tests.proxy.core.making import ask, placed, refused, router_of, spec, waits, worker_of

TOKEN_S = 1e-4
FRESH, TURN = 200_000, 300_000
BLOCKS = tuple(range(1, 381))  # of 300,000 tokens, 992 are not covered


def make_router(*names: str, most: int = 1, **settings: object) -> Router:
    """Return a router of workers that prefill ten thousand tokens a second."""
    router = router_of(*(spec(name, most=most) for name in names or ("w",)), **settings)
    for worker in router.fleet.roster:
        pace = worker.pace
        pace.prefills, pace.token_s, pace.fixed_s, pace.missing = 100, TOKEN_S, 0.0, 0.0
    return router


def fresh(tokens: int = FRESH, tenant: Tenant | None = None, deadline: float = inf) -> RequestInfo:
    info = ask(tokens, long=True)
    info.tenant, info.deadline = tenant, deadline
    return info


def turn(router: Router, tenant: Tenant | None = None) -> RequestInfo:
    """Return a request of which the worker has nearly all tokens."""
    info = ask(TURN, long=True, prefix=BLOCKS)
    info.tenant = tenant
    router.fleet.roster.expect_prefix(info, worker_of(router, "w"))
    return info


def drain(router: Router, now: float, running: Lease) -> list[str]:
    """Serve the waiting requests one after the other; return their ids in order."""
    order = []
    while True:
        router.leases.finish(running, now, Outcome.DONE)
        found = router.pop_due(now)
        if not found:
            return order
        ((ticket, answer),) = found
        assert isinstance(answer, Lease)
        order.append(ticket.ask.id)
        running = answer


def test_mostly_cached_turn_passes_a_fresh_long_prompt_of_its_tenant() -> None:
    router = make_router()
    running = placed(router.submit(ask(10), 0.0))
    long, cached = fresh(), turn(router)
    waits(router.submit(long, 0.0))
    waits(router.submit(cached, 5.0))
    assert drain(router, 6.0, running) == [cached.id, long.id]


def test_what_a_session_knows_counts_as_cached() -> None:
    """Its turn goes first though the prefix index has forgotten the prompt."""
    router = make_router()
    done = turn(router)
    done.session = 7
    lease = placed(router.submit(done, 0.0))
    router.leases.record_first_token(lease, 0.1)
    router.leases.finish(lease, 0.2, Outcome.DONE)
    router.fleet.roster.prefixes.forget(0)
    running = placed(router.submit(ask(10), 1.0))
    long, later = fresh(), turn(router)
    router.fleet.roster.prefixes.forget(0)
    later.session = 7
    waits(router.submit(long, 1.0))
    waits(router.submit(later, 5.0))
    assert drain(router, 6.0, running) == [later.id, long.id]


def test_short_prompt_passes_a_fresh_long_one_of_its_tenant() -> None:
    router = make_router()
    running = placed(router.submit(ask(10), 0.0))
    long, short = fresh(), ask(100)
    waits(router.submit(long, 0.0))
    waits(router.submit(short, 5.0))
    assert drain(router, 6.0, running) == [short.id, long.id]


def test_long_prompt_is_passed_only_by_what_arrives_in_its_time() -> None:
    router = make_router(queue_wait_s=1000.0)
    running = placed(router.submit(ask(10), 0.0))
    long = fresh(20_000)
    waits(router.submit(long, 0.0))
    bound = WEIGHT * 20_000 * TOKEN_S
    shorts = [ask(100, long=True) for _ in range(20)]
    for number, info in enumerate(shorts):
        waits(router.submit(info, number * bound / 10))
    order = drain(router, 2 * bound, running)
    assert order.index(long.id) == 10, "half of them arrived later"


@pytest.mark.parametrize("tokens", [50_000, 400_000])
def test_long_prompt_begins_within_the_usual_wait_beside_turns_without_end(tokens: int) -> None:
    router = make_router()
    running, waiting = placed(router.submit(ask(10), 0.0)), []
    long = fresh(tokens)
    waits(router.submit(long, 0.0))
    for second in range(1, 30):
        waits(router.submit(ask(100), second - 0.5))
        waits(router.submit(ask(100), second - 0.4))
        router.leases.finish(running, float(second), Outcome.DONE)
        ((ticket, answer),) = router.pop_due(float(second))
        assert isinstance(answer, Lease)
        running = answer
        waiting.append(ticket.ask.id)
        if ticket.ask is long:
            break
    assert waiting[-1] == long.id


def test_deadline_is_judged_by_workers_that_may_take_the_request() -> None:
    short, slow = spec("short", Role.SHORT, most=1), spec("slow", most=1)
    router = router_of(short, slow, spec("fast", most=1))
    for worker, token_s in zip(router.fleet.roster, (1e-2, 1e-3, TOKEN_S), strict=True):
        pace = worker.pace
        pace.prefills, pace.token_s, pace.fixed_s, pace.missing = 100, token_s, 0.0, 0.0
    for _ in range(3):
        placed(router.submit(ask(10), 0.0))
    ticket = waits(router.submit(fresh(20_000, deadline=10.0), 0.0))
    assert ticket.deadline == pytest.approx(8.0), "the fast worker needs 2 s"


@pytest.mark.parametrize("standing", [0.0, 5.0])
def test_no_request_takes_another_tenants_turn(standing: float) -> None:
    router = make_router()
    tenants = [Tenant(TenantSpec(name)) for name in "ab"]
    tenants[0].standings[Rank.STANDARD] = standing / 2
    tenants[1].standings[Rank.STANDARD] = standing
    running = placed(router.submit(ask(10), 0.0))
    first, second = fresh(tenant=tenants[0]), turn(router, tenants[1])
    second.deadline = 2.0
    waits(router.submit(first, 0.0))
    waits(router.submit(second, 0.5))
    router.leases.finish(running, 1.0, Outcome.DONE)
    ((ticket, _),) = router.pop_due(1.0)
    assert ticket.ask is first


def test_deadline_moves_a_request_ahead_of_its_tenants_others() -> None:
    router = make_router()
    running = placed(router.submit(ask(10), 0.0))
    small, dated = fresh(20_000), fresh(40_000, deadline=8.0)
    waits(router.submit(small, 0.0))
    waits(router.submit(dated, 0.1))
    assert drain(router, 1.0, running) == [dated.id, small.id], "it must begin by 4 s"


@pytest.mark.parametrize("left_s", [0.011, 0.02, 0.5, 3.0])
@pytest.mark.parametrize("late", [False, True])
def test_client_without_a_tenant_passes_no_request_that_waited_its_time(
    left_s: float, *, late: bool
) -> None:
    """A deadline, however short, gives a key that is not before the arrival."""
    router = make_router(queue_wait_s=1000.0)
    running = placed(router.submit(ask(10), 0.0))
    long = fresh(20_000)
    waits(router.submit(long, 0.0))
    now = WEIGHT * 20_000 * TOKEN_S + (0.01 if late else -3.1)
    dated = fresh(100, deadline=now + left_s)
    waits(router.submit(dated, now))
    router.leases.finish(running, now, Outcome.DONE)
    ((ticket, _),) = router.pop_due(now)
    assert ticket.ask is (long if late else dated)


def test_deadline_that_prefill_alone_exceeds_is_refused() -> None:
    refusal = refused(make_router().submit(fresh(deadline=19.0), 0.0))
    assert (refusal.status, refusal.reason, refusal.code) == (429, Reason.DEADLINE, "deadline")
    assert refusal.retry_after_s is not None
    assert "about 20.0 s" in refusal.message
    placed(make_router().submit(fresh(deadline=21.0), 0.0))


def test_waiting_request_is_refused_once_its_deadline_is_out_of_reach() -> None:
    router = make_router()
    placed(router.submit(ask(10), 0.0))
    waits(router.submit(fresh(40_000, deadline=6.0), 0.0))
    assert router.pop_due(1.9) == []
    ((_, answer),) = router.pop_due(2.1)
    assert isinstance(answer, Refusal)
    assert (answer.status, answer.reason) == (429, Reason.DEADLINE)


def test_deadline_is_no_reason_before_the_pace_is_learnt() -> None:
    router = make_router()
    worker_of(router, "w").pace.prefills = 0
    placed(router.submit(ask(10), 0.0))
    waits(router.submit(fresh(deadline=1.0), 0.0))
    assert router.pop_due(0.9) == []
    assert [type(answer) for _, answer in router.pop_due(1.1)] == [Refusal]


def test_deadline_chooses_a_worker_that_can_meet_it() -> None:
    router = make_router("w", "fast", most=8)
    busy, free = worker_of(router, "w"), worker_of(router, "fast")
    free.pace.token_s = TOKEN_S / 4
    free.pace.each_s = 100.0  # what its decodes lose makes it dearer
    free.decoding = 5
    for worker in (busy, free):
        worker.reprice()
    assert placed(router.submit(fresh(), 0.0)).worker is busy
    router = make_router("w", "fast", most=8)
    free = worker_of(router, "fast")
    free.pace.token_s, free.pace.each_s, free.decoding = TOKEN_S / 4, 100.0, 5
    for worker in router.fleet.roster:
        worker.reprice()
    assert placed(router.submit(fresh(deadline=6.0), 0.0)).worker is free


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


def test_class_target_orders_as_a_deadline_does() -> None:
    router = make_router(admission=AdmissionSettings({Rank.STANDARD: 5.0}))
    running = placed(router.submit(ask(10), 0.0))
    small, long = fresh(20_000), fresh(45_000)
    tickets = [router.submit(small, 0.0), router.submit(long, 0.1)]
    assert all(isinstance(ticket, Ticket) for ticket in tickets)
    assert drain(router, 0.2, running) == [long.id, small.id]

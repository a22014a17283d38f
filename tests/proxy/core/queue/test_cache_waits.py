"""Turns that wait for a slot of the full worker that has their cache, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.fleet.leases import Decision, Lease
from proxy.core.fleet.worker import MAX_UNRANKED
from proxy.core.model.types import Outcome, Reason, Refusal, RequestInfo
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.queue.queue import MAX_CACHE_WAIT_SHARE
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router
from proxy.core.routing.adaptive import MAX_CACHE_WAIT
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from tests.present import present
from tests.proxy.core.making import ask, placed, refused, router_of, spec, waits, worker_of

TOKEN_S, STEP_S = 1e-4, 0.02
PROMPT, OUTPUT = 100_000, 50
BLOCKS = tuple(range(1, 140))
SAVED_S = PROMPT * TOKEN_S  # by the cache: much more than a slot takes
WAIT_S = 60.0  # longest in the queue


def make_router(names: Iterable[str] = "ab", most: int = 1, **settings: object) -> Router:
    """Return a router of workers whose pace is known."""
    settings = {"queue_wait_s": WAIT_S, **settings}
    router = router_of(*(spec(name, most=most) for name in names), **settings)
    for worker in router.fleet.roster:
        pace = worker.pace
        pace.prefills, pace.token_s, pace.fixed_s, pace.missing = 100, TOKEN_S, 0.0, 0.0
        pace.base_s, pace.each_s = STEP_S, 0.0
    return router


def turn(output: int = OUTPUT, deadline: float = inf) -> RequestInfo:
    info = ask(PROMPT, output, long=True, prefix=BLOCKS)
    info.session, info.deadline = 5, deadline
    return info


def serve_first_turn(router: Router) -> str:
    """Serve a session's first turn; return its worker."""
    lease = placed(router.submit(turn(), 0.0))
    router.leases.first_token(lease, SAVED_S)
    router.leases.finish(lease, SAVED_S, Outcome.DONE)
    return lease.worker.name


def occupy(
    router: Router, name: str, output: int = OUTPUT, now: float = SAVED_S, prompt: int = 10
) -> Lease:
    """Let another request take a worker's slot, and decode."""
    for other in router.fleet.roster:
        other.draining = other.name != name
    router.fleet.roster.live_changed()
    lease = placed(router.submit(ask(prompt, output), now))
    router.leases.first_token(lease, now)
    for other in router.fleet.roster:
        other.draining = False
    router.fleet.roster.live_changed()
    return lease


def waiting_turn(**settings: object) -> tuple[Router, Lease, Ticket, str]:
    """Return a turn that waits for its worker beside an idle one."""
    router = make_router(**settings)
    name = serve_first_turn(router)
    running = occupy(router, name)
    return router, running, waits(router.submit(turn(), 11.0)), name


def settled(router: Router, now: float) -> Lease:
    ((_, answer),) = router.due(now)
    assert isinstance(answer, Lease)
    return answer


def test_turn_waits_for_the_worker_with_its_cache() -> None:
    router, running, ticket, name = waiting_turn()
    assert router.placer.decisions[ticket.ask.model, Reason.AWAITS_CACHE] == 1
    assert router.due(11.5) == []
    router.leases.finish(running, 12.0, Outcome.DONE)
    lease = settled(router, 12.0)
    assert (lease.worker.name, lease.decision.turn) == (name, "stayed")
    assert lease.decision.cached_tokens > 0.9 * PROMPT
    assert router.queue.cache_waits.length == router.queue.length == 0


def test_other_requests_pass_it() -> None:
    router, _, _, name = waiting_turn(names="abc")
    batch = ask(10)
    batch.rank = Rank.BATCH
    assert placed(router.submit(ask(300_000, long=True), 11.1)).worker.name != name
    assert placed(router.submit(batch, 11.1)).worker.name != name


def test_lines_of_batches_do_not_wait_for_it() -> None:
    router, _, ticket, _ = waiting_turn()
    assert not router.queue.has(ticket.ask.model)
    assert not router.queue.any_ahead_of(ask(10))


def test_turn_that_comes_back_has_its_age() -> None:
    """It goes ahead of a higher class by its own arrival, not by that of a younger request."""
    router, running, ticket, name = waiting_turn()
    occupy(router, "b" if name == "a" else "a", now=11.1)
    waits(router.submit(ask(100, long=True), 35.0))
    higher = ask(100, long=True)
    higher.rank = Rank.INTERACTIVE
    waits(router.submit(higher, 35.0))
    router.leases.finish(running, 36.0, Outcome.DONE)
    assert settled(router, 36.0).ask is ticket.ask


def test_turns_of_the_line_pass_it_too() -> None:
    """A full fleet: the free slot goes to the request behind a turn that waits for its cache."""
    router = make_router()
    name = serve_first_turn(router)
    occupy(router, name)
    free = occupy(router, "b" if name == "a" else "a")
    first, second = turn(), ask(100, long=True)
    waits(router.submit(first, 11.0))
    waits(router.submit(second, 11.1))
    router.leases.finish(free, 12.0, Outcome.DONE)
    assert settled(router, 12.0).ask is second
    assert router.queue.cache_waits.length == 1


@pytest.mark.parametrize(
    "case", ["short cache", "slow slot", "no queue", "queue full", "batch", "deadline", "retry"]
)
def test_turn_goes_elsewhere_where_a_wait_costs_more_or_is_impossible(case: str) -> None:
    settings = {"no queue": {"queue_requests": 0}, "queue full": {"queue_requests": 1}}
    router = make_router(**settings.get(case, {}))
    name = serve_first_turn(router)
    running = occupy(router, name, output=2000 if case == "slow slot" else OUTPUT)
    info = turn()
    if case == "queue full":
        pinned = ask(10)
        pinned.pinned = name
        waits(router.submit(pinned, 11.0))
    if case == "short cache":
        info = ask(4000 + PROMPT // 100, OUTPUT, prefix=BLOCKS[:3])
    if case == "batch":
        info.rank = Rank.BATCH
    if case == "deadline":
        info.deadline = 11.0 + SAVED_S + 0.5
    if case == "retry":
        router.leases.finish(running, 11.0, Outcome.DONE)
        failed = placed(router.submit(info, 11.0))
        occupy(router, name, now=11.0) if not failed.worker.full else None
        answer = router.retry(
            failed, 11.0, Outcome.FAILED, avoid=worker_of(router, name), after=failed
        )
    else:
        answer = router.submit(info, 11.0)
    assert placed(answer).worker.name != name


def leave(router: Router, name: str) -> None:
    router.fleet.roster.remove(name)


def drain(router: Router, name: str) -> None:
    router.fleet.roster.drain(name)


def fail(router: Router, name: str) -> None:
    for _ in range(10):
        router.fleet.health.failed(worker_of(router, name), 11.2)


def go_down(router: Router, name: str) -> None:
    for _ in range(5):
        router.fleet.health.probe_failed(name, 11.2, "refused")


@pytest.mark.parametrize("happens", [leave, drain, fail, go_down])
def test_worker_that_cannot_serve_releases_its_turns_at_once(
    happens: Callable[[Router, str], None],
) -> None:
    router, _, _, name = waiting_turn()
    happens(router, name)
    lease = settled(router, 11.3)
    assert (lease.worker.name != name, lease.decision.turn) == (True, "displaced")


def test_turn_waits_for_no_worker_that_has_dropped_its_model() -> None:
    """In a large group, the workers with the prompt's cache are known by its prefix alone."""
    names = [f"w{i}" for i in range(MAX_UNRANKED + 2)]
    router = make_router(names)
    name = serve_first_turn(router)
    occupy(router, name)
    router.fleet.roster.set_served(name, ["other"])
    assert placed(router.submit(turn(), 11.0)).worker.name != name


def test_turn_that_waited_in_vain_goes_to_another_worker() -> None:
    router, _, ticket, name = waiting_turn()
    assert ticket.cache_until == pytest.approx(11.0 + MAX_CACHE_WAIT_SHARE * WAIT_S)
    assert router.due(ticket.cache_until - 0.01) == []
    assert settled(router, ticket.cache_until).worker.name != name


def test_turn_of_a_full_fleet_waits_for_any_slot_after_its_time() -> None:
    router, _, ticket, name = waiting_turn()
    other = "b" if name == "a" else "a"
    free = occupy(router, other, now=11.1)
    assert router.due(ticket.cache_until) == []
    assert router.queue.cache_waits.length == 0
    router.leases.finish(free, ticket.cache_until + 1.0, Outcome.DONE)
    assert settled(router, ticket.cache_until + 1.0).worker.name == other


def test_deadline_is_met_elsewhere_if_the_slot_comes_late() -> None:
    router = make_router()
    name = serve_first_turn(router)
    occupy(router, name)
    deadline = 11.0 + SAVED_S + 5.0
    ticket = waits(router.submit(turn(deadline=deadline), 11.0))
    assert ticket.cache_until <= deadline - SAVED_S
    lease = settled(router, ticket.cache_until)
    assert lease.worker.name != name
    assert ticket.cache_until + (lease.decision.predicted_ttft_s or inf) <= deadline + 0.01


def test_deadline_that_only_the_full_worker_can_meet_is_not_refused() -> None:
    """Another worker's prefill takes too long; the slot comes in time, even after half of it."""
    router = make_router()
    name = serve_first_turn(router)
    running = occupy(router, name)
    deadline = 11.0 + 2.0
    ticket = waits(router.submit(turn(deadline=deadline), 11.0))
    assert router.due(12.5) == []
    router.leases.finish(running, 12.6, Outcome.DONE)
    lease = settled(router, 12.6)
    assert lease.worker.name == name
    assert 12.6 + present(lease.decision.predicted_ttft_s) <= deadline
    assert ticket.deadline <= deadline


def test_deadline_that_no_worker_can_meet_is_refused_at_once() -> None:
    router = make_router()
    occupy(router, serve_first_turn(router))
    answer = refused(router.submit(turn(deadline=11.0 + 0.9), 11.0))  # the slot is due in 1 s
    assert answer.reason is Reason.DEADLINE


def test_target_that_only_the_full_worker_can_meet_is_not_refused() -> None:
    """A wait for the slot costs all requests more, but another worker prefills too late."""
    router = make_router(admission=AdmissionSettings(ttft_s={Rank.STANDARD: 2 * SAVED_S}))
    name = serve_first_turn(router)
    worker_of(router, name).pace.each_s = 0.06
    occupy(router, name, output=225)  # for 18 s
    other = "b" if name == "a" else "a"
    worker_of(router, other).respecify(spec(other, most=2))
    placed(router.submit(ask(105_000, long=True), 11.0))
    assert present(waits(router.submit(turn(), 11.0)).cache_wait).worker.name == name


@pytest.mark.parametrize("arrives", ["beside a free worker", "in a full fleet"])
def test_target_of_its_class_is_met_elsewhere_too(arrives: str) -> None:
    target_s = SAVED_S + 5.0
    router = make_router(admission=AdmissionSettings(ttft_s={Rank.STANDARD: target_s}))
    name = serve_first_turn(router)
    occupy(router, name)
    free = occupy(router, "b" if name == "a" else "a")
    if arrives == "beside a free worker":
        router.leases.finish(free, 10.5, Outcome.DONE)
    ticket = waits(router.submit(turn(), 11.0))
    if arrives == "in a full fleet":
        router.leases.finish(free, 12.0, Outcome.DONE)
        assert router.due(12.0) == []
    lease = settled(router, ticket.cache_until)
    assert lease.worker.name != name
    assert ticket.cache_until + (lease.decision.predicted_ttft_s or inf) <= 11.0 + target_s + 0.01


def test_target_that_is_missed_elsewhere_ends_no_wait() -> None:
    router = make_router(admission=AdmissionSettings(ttft_s={Rank.STANDARD: SAVED_S / 2}))
    occupy(router, serve_first_turn(router))
    ticket = waits(router.submit(turn(), 11.0))
    assert ticket.cache_until == pytest.approx(11.0 + MAX_CACHE_WAIT_SHARE * WAIT_S)


def test_turns_ahead_count() -> None:
    """Each turn that waits adds the time of a slot, until a wait costs more than it saves."""
    router = make_router()
    name = serve_first_turn(router)
    occupy(router, name, output=150)
    answers = [router.submit(turn(output=150), 11.0) for _ in range(5)]
    assert [isinstance(each, Ticket) for each in answers] == [True, True, True, False, True]
    assert placed(answers[3]).worker.name != name


def test_turns_ahead_count_on_a_worker_without_a_limit() -> None:
    """Its KV cache is full, and each turn ahead takes the room of a request that ends."""
    router = make_router(most=None)
    for worker in router.fleet.roster:
        worker.kv_capacity = 2_500_000
    name = serve_first_turn(router)
    worker = worker_of(router, name)
    written = worker.written
    while not worker.full:
        occupy(router, name, prompt=1_200_000, output=200)
    worker.written = written  # the prompts are cached parts of others
    tickets = [waits(router.submit(turn(), 11.0)) for _ in range(2)]
    seconds = [present(ticket.cache_wait).seconds for ticket in tickets]
    assert 0.0 < seconds[0] < seconds[1]


def pinned_to(name: str) -> RequestInfo:
    info = ask(10)
    info.pinned = name
    return info


def test_full_queue_ends_the_wait_of_a_turn() -> None:
    """The turn goes to a free worker, so that a request that needs the queue gets its place."""
    router, _, ticket, name = waiting_turn(queue_requests=1)
    other = waits(router.submit(pinned_to(name), 11.1))
    assert (ticket.left, router.queue.length, router.queue.cache_waits.length) == (True, 1, 0)
    ((found, lease),) = router.due(11.2)
    assert found is ticket
    assert placed(lease).worker.name != name
    assert not other.left


def test_turn_that_leaves_a_full_queue_can_be_withdrawn() -> None:
    router, running, ticket, name = waiting_turn(queue_requests=1)
    waits(router.submit(pinned_to(name), 11.1))
    router.withdraw(ticket, 11.1)
    assert router.due(11.2) == []
    router.leases.finish(running, 11.3, Outcome.DONE)
    assert placed(router.due(11.3)[0][1]).worker.name == name
    assert sum(worker.requests for worker in router.fleet.roster) == 1


def test_full_queue_ends_no_wait_of_a_turn_without_another_worker() -> None:
    """The next slot frees a place in the queue: that is when the client should come again."""
    router, _, ticket, name = waiting_turn(queue_requests=1)
    occupy(router, "b" if name == "a" else "a", now=11.1)
    answer = refused(router.submit(ask(10), 11.2))
    assert (answer.reason, answer.retry_after_s) == (Reason.QUEUE_FULL, 1)
    assert not ticket.left
    assert router.queue.cache_waits.length == 1


def test_turn_that_leaves_a_full_queue_passes_no_request_before_it() -> None:
    router, _, ticket, name = waiting_turn(queue_requests=2)
    free = occupy(router, "b" if name == "a" else "a", now=11.1)
    first = waits(router.submit(ask(100, long=True), 11.2))
    router.leases.finish(free, 11.3, Outcome.DONE)
    assert refused(router.submit(pinned_to(name), 11.3)).reason is Reason.QUEUE_FULL
    assert not ticket.left
    assert settled(router, 11.3).ask is first.ask


def test_turn_that_no_other_worker_serves_in_time_makes_others_leave_a_full_queue() -> None:
    """It gives way to no request itself."""
    router, _, ticket, name = waiting_turn(names="abc", queue_requests=1)
    urgent = waits(router.submit(turn(output=1, deadline=14.0), 11.0))
    assert (ticket.left, present(urgent.cache_wait).only) == (True, True)
    assert placed(router.due(11.1)[0][1]).worker.name != name
    assert refused(router.submit(pinned_to(name), 11.1)).reason is Reason.QUEUE_FULL
    assert not urgent.left


def test_retry_after_counts_no_turns_that_wait_for_a_cache() -> None:
    router = make_router(queue_requests=4)
    name = serve_first_turn(router)
    occupy(router, name)
    turns = [waits(router.submit(turn(), 11.0)) for _ in range(2)]
    running = occupy(router, "b" if name == "a" else "a", now=11.0)
    for _ in range(2):
        waits(router.submit(ask(100), 11.0))
    for second in range(13, 25, 2):  # a slot each two seconds
        router.leases.finish(running, second, Outcome.DONE)
        running = settled(router, second)
        waits(router.submit(ask(100), second))
    assert not any(ticket.left for ticket in turns)
    assert router.queue.cache_waits.length == 2
    assert refused(router.submit(ask(100), 23.0)).retry_after_s == 6


def test_withdrawn_turn_leaves_no_trace() -> None:
    router, _, ticket, _ = waiting_turn()
    router.withdraw(ticket, 11.5)
    assert router.queue.cache_waits.length == router.queue.length == 0
    assert router.due(12.0) == []


def test_wait_for_a_cache_says_nothing_of_the_queues_speed() -> None:
    router, _, ticket, name = waiting_turn()
    lease = placed(router.submit(ask(10), 11.5))
    assert lease.worker.name != name
    router.leases.finish(lease, 21.0, Outcome.DONE)
    assert router.queue.wait_s(21.0, 0) is None
    assert not ticket.left


def test_explain_names_the_worker_and_the_longest_wait() -> None:
    router = make_router()
    name = serve_first_turn(router)
    occupy(router, name)
    answer = refused(router.placer.explain(turn(), 11.0))
    assert answer.reason is Reason.AWAITS_CACHE
    assert (
        f"wait for a slot of {name}, whose cache saves more: it is due in 1.0 s" in answer.message
    )
    assert f"after {MAX_CACHE_WAIT_SHARE * WAIT_S:.1f} s" in answer.message
    notes = {score.worker: score.note for score in answer.scores}
    other = "b" if name == "a" else "a"
    assert notes == {name: "full", other: f"higher cost than the wait for {name}"}


def test_explain_names_no_wait_without_room_in_the_queue() -> None:
    router = make_router(queue_requests=1)
    name = serve_first_turn(router)
    occupy(router, name)
    pinned = ask(10)
    pinned.pinned = name
    waits(router.submit(pinned, 11.0))
    decision = router.placer.explain(turn(), 11.0)
    assert isinstance(decision, Decision)
    assert placed(router.submit(turn(), 11.0)).worker is decision.worker


def test_tenant_with_the_least_counter_gets_the_slot() -> None:
    router = make_router()
    name = serve_first_turn(router)
    running = occupy(router, name)
    tenants = [Tenant(TenantSpec(each)) for each in "xy"]
    infos = [turn(), turn()]
    for info, tenant in zip(infos, tenants, strict=True):
        info.tenant = tenant
        waits(router.submit(info, 11.0))
    tenants[0].charge(1e6)
    router.leases.finish(running, 11.5, Outcome.DONE)
    assert settled(router, 11.5).ask.tenant is tenants[1]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["turn", "fresh", "end", "pass"]),
            st.floats(0.01, 8.0),
            st.integers(1, 400),
        ),
        min_size=5,
        max_size=40,
    )
)
def test_no_turn_waits_longer_than_its_bound(events: list[tuple[str, float, int]]) -> None:
    """Whatever happens, a free worker gets a turn within the bound, and a fresh prompt at once."""
    router = make_router("abc")
    serve_first_turn(router)
    now, running = 20.0, list[Lease]()
    for kind, pause_s, output in events:
        now += pause_s
        if kind == "end" and running:
            router.leases.finish(running.pop(0), now, Outcome.DONE)
        elif kind in ("turn", "fresh"):
            info = turn(output) if kind == "turn" else ask(5000, output)
            answer = router.submit(info, now)
            if isinstance(answer, Lease):
                running.append(answer)
        for _, answer in router.due(now):
            assert not isinstance(answer, Refusal) or answer.reason is Reason.WAITED_TOO_LONG
            if isinstance(answer, Lease):
                running.append(answer)
        free = any(not worker.full for worker in router.fleet.roster)
        for ticket in [t for _, _, t in router.queue._deadlines if not t.left]:
            bound = min(MAX_CACHE_WAIT * SAVED_S, MAX_CACHE_WAIT_SHARE * WAIT_S)
            if free:
                assert ticket.cache_wait is not None, "only a wait for a cache leaves a slot free"
                assert now < ticket.cache_until <= ticket.since + bound + 1e-6
                assert ticket.cache_wait.worker.full

"""Turns that wait for a slot of the full worker that has their cache, in virtual time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.fleet.leases import Decision, Lease, LegFailure
from proxy.core.fleet.worker import MAX_UNRANKED
from proxy.core.learned.prefix_index import ENDS
from proxy.core.model.types import Outcome, Reason, Refusal, RequestInfo
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.queue.queue import MAX_CACHE_WAIT_SHARE
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router
from proxy.core.routing.adaptive import MAX_CACHE_WAIT
from proxy.core.tenants.tenants import Rank
from tests.present import present
from tests.proxy.core import making
from tests.proxy.core.making import make_info, placed, refused, router_of, spec, waits, worker_of

TOKEN_S, STEP_S = 1e-4, 0.02
PROMPT, OUTPUT = 100_000, 50
BLOCKS = tuple(range(1, bisect_right(ENDS, 4 * PROMPT) + 1))
SAVED_S = PROMPT * TOKEN_S  # by the cache: much more than a slot takes
WAIT_S = 60.0  # longest in the queue


def make_router(names: Iterable[str] = "ab", most: int | None = 1, **settings: object) -> Router:
    """Return a router of workers whose pace is known."""
    settings = {"queue_wait_s": WAIT_S, **settings}
    router = router_of(*(spec(name, most=most) for name in names), **settings)
    for worker in router.fleet.roster:
        pace = worker.pace
        pace.prefills, pace.token_s, pace.fixed_s, pace.evicted_share = 100, TOKEN_S, 0.0, 0.0
        pace.base_s, pace.sequence_s = STEP_S, 0.0
    return router


def turn(output: int = OUTPUT, deadline: float = inf) -> RequestInfo:
    info = make_info(PROMPT, output, long=True, prefix=BLOCKS)
    info.session, info.deadline = 5, deadline
    return info


def pinned_to(name: str) -> RequestInfo:
    return making.pinned_to(name, 10)


def serve_first_turn(router: Router) -> str:
    """Serve a session's first turn; return its worker."""
    lease = placed(router.submit(turn(), 0.0))
    router.leases.record_first_token(lease, SAVED_S)
    router.leases.finish(lease, SAVED_S, Outcome.DONE)
    return lease.worker.name


def occupy(
    router: Router, name: str, output: int = OUTPUT, now: float = SAVED_S, prompt: int = 10
) -> Lease:
    """Let another request take a worker's slot, and decode."""
    for other in router.fleet.roster:
        other.draining = other.name != name
    router.fleet.roster.live_changed()
    lease = placed(router.submit(make_info(prompt, output), now))
    router.leases.record_first_token(lease, now)
    for other in router.fleet.roster:
        other.draining = False
    router.fleet.roster.live_changed()
    return lease


class Scene:
    """A full worker that has the cache of a session, and another worker."""

    def __init__(self, names: str = "ab", output: int = OUTPUT, **settings: object) -> None:
        self.router = make_router(names, **settings)
        self.full = serve_first_turn(self.router)
        self.other = next(name for name in names if name != self.full)
        self.running = occupy(self.router, self.full, output)
        self.length = lambda: self.router.queue.cache_waits.length

    def wait(self, deadline: float = inf) -> Ticket:
        """Submit the session's next turn, which waits."""
        return waits(self.router.submit(turn(deadline=deadline), 11.0))

    def end(self, lease: Lease, now: float) -> None:
        self.router.leases.finish(lease, now, Outcome.DONE)

    def settled(self, now: float) -> Lease:
        """Return the only lease that is due now."""
        return placed(making.pop_one(self.router, now)[1])


def test_turn_waits_for_the_worker_with_its_cache() -> None:
    scene = Scene()
    ticket = scene.wait()
    assert scene.router.placer.decisions[ticket.info.model, Reason.AWAITS_CACHE] == 1
    assert scene.router.pop_due(11.5) == []
    scene.end(scene.running, 12.0)
    lease = scene.settled(12.0)
    assert (lease.worker.name, lease.decision.turn) == (scene.full, "stayed")
    assert lease.decision.cached_tokens > 0.9 * PROMPT
    assert scene.length() == scene.router.queue.length == 0


def test_other_requests_pass_it() -> None:
    scene = Scene("abc")
    ticket, batch = scene.wait(), make_info(10)
    batch.rank = Rank.BATCH
    assert not scene.router.queue.has_waiting_for(ticket.info.model)
    assert not scene.router.queue.any_ahead_of(make_info(10))
    for info in (make_info(300_000, long=True), batch):
        assert placed(scene.router.submit(info, 11.1)).worker.name != scene.full


def test_turn_that_comes_back_has_its_age() -> None:
    """It goes ahead of a higher class by its own arrival, not by that of a younger request."""
    scene = Scene()
    ticket, higher = scene.wait(), make_info(100, long=True)
    occupy(scene.router, scene.other, now=11.1)
    higher.rank = Rank.INTERACTIVE
    for info in (make_info(100, long=True), higher):
        waits(scene.router.submit(info, 35.0))
    scene.end(scene.running, 36.0)
    assert scene.settled(36.0).info is ticket.info


@pytest.mark.parametrize(
    "case", ["short cache", "slow slot", "no queue", "queue full", "batch", "deadline", "retry"]
)
def test_turn_goes_elsewhere_where_a_wait_costs_more_or_is_impossible(case: str) -> None:
    settings = {"no queue": {"queue_requests": 0}, "queue full": {"queue_requests": 1}}
    scene = Scene(output=2000 if case == "slow slot" else OUTPUT, **settings.get(case, {}))
    router, name, info = scene.router, scene.full, turn()
    if case == "queue full":
        waits(router.submit(pinned_to(name), 11.0))
    if case == "short cache":
        info = make_info(4000 + PROMPT // 100, OUTPUT, prefix=BLOCKS[:3])
    if case == "batch":
        info.rank = Rank.BATCH
    if case == "deadline":
        info.deadline = 11.0 + SAVED_S + 0.5
    if case == "retry":
        scene.end(scene.running, 11.0)
        failed = placed(router.submit(info, 11.0))
        occupy(router, name, now=11.0) if not failed.worker.is_full else None
        failure = LegFailure(Outcome.FAILED, worker_of(router, name))
        answer = router.retry(failed, 11.0, failure)
    else:
        answer = router.submit(info, 11.0)
    assert placed(answer).worker.name != name


def fail(router: Router, name: str) -> None:
    for _ in range(10):
        router.fleet.health.record_failure(worker_of(router, name), 11.2)


@pytest.mark.parametrize(
    "happens",
    [
        lambda router, name: router.fleet.roster.remove(name),
        lambda router, name: router.fleet.roster.drain(name),
        lambda router, name: making.take_down(router.fleet, name),
        fail,
    ],
    ids=["leaves", "drains", "is down", "fails"],
)
def test_worker_that_cannot_serve_releases_its_turns_at_once(
    happens: Callable[[Router, str], None],
) -> None:
    scene = Scene()
    scene.wait()
    happens(scene.router, scene.full)
    lease = scene.settled(11.3)
    assert (lease.worker.name, lease.decision.turn) == (scene.other, "displaced")


def test_turn_waits_for_no_worker_that_has_dropped_its_model() -> None:
    """In a large group, the workers with the prompt's cache are known by its prefix alone."""
    router = make_router([f"w{i}" for i in range(MAX_UNRANKED + 2)])
    name = serve_first_turn(router)
    occupy(router, name)
    router.fleet.roster.set_served(name, ["other"])
    assert placed(router.submit(turn(), 11.0)).worker.name != name


@pytest.mark.parametrize("target_s", [None, SAVED_S / 2], ids=["no target", "a target missed"])
def test_turn_that_waited_in_vain_goes_to_another_worker(target_s: float | None) -> None:
    targets = {} if target_s is None else {Rank.STANDARD: target_s}
    scene = Scene(admission=AdmissionSettings(ttft_s=targets))
    ticket = scene.wait()
    assert ticket.cache_until == pytest.approx(11.0 + MAX_CACHE_WAIT_SHARE * WAIT_S)
    assert scene.router.pop_due(ticket.cache_until - 0.01) == []
    if target_s is None:
        assert scene.settled(ticket.cache_until).worker.name == scene.other


@pytest.mark.parametrize("states", ["a deadline", "a target", "a target, in a full fleet"])
def test_deadline_or_target_is_met_elsewhere_if_the_slot_comes_late(states: str) -> None:
    bound_s = SAVED_S + 5.0
    targets = {} if states == "a deadline" else {Rank.STANDARD: bound_s}
    scene = Scene(admission=AdmissionSettings(ttft_s=targets))
    free = occupy(scene.router, scene.other) if "full" in states else None
    ticket = scene.wait(11.0 + bound_s if states == "a deadline" else inf)
    if free is not None:
        scene.end(free, 12.0)
        assert scene.router.pop_due(12.0) == []
    lease = scene.settled(ticket.cache_until)
    assert lease.worker.name == scene.other
    assert ticket.cache_until + present(lease.decision.predicted_ttft_s) <= 11.0 + bound_s + 0.01


def test_deadline_that_only_the_full_worker_can_meet_is_not_refused() -> None:
    """Another worker's prefill takes too long; the slot comes in time, even after half of it."""
    scene = Scene()
    ticket = scene.wait(deadline=13.0)
    assert scene.router.pop_due(12.5) == []
    scene.end(scene.running, 12.6)
    lease = scene.settled(12.6)
    assert lease.worker.name == scene.full
    assert 12.6 + present(lease.decision.predicted_ttft_s) <= 13.0
    assert ticket.deadline <= 13.0


def test_deadline_that_no_worker_can_meet_is_refused_at_once() -> None:
    answer = Scene().router.submit(turn(deadline=11.0 + 0.9), 11.0)  # the slot is due in 1 s
    assert refused(answer).reason is Reason.DEADLINE


def test_target_that_only_the_full_worker_can_meet_is_not_refused() -> None:
    """A wait for the slot costs all requests more, but another worker prefills too late."""
    router = make_router(admission=AdmissionSettings(ttft_s={Rank.STANDARD: 2 * SAVED_S}))
    name = serve_first_turn(router)
    worker_of(router, name).pace.sequence_s = 0.06
    occupy(router, name, output=225)  # for 18 s
    other = "b" if name == "a" else "a"
    worker_of(router, other).respecify(spec(other, most=2))
    placed(router.submit(make_info(105_000, long=True), 11.0))
    assert present(waits(router.submit(turn(), 11.0)).cache_wait).worker.name == name


def test_turns_ahead_count() -> None:
    """Each turn that waits adds the time of a slot, until a wait costs more than it saves."""
    scene = Scene(output=150)
    answers = [scene.router.submit(turn(output=150), 11.0) for _ in range(5)]
    assert [isinstance(each, Ticket) for each in answers] == [True, True, True, False, True]
    assert placed(answers[3]).worker.name == scene.other


def test_turns_ahead_count_on_a_worker_without_a_limit() -> None:
    """Its KV cache is full, and each turn ahead takes the room of a request that ends."""
    router = make_router(most=None)
    for worker in router.fleet.roster:
        worker.kv_capacity = 2_500_000
    name = serve_first_turn(router)
    worker = worker_of(router, name)
    written = worker.total_written
    while not worker.is_full:
        occupy(router, name, prompt=1_200_000, output=200)
    worker.total_written = written  # the prompts are cached parts of others
    tickets = [waits(router.submit(turn(), 11.0)) for _ in range(2)]
    seconds = [present(ticket.cache_wait).seconds for ticket in tickets]
    assert 0.0 < seconds[0] < seconds[1]


def test_full_queue_ends_the_wait_of_a_turn() -> None:
    """The turn goes to a free worker, so that a request that needs the queue gets its place."""
    scene = Scene(queue_requests=1)
    ticket = scene.wait()
    other = waits(scene.router.submit(pinned_to(scene.full), 11.1))
    assert (ticket.removed, scene.router.queue.length, scene.length()) == (True, 1, 0)
    found, lease = making.pop_one(scene.router, 11.2)
    assert (found, placed(lease).worker.name) == (ticket, scene.other)
    assert not other.removed


def test_turn_that_leaves_a_full_queue_can_be_withdrawn() -> None:
    scene = Scene(queue_requests=1)
    ticket = scene.wait()
    waits(scene.router.submit(pinned_to(scene.full), 11.1))
    scene.router.withdraw(ticket, 11.1)
    assert scene.router.pop_due(11.2) == []
    scene.end(scene.running, 11.3)
    assert scene.settled(11.3).worker.name == scene.full
    assert sum(worker.requests for worker in scene.router.fleet.roster) == 1


def test_full_queue_ends_no_wait_of_a_turn_without_another_worker() -> None:
    """The next slot frees a place in the queue: that is when the client should come again."""
    scene = Scene(queue_requests=1)
    ticket = scene.wait()
    occupy(scene.router, scene.other, now=11.1)
    answer = refused(scene.router.submit(make_info(10), 11.2))
    assert (answer.reason, answer.retry_after_s) == (Reason.QUEUE_FULL, 1)
    assert (ticket.removed, scene.length()) == (False, 1)


def test_turn_that_leaves_a_full_queue_passes_no_request_before_it() -> None:
    scene = Scene(queue_requests=2)
    ticket = scene.wait()
    free = occupy(scene.router, scene.other, now=11.1)
    first = waits(scene.router.submit(make_info(100, long=True), 11.2))
    scene.end(free, 11.3)
    answer = refused(scene.router.submit(pinned_to(scene.full), 11.3))
    assert (answer.reason, ticket.removed) == (Reason.QUEUE_FULL, False)
    assert scene.settled(11.3).info is first.info


def test_turn_that_no_other_worker_serves_in_time_makes_others_leave_a_full_queue() -> None:
    """It gives way to no request itself."""
    scene = Scene("abc", queue_requests=1)
    ticket = scene.wait()
    urgent = waits(scene.router.submit(turn(output=1, deadline=14.0), 11.0))
    assert (ticket.removed, present(urgent.cache_wait).others_late) == (True, True)
    assert scene.settled(11.1).worker.name != scene.full
    answer = refused(scene.router.submit(pinned_to(scene.full), 11.1))
    assert (answer.reason, urgent.removed) == (Reason.QUEUE_FULL, False)


def test_retry_after_counts_no_turns_that_wait_for_a_cache() -> None:
    scene = Scene(queue_requests=4)
    turns = [scene.wait() for _ in range(2)]
    running = occupy(scene.router, scene.other, now=11.0)
    for _ in range(2):
        waits(scene.router.submit(make_info(100), 11.0))
    for second in range(13, 25, 2):  # a slot each two seconds
        scene.end(running, second)
        running = scene.settled(second)
        waits(scene.router.submit(make_info(100), second))
    assert not any(ticket.removed for ticket in turns)
    assert scene.length() == 2
    assert refused(scene.router.submit(make_info(100), 23.0)).retry_after_s == 6


def test_explain_names_the_worker_and_the_longest_wait() -> None:
    scene = Scene(queue_requests=1)
    name, other = scene.full, scene.other
    answer = refused(scene.router.placer.explain(turn(), 11.0))
    assert answer.reason is Reason.AWAITS_CACHE
    assert (
        f"wait for a slot of {name}, whose cache saves more: it is due in 1.0 s" in answer.message
    )
    assert f"after {MAX_CACHE_WAIT_SHARE * WAIT_S:.1f} s" in answer.message
    notes = making.notes(scene.router, turn(), 11.0)
    assert notes == {name: "full", other: f"higher cost than the wait for {name}"}
    waits(scene.router.submit(pinned_to(name), 11.0))  # no room in the queue is left
    decision = scene.router.placer.explain(turn(), 11.0)
    assert isinstance(decision, Decision)
    assert placed(scene.router.submit(turn(), 11.0)).worker is decision.worker


def test_tenant_with_the_least_counter_gets_the_slot() -> None:
    scene = Scene()
    tenants = [making.tenant(each) for each in "xy"]
    for owner in tenants:
        info = turn()
        info.tenant = owner
        waits(scene.router.submit(info, 11.0))
    tenants[0].charge(1e6)
    scene.end(scene.running, 11.5)
    assert scene.settled(11.5).info.tenant is tenants[1]


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
            info = turn(output) if kind == "turn" else make_info(5000, output)
            answer = router.submit(info, now)
            if isinstance(answer, Lease):
                running.append(answer)
        for _, answer in router.pop_due(now):
            assert not isinstance(answer, Refusal) or answer.reason is Reason.WAITED_TOO_LONG
            if isinstance(answer, Lease):
                running.append(answer)
        free = any(not worker.is_full for worker in router.fleet.roster)
        for ticket in [t for _, _, t in router.queue._deadlines if not t.removed]:
            bound = min(MAX_CACHE_WAIT * SAVED_S, MAX_CACHE_WAIT_SHARE * WAIT_S)
            if free:
                assert ticket.cache_wait is not None, "only a wait for a cache leaves a slot free"
                assert now < ticket.cache_until <= ticket.since + bound + 1e-6
                assert ticket.cache_wait.worker.is_full


def test_turn_waits_for_a_share_of_the_time_to_its_deadline() -> None:
    assert Scene().wait(11.0 + 40.0).cache_until == pytest.approx(11.0 + MAX_CACHE_WAIT_SHARE * 40)

"""Invariants of the router under random sequences of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.ejection import PoolKey, pool_key_of
from proxy.core.fleet.kv_usage import MAX_PAGE_AGE_S
from proxy.core.fleet.leases import Attempts, Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges, WorkerSpec
from proxy.core.model.types import Outcome, Refusal, RequestInfo, Usage
from proxy.core.queue.fairness import FairnessSettings
from proxy.core.queue.latency_admission import AdmissionSettings
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router, RouterSettings
from proxy.core.routing.registry import RULES
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Rank, Tenant, TenantSpec
from tests.proxy.core.making import MODEL, idle, make_info

Facts = dict[str, object]
PLAIN = int | float | str | tuple | frozenset | None
NAMES = st.sampled_from([f"w{i}" for i in range(5)])
MAX_WAITING, MAX_BYTES, WAIT_S = 4, 40_000, 5.0
SIDES = [Role.PREFILL, Role.DECODE]
MOSTLY_TRUE = st.sampled_from([True, True, True, False])
ROLES = st.sampled_from([*Role, *SIDES])


def make_request(
    prompt: int = 400, error: int = 0, prefix: tuple[int, ...] = (), **fields: Any
) -> RequestInfo:
    prefix = prefix if prompt else ()
    return make_info(prompt, error=min(error, prompt), size=prompt * 4 + 1, prefix=prefix, **fields)


REQUESTS = st.builds(
    make_request,
    prompt=st.sampled_from([0, 10, 400, 900, 5000]),
    error=st.sampled_from([0, 100, 1000]),
    output=st.sampled_from([None, 0, 50, 1500]),
    samples=st.integers(1, 3),
    stream=st.booleans(),
    generates=MOSTLY_TRUE,
    prefix=st.sampled_from([(), (1,), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (3, 4, 5, 6, 7)]),
)


@cache
def field_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} - {"bill", "account"}


def facts_of(one: object) -> Facts:
    """Return the plain fields of an object with slots."""
    facts = {name: getattr(one, name) for name in field_names(type(one))}
    return {name: fact for name, fact in facts.items() if isinstance(fact, PLAIN)}


class RouterMachine(RuleBasedStateMachine):
    """Submits, ends and fleet changes at random."""

    by_arrival = True  # the order of one tenant

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fleet = Fleet()
        self.workers: list[Worker] = []  # all workers ever added, in order
        self.leases: list[Lease] = []
        self.tickets: list[Ticket] = []
        self.transfer = False
        self.above: int | None = None
        self.tenants: list[Tenant | None] = [None]
        self.asked: list[tuple[RequestInfo, Facts]] = []  # with what was known before
        self.deadline = inf  # of the next request

    @initialize(
        policy=st.sampled_from(sorted(RULES)),
        transfer=MOSTLY_TRUE,
        above=st.sampled_from([None, 1, 500]),
        roles=st.lists(ROLES, max_size=5),
    )
    def begin(self, policy: str, transfer: bool, above: int | None, roles: list[Role]) -> None:
        self.set_up(policy, transfer, above, roles)

    def set_up(self, policy: str, transfer: bool, above: int | None, roles: list[Role]) -> None:
        self.transfer, self.above = transfer, above
        self.router = Router(self.settings(policy), self.fleet)
        for number, role in enumerate(roles):
            self.add(f"w{number}", role, None, None)

    def settings(self, policy: str) -> RouterSettings:
        return RouterSettings(
            policy,
            short_limit=1000,
            queue_requests=MAX_WAITING,
            queue_bytes=MAX_BYTES,
            queue_wait_s=WAIT_S,
            transfer=self.transfer,
            disaggregate_above=self.above,
        )

    @property
    def waiting(self) -> list[Ticket]:
        """The tickets in the queue; an evicted ticket is reported by a later `due`."""
        return [ticket for ticket in self.tickets if not ticket.removed]

    @property
    def charged(self) -> list[Lease]:
        """All leases, with those of tickets that left a full queue for another worker."""
        ended = self.router.queue.ended.values() if hasattr(self, "router") else ()
        return self.leases + [lease for lease in ended if isinstance(lease, Lease)]

    # Workers

    @rule(
        name=NAMES,
        role=ROLES,
        limit=st.sampled_from([None, 500, 2000, 8000]),
        most=st.sampled_from([None, 1, 2]),
    )
    def add_worker(self, name: str, role: Role, limit: int | None, most: int | None) -> None:
        self.add(name, role, limit, most)

    def add(self, name: str, role: Role, limit: int | None, most: int | None) -> None:
        if name not in self.fleet.roster:
            self.workers.append(
                self.fleet.roster.add(WorkerSpec(name, f"http://{name}", role, MODEL, limit, most))
            )
            self.fleet.health.probe_ok(name, self.now)

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.fleet.roster.remove(name)

    @rule(name=NAMES, draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        self.fleet.roster.drain(name, draining=draining)

    @rule(name=NAMES, times=st.integers(1, 3), good=st.booleans())
    def probe(self, name: str, times: int, good: bool) -> None:
        for _ in range(times):
            if good:
                self.fleet.health.probe_ok(name, self.now)
            else:
                self.fleet.health.probe_failed(name)

    @rule(name=NAMES, limit=st.sampled_from([None, 500, 8000]))
    def served(self, name: str, limit: int | None) -> None:
        self.fleet.roster.set_served(name, [MODEL], limit)

    @rule(
        name=NAMES,
        running=st.integers(0, 9),
        waiting=st.sampled_from([0, 0, 1, 9]),
        usage=st.floats(0, 1),
    )
    def gauges(self, name: str, running: int, waiting: int, usage: float) -> None:
        capacity = 5000 if running % 2 else None
        page = Gauges(self.now, running, waiting, usage, kv_capacity_tokens=capacity)
        self.fleet.health.set_gauges(name, page)

    @rule(policy=st.sampled_from(["adaptive", "length", "round_robin"]))
    def reload(self, policy: str) -> None:
        specs = [worker.spec for worker in self.fleet.roster]
        self.router.reconfigure(self.settings(policy), specs)

    # Requests

    @rule(
        info=REQUESTS,
        failed=st.one_of(st.just(frozenset[str]()), st.frozensets(NAMES, max_size=2)),
        pinned=st.sampled_from(["", "", "", "w0"]),
        splits=MOSTLY_TRUE,
        tenant_index=st.integers(0, 5),
    )
    def submit(
        self,
        info: RequestInfo,
        failed: frozenset[str],
        pinned: str,
        splits: bool,
        tenant_index: int,
    ) -> None:
        info.long = info.expected_tokens > 1000
        info.pinned, info.deadline = pinned, self.deadline
        info.why_whole = "samples" if not splits or pinned or not info.generates else ""
        info.tenant = self.tenants[tenant_index % len(self.tenants)]
        if info.tenant is not None:
            info.rank = info.tenant.spec.rank
        waiting_before = [
            t.info
            for t in self.waiting
            if t.info.long == info.long and plain(t) and t.info.rank <= info.rank
        ]
        self.asked.append((info, facts_of(info)))
        tried = frozenset(w for w in self.fleet.roster if w.name in failed)
        if tried:
            placed = self.router.submit_again(info, self.now, Attempts(tried))
        else:
            placed = self.router.submit(info, self.now)
        if isinstance(placed, Lease):
            self.check_placed(placed, tried)
            assert not waiting_before or tried or pinned
        elif isinstance(placed, Ticket):
            self.tickets.append(placed)
        else:
            assert placed.status in (400, 429, 502, 503)

    def check_placed(self, lease: Lease, tried: frozenset[Worker]) -> None:
        worker, info = lease.worker, lease.info
        assert self.fleet.roster.get(worker.name) is worker
        assert worker.up
        assert worker.role.can_serve or info.pinned
        assert not worker.draining or info.pinned
        assert worker not in tried
        assert info.pinned in ("", worker.name)
        assert worker.max_requests is None or worker.requests <= worker.max_requests
        limit = worker.max_model_len
        assert limit is None or info.needed_context - info.prompt_error <= limit
        if (
            limit is not None
            and info.needed_context + info.prompt_error > limit
            and not info.pinned
        ):
            assert all(
                w.max_model_len is not None and w.max_model_len <= limit
                for w in self.fleet.roster
                if w.is_live and w not in tried and not w.is_barred
            )
        assert not worker.is_barred or (lease.trial and self.now >= worker.breaker.until)
        if lease.prefill is not None:
            self.check_handed_over(lease, lease.prefill, tried)
        self.leases.append(lease)

    def check_handed_over(self, lease: Lease, first: Lease, tried: frozenset[Worker]) -> None:
        prefill, decode, info = first.worker, lease.worker, lease.info
        assert self.transfer
        assert not info.why_whole
        assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
        assert self.fleet.roster.get(prefill.name) is prefill
        assert prefill.up
        assert not prefill.draining
        assert prefill not in tried
        assert prefill.max_requests is None or prefill.requests <= prefill.max_requests
        assert not prefill.is_barred or (first.trial and self.now >= prefill.breaker.until)
        gauges = decode.gauges
        recent = gauges is not None and self.now - gauges.at <= MAX_PAGE_AGE_S
        if (
            recent and decode.kv_capacity and decode.kv_held > lease.kv_tokens
        ):  # otherwise the cache was empty
            assert decode.kv_held <= decode.kv_capacity, "its decode has room"
        assert lease.running_leg is first
        assert not lease.sent

    @rule(wait=st.sampled_from([0.0, 0.01, 0.5, 3.0, 6.0]))
    def time_passes(self, wait: float) -> None:
        self.now += wait
        waiting = {id(ticket) for ticket in self.tickets}
        evicted = {id(ticket) for ticket in self.tickets if ticket.removed}
        for ticket, end in self.router.pop_due(self.now):
            assert id(ticket) in waiting, "one end for each waiting ticket"
            waiting.remove(id(ticket))
            assert ticket.removed
            same = [
                t
                for t in self.tickets
                if t.info.long == ticket.info.long
                and t.info.tenant is ticket.info.tenant
                and plain(t)
            ]
            first = same[:1] == [ticket]
            if self.by_arrival:
                assert first or not plain(ticket) or id(ticket) in evicted, (
                    "first come first served"
                )
            self.tickets.remove(ticket)
            if isinstance(end, Lease):
                assert self.now < ticket.deadline
                self.check_placed(end, ticket.attempts.tried)
            else:
                assert isinstance(end, Refusal)
        assert all(self.now < ticket.deadline for ticket in self.tickets)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        self.router.leases.record_first_token(data.draw(st.sampled_from(self.leases)), self.now)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), cached=st.sampled_from([None, 0, 100]))
    def prefilled(self, data: st.DataObject, cached: int | None) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        usage = None if cached is None else Usage(lease.info.prompt_tokens, 1, cached)
        self.router.leases.end_prefill(lease, self.now, usage)
        assert lease.running_leg is lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(0, 80))
    def tokens(self, data: st.DataObject, count: int) -> None:
        self.router.leases.record_tokens(data.draw(st.sampled_from(self.leases)), count)

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(Outcome),
        written=st.integers(0, 100),
        rest=st.sampled_from([None, 0.0, 2.0]),
        twice=st.booleans(),
    )
    def finish(
        self, data: st.DataObject, outcome: Outcome, written: int, rest: float | None, twice: bool
    ) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        for _ in range(1 + twice):
            usage = Usage(lease.info.prompt_tokens, written, written // 2)
            self.router.leases.finish(lease, self.now, outcome, usage, retry_after_s=rest)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        self.tickets.remove(ticket)
        self.router.withdraw(ticket, self.now)

    @rule(prompt=st.sampled_from([10, 5000]))
    def explain(self, prompt: int) -> None:
        before = [(w.requests, w.prefill_tokens) for w in self.fleet.roster]
        decision = self.router.placer.explain(make_info(prompt), self.now)
        assert len(decision.scores) == len(self.fleet.roster)
        assert [w.requests for w in self.fleet.roster] == [requests for requests, _ in before]

    @precondition(lambda self: self.asked)
    @rule(
        data=st.data(),
        failed=st.frozensets(NAMES, max_size=2),
        aged=st.booleans(),
        late=st.booleans(),
    )
    def decide(self, data: st.DataObject, failed: frozenset[str], aged: bool, late: bool) -> None:
        one, _ = data.draw(st.sampled_from(self.asked))
        attempts = Attempts(frozenset(w for w in self.fleet.roster if w.name in failed))
        self.fleet.roster.pool(one.model)  # made on first use

        def inputs() -> list[Facts]:
            return [facts_of(each) for each in (one, attempts, *self.fleet.roster)]

        before = inputs()
        self.router.placer.decide(one, self.now, attempts, aged=aged, late=late)
        assert inputs() == before, "a decision changes nothing"

    # Invariants

    @invariant()
    def what_was_known_of_requests_stays(self) -> None:
        assert all(facts_of(one) == facts for one, facts in self.asked)

    @invariant()
    def queue_stays_within_its_bounds(self) -> None:
        if hasattr(self, "router"):
            assert len(self.router.queue) == len(self.waiting) <= MAX_WAITING
            assert self.router.queue.bytes == sum(t.info.body_bytes for t in self.waiting)
            assert self.router.queue.bytes <= MAX_BYTES

    @invariant()
    def tenants_count_their_requests_in_flight(self) -> None:
        asks = [lease.info for lease in self.charged] + [ticket.info for ticket in self.waiting]
        for tenant in self.tenants:
            if tenant is not None:
                assert tenant.ledger.running == sum(info.tenant is tenant for info in asks)
                assert tenant.waiting == sum(t.info.tenant is tenant for t in self.waiting)

    @invariant()
    def charges_equal_the_leases(self) -> None:
        legs = [leg for lease in self.charged for leg in (lease, lease.prefill)]
        for worker in self.workers:
            # Its own, and those of the workers that it replaced at the same server.
            predecessors = {
                other
                for other in self.workers[: self.workers.index(worker) + 1]
                if other.url == worker.url
            }
            charged = [
                leg for leg in legs if leg and not leg.released and leg.worker in predecessors
            ]
            assert worker.requests == len(charged)
            assert worker.prefill_tokens == sum(lease.prefill_tokens for lease in charged)
            assert worker.decode_tokens == sum(lease.decode_tokens for lease in charged)
            alone = sum(lease.kv_tokens for lease in charged)
            assert worker.kv_tokens == alone + sum(
                other.running_prefixes.tokens for other in predecessors
            )
            assert worker.kv_coming == sum(lease.kv_coming for lease in charged)
            assert worker.sequences == sum(lease.info.samples for lease in charged if lease.sent)
            assert worker.num_decoding <= sum(lease.info.samples for lease in charged)
            assert worker.unavailable == (worker.is_full or worker.is_barred), (
                "the flag that pools read"
            )

    @invariant()
    def released_lease_has_released_its_prefill(self) -> None:
        assert not any(lease.released for lease in self.leases)
        for lease in self.leases:
            assert lease.prefill is None or lease.sent == lease.prefill.released

    @invariant()
    def resting_workers_have_open_breakers(self) -> None:
        assert self.fleet.roster.ejections.ejected == {
            w for w in self.fleet.roster if not w.breaker.closed
        }

    @invariant()
    def pool_panics_if_fewer_than_half_are_healthy(self) -> None:
        live, out = Counter[PoolKey](), Counter[PoolKey]()
        for worker in self.fleet.roster:
            if worker.up and not worker.draining:
                live[pool_key_of(worker)] += 1
                out[pool_key_of(worker)] += not (worker.breaker.closed or worker.breaker.busy)
        panics = {key for key, number in live.items() if 2 * (number - out[key]) < number}
        assert self.fleet.roster.ejections.panics == panics
        for worker in self.fleet.roster:
            ignored = pool_key_of(worker) in panics and not worker.breaker.closed
            assert worker.in_panic == ignored

    def teardown(self) -> None:
        for lease in self.charged:
            self.router.leases.finish(lease, self.now, Outcome.DONE)
        assert idle(self.workers)
        for tenant in self.tenants:
            if tenant is not None:
                assert tenant.ledger.running == sum(t.info.tenant is tenant for t in self.waiting)


def plain(ticket: Ticket) -> bool:
    """Return whether a ticket waits in the common queue of its size, as it always did."""
    return not ticket.attempts.tried and not ticket.info.pinned and ticket.cache_due == inf


class HandoverMachine(RouterMachine):
    """Mostly hand-overs."""

    @initialize(policy=st.sampled_from(sorted(RULES)))
    def begin(self, policy: str) -> None:  # type: ignore[override]
        self.set_up(policy, True, 1, [*SIDES, *SIDES])


class TenantMachine(RouterMachine):
    """Tenants of all classes, with and without limits."""

    def __init__(self) -> None:
        super().__init__()
        limits = Limits(requests_per_minute=40, tokens_per_minute=50_000, concurrency=6)
        self.tenants = [
            Tenant(TenantSpec(f"{rank.name}{n}", rank, n + 1.0, limits if n else Limits()))
            for rank in Rank
            for n in range(2)
        ]

    def settings(self, policy: str) -> RouterSettings:
        fair = FairnessSettings(standard_age_s=1.0, batch_age_s=2.0, batch_wait_s=WAIT_S)
        strict = AdmissionSettings({Rank.INTERACTIVE: 5.0}) if self.above else None
        return replace(super().settings(policy), fairness=fair, admission=strict)


class CacheMachine(TenantMachine):
    """Slow prefills and workers with few slots, so that turns wait for their cache."""

    by_arrival = False  # the least prefill and the next deadline go first
    reload = prefilled = served = None  # type: ignore[assignment]

    def add(self, name: str, role: Role, limit: int | None, most: int | None) -> None:
        super().add(name, Role.GENERAL if role in SIDES else role, limit, most or 1)
        for worker in self.fleet.roster:
            worker.pace.prefills, worker.pace.token_s = 100, 1e-2

    @initialize()
    def begin(self) -> None:  # type: ignore[override]
        self.set_up("adaptive", False, None, [Role.GENERAL] * 3)

    @rule(tenant_index=st.integers(0, 5), deadline=st.sampled_from([inf, inf, 0.5, 3.0]))
    def submit_turn(self, tenant_index: int, deadline: float) -> None:
        """Submit a request with a prompt of which half is common to all; other requests decode."""
        for lease in self.leases:
            self.router.leases.record_first_token(lease, self.now)
        self.deadline = self.now + deadline
        info = make_request(prefix=tuple(range(1, 7)))
        self.submit(info, frozenset(), "", True, tenant_index)
        self.deadline = inf

    @invariant()
    def turn_waits_only_for_a_full_worker_and_within_its_bound(self) -> None:
        for ticket in self.waiting:
            if ticket.cache_wait is not None:
                assert ticket.cache_until <= ticket.deadline
                assert ticket.cache_wait.worker.model == ticket.info.model


TestCaches = CacheMachine.TestCase
TestCaches.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestTenants = TenantMachine.TestCase
TestTenants.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestHandovers = HandoverMachine.TestCase
TestHandovers.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)

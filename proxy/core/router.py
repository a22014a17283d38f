"""Which worker serves a request, when, or why none does.

    ask = router.read(route, body, content_type, request_id)
    answer = router.submit(ask, now)       # a Lease, a Ticket or a Refusal
    router.first_token(lease, now); router.tokens(lease, 1); ...
    router.prefilled(lease, now, usage)    # of a hand-over, between its legs
    router.finish(lease, now, outcome, usage)
    for ticket, answer in router.due(now): ...

Every lease must be finished once, on whichever way out; every ticket ends once, in `due` or by
`withdraw`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from proxy.core import accounts, fairness, handover, learning, placing, refusals
from proxy.core.admission import AdmissionSettings, placed_too_late, queued_too_late
from proxy.core.client_fields import ClientFields
from proxy.core.fairness import FairnessSettings
from proxy.core.fleet import Fleet
from proxy.core.links import Links
from proxy.core.queue import Queue
from proxy.core.reading import Reader
from proxy.core.retries import RetryBudget
from proxy.core.routes import Route
from proxy.core.routing.registry import rule
from proxy.core.routing.view import View
from proxy.core.sizing import Sizer
from proxy.core.tenants import Rank, Tenant, Tenants
from proxy.core.traffic import Traffic
from proxy.core.transfer_time import TransferTimes
from proxy.core.types import (
    Ask,
    Decision,
    Lease,
    Outcome,
    Reason,
    Refusal,
    Score,
    Ticket,
    Usage,
)
from proxy.core.worker import Worker, WorkerSpec

DONE = Outcome.DONE  # looked up once: see reading.py
BATCH = Rank.BATCH
NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What the operator chose."""

    policy: str = "adaptive"
    short_limit: int = 10_000
    prefix_affinity: bool = True
    tokenize: bool = True
    max_attempts: int = 3
    retry_budget: float = 0.2
    queue_requests: int = 1024
    queue_bytes: int = 256 * 2**20
    queue_wait_s: float = 30.0
    queue_tokens: int | None = None
    fairness: FairnessSettings = field(default_factory=FairnessSettings)
    admission: AdmissionSettings | None = None
    transfer: bool = False  # whether KV moves from prefill to decode workers
    disaggregate_above: int | None = None  # tokens to prefill; None: where it costs less
    allow_client_kv_transfer: bool = False
    client_priority: bool = False  # whether tenants may say `priority` themselves,
    client_arguments: bool = False  # and `vllm_xargs`
    pass_priority: bool = False  # whether workers are told the class of a tenant
    transfer_within_s: float = inf  # of a prefill's end its transfer has to be done


class Router:
    """See the module's text."""

    def __init__(self, settings: RouterSettings, fleet: Fleet) -> None:
        self.settings = settings
        self.fleet = fleet
        self.sizer = Sizer()
        self.prefixes = fleet.prefixes
        self.tenants = Tenants()
        self.queue = Queue(
            settings.queue_requests,
            settings.queue_bytes,
            settings.queue_wait_s,
            settings.queue_tokens,
            settings.fairness,
        )
        self.decisions: dict[tuple[str, Reason], int] = {}
        self.handovers: dict[tuple[str, str], int] = {}  # by model, and why or why not
        self.transfers: dict[str, TransferTimes] = {}  # by model
        self.links = Links()
        self.draining = False
        # Where several processes serve: tells the others which worker holds a stored response.
        self.others_remember: Callable[[str, str, str], None] | None = None
        self._evicted: dict[Ticket, Refusal] = {}  # from the queue, and not told yet
        self._reader = Reader(fleet, self.sizer, settings.short_limit)
        self._rule = rule(settings.policy)
        self._retries = RetryBudget(settings.retry_budget)
        self.traffic: dict[str, Traffic] = {}
        self._split(settings)
        fleet.rank_by(self._rule.rank)

    # Reading

    def read(
        self,
        route: Route,
        body: bytes,
        content_type: bytes,
        request_id: str,
        tenant: Tenant | None = None,
        *,
        batch: bool = False,
    ) -> Ask | Refusal:
        """Read a request's body."""
        hashed = self._rule.affine and self.settings.prefix_affinity
        ask = self._reader.read(
            route, body, content_type, request_id, hashed=hashed, tenant=tenant, batch=batch
        )
        return self._refused("", ask) if isinstance(ask, Refusal) else ask

    def counter_for(self, ask: Ask) -> Worker | None:
        """Name the worker whose /tokenize should count an ask; None if the estimate will do."""
        if not self.settings.tokenize:
            return None
        return self._reader.counter_for(ask, by_size=self._rule.by_size)

    def tokenize_body(self, ask: Ask, body: bytes) -> bytes:  # noqa: ARG002
        """Return what to send to /tokenize: the body itself, whose other fields it ignores."""
        return body

    def counted(self, ask: Ask, prompt_tokens: int) -> None:
        """Take a worker's count."""
        self._reader.counted(ask, prompt_tokens)

    def remember(self, response_id: str, worker: str, tenant: Tenant | None = None) -> None:
        """Note which worker holds a stored response, and whose it is."""
        self._reader.remember(response_id, worker, tenant)
        if self.others_remember is not None:
            self.others_remember(response_id, worker, "" if tenant is None else tenant.name)

    def recall(self, response_id: str, worker: str, tenant: str) -> None:
        """Note what another process remembers."""
        whose = self.tenants.get(tenant) if tenant else None
        if whose is not None or not tenant:
            self._reader.remember(response_id, worker, whose)

    def remembered(self) -> Iterator[tuple[str, str, str]]:
        """List all that is remembered: responses, workers, and whose they are."""
        for response_id, (worker, whose) in self._reader.responses.items():
            yield response_id, worker, "" if whose is None else whose.name

    # Placing

    def submit(
        self,
        ask: Ask,
        now: float,
        *,
        tried: frozenset[str] = NOBODY,
        free: bool = False,
        explain: bool = False,
    ) -> Lease | Ticket | Refusal:
        """Place a request, let it wait, or refuse it. `tried` names the workers that failed it.

        `free`: a prefill is all that came to nothing. To do it elsewhere costs no retry, and is no
        attempt: the decode worker that was counted on anyhow is well, and one dead prefill worker
        may have had many requests.
        """
        if self.draining and not tried:
            return self._refused(ask.model, refusals.draining())
        self.fleet.settle(now)
        if tried:
            if (refusal := self._no_retry(ask, now, tried, free=free)) is not None:
                return refusal
        else:
            self._retries.earn()
            self._saw(ask, now)
        if ask.tenant is None:
            return self._submit(ask, now, tried, explain=explain)
        if (refusal := accounts.enter(ask, now, again=bool(tried))) is not None:
            return self._refused(ask.model, refusal)
        answer = self._submit(ask, now, tried, explain=explain)
        if isinstance(answer, Refusal):
            accounts.leave(ask, now)
        return answer

    def _submit(
        self, ask: Ask, now: float, tried: frozenset[str], *, explain: bool
    ) -> Lease | Ticket | Refusal:
        # Whoever waits goes first.
        queue = self.queue
        strict = None if tried else self.settings.admission
        if tried or ask.pinned or not queue.stands_before(ask):
            answer = self._place(ask, now, tried, explain=explain, admission=strict)
            if answer is not None:
                return answer
        refusal = placing.hopeless(self.fleet, ask, now, tried)
        give_way: list[Ticket] = []
        if refusal is None and not queue.room_for(ask):
            give_way = queue.make_room(ask)
            if not give_way:
                refusal = refusals.queue_full(queue.retry_after_s(now))
        if refusal is None and strict is not None:
            likely = next(iter(self.fleet.pool(ask.model).all), None)
            refusal = queued_too_late(strict, ask, queue, likely, now)
        if refusal is not None:
            return self._refused(ask.model, refusal)
        for ticket in give_way:
            queue.remove(ticket)
            accounts.leave(ticket.ask, now)
            full = refusals.queue_full(queue.retry_after_s(now))
            self._evicted[ticket] = self._refused(ticket.ask.model, full)
        self._count(ask.model, Reason.FLEET_FULL)
        return queue.push(ask, now, tried, explain=explain)

    def withdraw(self, ticket: Ticket, now: float) -> None:
        """Take a request out of the queue, because its client left."""
        if self.queue.remove(ticket):
            accounts.leave(ticket.ask, now)
        else:
            self._evicted.pop(ticket, None)

    def due(self, now: float) -> list[tuple[Ticket, Lease | Refusal]]:
        """Take those out of the queue whose turn or time has come."""
        queue = self.queue
        if not queue.length and not self._evicted:
            return []
        self.fleet.settle(now)
        gone: list[tuple[Ticket, Lease | Refusal]] = [*self._evicted.items()]
        self._evicted.clear()
        for ticket in queue.expired(now):
            waited_s = now - ticket.since
            refusal = refusals.waited_too_long(waited_s, queue.retry_after_s(now))
            gone.append((ticket, self._refused(ticket.ask.model, refusal)))

        def end(ticket: Ticket) -> Lease | Refusal | None:
            ask = ticket.ask
            explain, aged = ticket.explain, ticket.aged
            answer = self._place(ask, now, ticket.tried, explain=explain, aged=aged)
            if answer is not None:
                return answer
            refusal = placing.hopeless(self.fleet, ask, now, ticket.tried)
            return refusal and self._refused(ask.model, refusal)

        gone += queue.leave(end, now)
        for ticket, answer in gone:
            if isinstance(answer, Refusal):
                accounts.leave(ticket.ask, now)
        return gone

    def _no_retry(
        self, ask: Ask, now: float, tried: frozenset[str], *, free: bool
    ) -> Refusal | None:
        if free:  # few: the last of the attempts is whole
            return None
        if len(tried) >= self.settings.max_attempts:
            why = "it was tried as often as it may be"
        elif not self._retries.spend(now):
            why = "too many requests are being retried"
        else:
            return None
        return self._refused(ask.model, refusals.nobody_left(why))

    def _place(
        self,
        ask: Ask,
        now: float,
        tried: frozenset[str],
        *,
        explain: bool,
        aged: bool = False,
        admission: AdmissionSettings | None = None,
    ) -> Lease | Refusal | None:
        view = self._look(ask, now, tried, explain=explain)
        if ask.rank is BATCH and not aged:
            placing.keep_to_the_gaps(view, self.settings.fairness)
        decision = self._choose(view)
        if decision is None:
            return None
        if admission is not None:
            refusal = placed_too_late(admission, ask, decision, now)
            if refusal is not None:
                return self._refused(ask.model, refusal)
        if view.pool.decodes and self.settings.transfer:
            key = ask.model, handover.why(decision, view)
            self.handovers[key] = self.handovers.get(key, 0) + 1
        if tried:
            decision = replace(decision, reason=Reason.RETRY)
        worker = decision.worker
        lease = self.fleet.charge(ask, decision, now)
        if ask.tenant is not None:
            halves = decision.handover
            cached = decision.cached_tokens if halves is None else halves.cached_tokens
            fairness.charge(self.settings.fairness, ask.tenant, ask, cached)
        if ask.prefix:
            self.prefixes.record(ask.prefix, worker.index)
            if decision.handover is not None:
                self.prefixes.record(ask.prefix, decision.handover.prefill.index)
        self._count(ask.model, decision.reason)
        return lease

    def _choose(self, view: View) -> Decision | None:
        decision = self._rule.choose(view) if view.candidates else None
        if decision is None or view.handing is None:
            return decision
        return handover.refine(decision, view)

    def _look(self, ask: Ask, now: float, tried: frozenset[str], *, explain: bool) -> View:
        queue = self.queue
        about = queue.length > 0 or queue.elsewhere is not None
        waiting = about and queue.waiting(ask.model, long=True) > 0
        traffic = self.traffic_of(ask.model)
        view = placing.look(
            self.fleet, ask, now, traffic, tried, longs_waiting=waiting, explain=explain
        )
        pool = view.pool
        if not (pool.prefills and pool.decodes and self.settings.transfer) or ask.whole:
            return view
        # The last try is for one worker alone: its chance of success is the best.
        if not tried or len(tried) < self.settings.max_attempts - 1:
            links, within_s = self.links, self.settings.transfer_within_s
            best = handover.choose_prefill(pool.prefills, ask, now, view.held, tried, links)
            if best is not None:
                time, above = self.transfer_times(ask.model), self.settings.disaggregate_above
                shorts = view.traffic.shorts_per_s(now) / pool.decodes if above is None else 0.0
                view.handing = handover.Handing(*best, time, above, links, within_s, shorts)
        return view

    def transfer_times(self, model: str) -> TransferTimes:
        """Show what is known of a model's transfers."""
        found = self.transfers.get(model)
        if found is None:
            found = self.transfers[model] = TransferTimes()
        return found

    def _saw(self, ask: Ask, now: float) -> None:
        traffic = self.traffic_of(ask.model)
        if not ask.long:
            traffic.saw_short(now)
            return
        pool = self.fleet.pool(ask.model)
        likely = pool.for_longs or pool.all
        token_s = likely[0].pace.token_s if likely else 0.0
        traffic.saw_long(now, ask.prompt_tokens * token_s)

    def traffic_of(self, model: str) -> Traffic:
        """Show what was asked of a model lately."""
        found = self.traffic.get(model)
        if found is None:
            found = self.traffic[model] = Traffic()
        return found

    # Leases

    def first_token(self, lease: Lease, now: float) -> None:
        """Note the first token of a stream, or the first byte where nothing is generated."""
        if lease.prefill is not None and lease.sent and lease.first_token_at is None:
            self._transferred(lease, now)
        self.fleet.first_token(lease, now)
        if lease.ask.erred_on:
            learning.blame(self.fleet, lease.ask, now)

    def _transferred(self, lease: Lease, now: float) -> None:
        handover = lease.decision.handover
        if handover is not None and handover.tokens and lease.ask.stream and not lease.released:
            step_s = lease.worker.pace.step_s(lease.worker.decoding)
            seconds = max(now - lease.charged_at - step_s, 0.0)
            first, second = handover.prefill.name, lease.worker.name
            self.transfer_times(lease.ask.model).saw(first, second, handover.tokens, seconds)

    def prefilled(self, lease: Lease, now: float, usage: Usage | None) -> None:
        """Note that the prefill of a hand-over is done, and the request goes on to be decoded."""
        first, halves = lease.prefill, lease.decision.handover
        if first is None or halves is None or first.released:
            return
        self.fleet.hand_over(lease, now)
        learning.judge(self.fleet, first, now, DONE, None)
        if usage is not None:
            learning.saw_cached(first.worker, halves.cached_tokens, usage)

    def reconsider(self, lease: Lease, now: float, *, may_move: bool) -> bool:
        """Between the legs, look at the decode worker again; False if none is good for the rest.

        `may_move`: whether what the prefill left behind is there for any decode worker.
        """
        worker, within_s = lease.worker, self.settings.transfer_within_s
        stands = handover.stands(lease, now, within_s)
        if stands and not worker.draining:
            return True
        other = None
        if may_move:
            workers = self.fleet.pool(lease.ask.model).all
            other = handover.instead(workers, lease, now, self.links, within_s)
        if other is None:
            # To be down may be a probe's mistake: where there is nobody else, it is asked.
            return stands or not (handover.is_well(lease) or self.has_another(lease))
        self.fleet.move(lease, other, now)
        if lease.ask.prefix:
            self.prefixes.record(lease.ask.prefix, other.index)
        return True

    def tokens(self, lease: Lease, count: int) -> None:
        """Note output tokens."""
        self.fleet.tokens(lease, count)
        ask = lease.ask
        if ask.tenant is not None and lease.seen_tokens > ask.prepaid:
            fairness.charge_output(self.settings.fairness, ask, lease.seen_tokens - ask.prepaid)
            ask.prepaid = lease.seen_tokens

    def may_learn(self, lease: Lease, now: float) -> bool:
        """Whether the usage of a request that ends now would be heeded."""
        return now >= lease.worker.pace.end_due

    def wants_usage(self, lease: Lease, now: float) -> bool:
        """Whether it is worth reading: to be learnt from, or to settle with a tenant."""
        return lease.ask.tenant is not None or self.may_learn(lease, now)

    def finish(
        self,
        lease: Lease,
        now: float,
        outcome: Outcome,
        usage: Usage | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Release what was charged, and learn from how it went.

        Of a hand-over the outcome is that of the leg under way.
        """
        worker = lease.worker
        decoding = worker.decoding
        first = lease.prefill
        if first is not None and first.released:
            first = None
        if not self.fleet.release(lease):
            return
        self.queue.freed(now)
        if lease.ask.tenant is not None:
            accounts.settle(self.settings.fairness, lease, now, outcome, usage)
        if first is not None:  # it ended in its prefill
            learning.judge(self.fleet, first, now, outcome, retry_after_s)
            learning.judge(self.fleet, lease, now, Outcome.MOOT, None)
            return
        learning.judge(self.fleet, lease, now, outcome, retry_after_s)
        if outcome is DONE and lease.ask.erred_on:
            learning.blame(self.fleet, lease.ask, now)
        if outcome is DONE and usage is not None and self.may_learn(lease, now):
            self.sizer.learn(lease.ask, usage)
            learning.learn(lease, now, usage, decoding)

    def has_another(self, lease: Lease) -> bool:
        """Whether somebody but a lease's worker could do all of it."""
        others = (w for w in self.fleet.pool(lease.ask.model).all if w is not lease.worker)
        return any(w.breaker.closed and w.may_hold(lease.ask) for w in others)

    # Telling

    def explain(self, ask: Ask, now: float) -> Decision | Refusal:
        """Say where a request would go now, with the score of every worker."""
        self.fleet.settle(now)
        view = self._look(ask, now, NOBODY, explain=True)
        decision = self._choose(view)
        scored = {score.worker: score for score in decision.scores} if decision else {}
        scores = tuple(
            scored.get(w.name) or Score(w.name, 0.0, note=self._note(w, ask, now))
            for w in self.fleet.of(ask.model)
        )
        if decision is not None:
            return replace(decision, scores=scores)
        if (refusal := placing.hopeless(self.fleet, ask, now, NOBODY)) is None:
            message = "Every worker that can hold it is full: it would wait in the queue."
            refusal = Refusal(429, Reason.FLEET_FULL, message)
        return replace(refusal, scores=scores)

    def _note(self, worker: Worker, ask: Ask, now: float) -> str:
        barred = self.links.note(worker, now)
        return barred or placing.note(worker, ask, now) or self._rule.note(worker)

    def _refused(self, model: str, refusal: Refusal) -> Refusal:
        self._count(model, refusal.reason)
        return refusal

    def _count(self, model: str, reason: Reason) -> None:
        key = (model, reason)
        self.decisions[key] = self.decisions.get(key, 0) + 1

    # Changing

    def _split(self, settings: RouterSettings) -> None:
        self._reader.splits = settings.transfer
        self._reader.passes_priority = settings.pass_priority
        self._reader.may = ClientFields(
            settings.allow_client_kv_transfer, settings.client_priority, settings.client_arguments
        )

    def reconfigure(self, settings: RouterSettings, workers: Iterable[WorkerSpec]) -> None:
        """Take a new fleet file: what is learnt of workers that stay is kept."""
        self.settings = settings
        self._split(settings)
        self._reader.short_limit = settings.short_limit
        self._rule = rule(settings.policy)
        self._retries.share = settings.retry_budget
        queue = self.queue
        queue.most, queue.most_bytes = settings.queue_requests, settings.queue_bytes
        queue.max_wait_s, queue.most_tokens = settings.queue_wait_s, settings.queue_tokens
        queue.fairness = settings.fairness
        self.fleet.rank_by(self._rule.rank)
        self.fleet.replace(workers)

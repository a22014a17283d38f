"""Route requests to workers, queue them, or refuse them.

    refusal = router.refusal_if_spent(tenant, now)
    info = router.read(request)            # a RequestInfo or a Refusal; charge_refused_read
    placement = router.submit(info, now)   # a Lease, a Ticket or a Refusal
    router.leases.record_first_token(lease, now); router.leases.record_tokens(lease, 1); ...
    router.leases.end_prefill(lease, now, usage)    # of a hand-over
    router.leases.finish(lease, now, outcome, usage)
    placement = router.retry(lease, now, failure)   # instead of finish
    for ticket, placement in router.pop_due(now): ...

Finish every lease exactly once. A ticket ends once, by `pop_due` or `withdraw`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import inf

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import FIRST_ATTEMPT, Attempts, CacheWait, Lease, LegFailure
from proxy.core.fleet.worker import Worker
from proxy.core.lifecycle import billing
from proxy.core.lifecycle.lease_book import LeaseBook
from proxy.core.lifecycle.retries import MAX_DROPS, WorkerFailureEvents
from proxy.core.model import refusals
from proxy.core.model.refusals import RefusedError
from proxy.core.model.settings import RouterSettings
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome, Reason, ReceivedRequest, Refusal, RequestInfo
from proxy.core.queue.eviction import amounts_of
from proxy.core.queue.latency_admission import NO_TARGETS, queued_too_late, waited_too_long
from proxy.core.queue.ticket import Ticket
from proxy.core.queue.urgency import urgency_of
from proxy.core.request.json_edit import TooManyMembersError
from proxy.core.request.parser import RequestParser
from proxy.core.request.sizing import Sizer
from proxy.core.routing import candidates
from proxy.core.routing.placer import Placer
from proxy.core.tenants.tenants import Tenant, Tenants

__all__ = ["Router", "RouterSettings"]


class Router:
    def __init__(self, settings: RouterSettings, fleet: Fleet) -> None:
        self.fleet = fleet
        self.sizer = Sizer()
        self.placer = Placer(settings, fleet)
        self.leases = LeaseBook(self.placer, self.sizer)
        self.queue = self.placer.queue
        self.tenants = Tenants()
        self.draining = False
        self.report_stored_response: Callable[[str, str, str], None] | None = None
        self._roster = fleet.roster
        self._parser = RequestParser(fleet.roster, self.sizer, settings)
        self._retries = self.placer.retries
        self._failure_events = WorkerFailureEvents()
        self._roster.ejections.set_threshold(settings.panic_threshold)

    @property
    def settings(self) -> RouterSettings:
        return self.placer.settings

    @property
    def shares_responses(self) -> bool:
        return self.report_stored_response is not None

    def read(self, request: ReceivedRequest) -> RequestInfo | Refusal:
        """Read a request; raise `UnknownOwnerError` if it may wait."""
        hashed = self.placer.rule.affine and self.settings.prefix_affinity
        try:
            return self._parser.read(request, hashed=hashed)
        except RefusedError as refused:
            refusal = refused.refusal
        except TooManyMembersError as error:  # of another name: mypyc gives a name one type
            refusal = refusals.bad_request(str(error))
        return self.placer.count_refusal("", refusal)

    def refusal_if_spent(self, tenant: Tenant | None, now: float) -> Refusal | None:
        """Refuse a request unread if its tenant's limits are spent."""
        refusal = None if tenant is None else billing.exhausted_limit(tenant, now)
        return self._count_if_refused("", refusal)

    def charge_refused_read(self, tenant: Tenant | None, now: float) -> None:
        if tenant is not None:
            billing.charge_refused_read(tenant, now)

    def counter_for(self, info: RequestInfo) -> Worker | None:
        """Return the worker to count a request's tokens, if needed."""
        by_size = self.placer.rule.by_size
        return self._parser.counter_for(info, by_size=by_size) if self.settings.tokenize else None

    def enter(self, info: RequestInfo, now: float) -> Refusal | None:
        """Admit a request before its tokens are counted."""
        refusal = billing.enter(info, now, is_retry=False, uncounted=True)
        return self._count_if_refused(info.model, refusal)

    def _count_if_refused(self, model: str, refusal: Refusal | None) -> Refusal | None:
        return None if refusal is None else self.placer.count_refusal(model, refusal)

    def leave(self, info: RequestInfo, now: float) -> None:
        """End an admitted request after a disconnect."""
        billing.leave(info, now)

    def apply_count(self, info: RequestInfo, prompt_tokens: int) -> None:
        self._parser.apply_count(info, prompt_tokens)

    def remember(self, response_id: str, worker: str, tenant: Tenant | None = None) -> None:
        self._parser.stored.remember(response_id, worker, tenant)
        if self.report_stored_response is not None:
            self.report_stored_response(response_id, worker, "" if tenant is None else tenant.name)

    def learn_remote_response(self, response_id: str, worker: str, tenant: str) -> None:
        owner = self.tenants.get(tenant) if tenant else None
        if owner is not None or not tenant:
            self._parser.stored.remember(response_id, worker, owner)

    def stored_responses(self) -> Iterator[tuple[str, str, str]]:
        for response_id, worker, owner in self._parser.stored:
            yield response_id, worker, "" if owner is None else owner.name

    def submit(self, info: RequestInfo, now: float) -> Lease | Ticket | Refusal:
        """Place, queue or refuse a request that has arrived."""
        if self.draining:
            billing.leave(info, now)
            return self.placer.count_refusal(info.model, refusals.draining())
        self.fleet.start_due_decodes(now)
        self._retries.earn(now)
        self.placer.record_traffic(info, now)
        return self._admit(info, now, FIRST_ATTEMPT)

    def retry(self, lease: Lease, now: float, failure: LegFailure) -> Lease | Ticket | Refusal:
        """Finish a lease and submit its request again, keeping its tenant's place."""
        info, leg = lease.attempts.enlarged or lease.info, lease.running_leg
        attempts = lease.attempts.after(failure, leg.worker, now)
        ledger = None if info.tenant is None else info.tenant.ledger
        if ledger is not None:
            ledger.keep_place()
        try:
            self.leases.finish(
                lease,
                now,
                failure.outcome,
                retry_after_s=failure.retry_after_s,
                why=failure.why,
            )
            return self.submit_again(info, now, attempts, leg, free=failure.free)
        finally:
            if ledger is not None:
                ledger.release_place()

    def submit_again(
        self,
        info: RequestInfo,
        now: float,
        attempts: Attempts,
        failed: Lease | None = None,
        *,
        free: bool = False,
    ) -> Lease | Ticket | Refusal:
        """Submit a request after a failed leg.

        Requests that fail with one worker need no retry budget. `free`: only a prefill was lost. A
        dead prefill worker may have had many requests, so such a retry needs no budget either.
        """
        self.fleet.start_due_decodes(now)
        if (refusal := self._refuse_retry(info, now, attempts, free=free)) is not None:
            return refusal
        if not (free or self._spend_retry(info, now, attempts, failed)):
            if not (attempts.continues and self._retries.share):
                why = "too many requests are being retried (router.retries.budget)"
                return self.placer.count_refusal(info.model, refusals.no_worker_left(why, 1.0))
            attempts = replace(attempts, unpaid=True)
        return self._admit(info, now, attempts)

    def _admit(self, info: RequestInfo, now: float, attempts: Attempts) -> Lease | Ticket | Refusal:
        """Enter a request into its tenant's account, and place or queue it."""
        if info.tenant is None:
            return self._place_or_queue(info, now, attempts)
        if (refusal := billing.enter(info, now, is_retry=attempts.is_retry)) is not None:
            return self.placer.count_refusal(info.model, refusal)
        placement = self._place_or_queue(info, now, attempts)
        if isinstance(placement, Refusal):
            billing.leave(info, now)
        return placement

    def _place_or_queue(
        self, info: RequestInfo, now: float, attempts: Attempts
    ) -> Lease | Ticket | Refusal:
        none_ahead = not self.queue.any_ahead_of(info)  # they go first
        wait: CacheWait | None = None
        pauses = now < attempts.retry_at
        if (none_ahead or attempts.is_retry or info.pinned) and not (attempts.unpaid or pauses):
            placement = self.placer.place(info, now, attempts, none_ahead=none_ahead)
            if placement is not None and not isinstance(placement, CacheWait):
                return placement
            wait = placement
        queued = self._enqueue(info, now, attempts, wait)
        if isinstance(queued, Refusal):
            if pauses:  # the queue is full
                return self._place_or_queue(info, now, replace(attempts, retry_at=0.0))
            return self.placer.count_refusal(info.model, queued)
        if not pauses:
            reason = Reason.FLEET_FULL if wait is None else Reason.AWAITS_CACHE
            self.placer.count_decision(info.model, reason)
        return queued

    def _enqueue(
        self, info: RequestInfo, now: float, attempts: Attempts, wait: CacheWait | None
    ) -> Ticket | Refusal:
        """Queue a request, in place of others if the queue is full."""
        queue, targets = self.queue, self.settings.admission or NO_TARGETS
        refusal = candidates.why_hopeless(self._roster, info, now, attempts)
        if refusal is not None:
            return refusal
        evicted: list[Ticket] = []
        if not queue.make_room(amounts_of(info), self.placer.place_queued, now):
            evicted = queue.choose_evicted(info)
            if not evicted:
                return self._refuse_full(info, now)
        due = inf if attempts.continues else targets.due(info, now)  # it has its first token
        urgency = urgency_of(self._roster, info, now, queue.longest_wait_s(info), due)
        if wait is None and not attempts.is_retry:
            refusal = queued_too_late(targets, info, queue, urgency, now)
            if refusal is not None:
                return refusal
        self._evict(evicted, now)
        return queue.push(info, now, attempts, urgency=urgency, cache_wait=wait)

    def _refuse_full(self, info: RequestInfo, now: float) -> Refusal:
        if self._roster.pool(info.model).all:
            return refusals.queue_full(self.queue.retry_after_s(now))
        return refusals.no_worker(info.model)  # not probed yet

    def _evict(self, tickets: Iterable[Ticket], now: float) -> None:
        for ticket in tickets:
            self.queue.remove(ticket)
            billing.leave(ticket.info, now)
            full = refusals.queue_full(self.queue.retry_after_s(now))
            self.queue.ended[ticket] = self.placer.count_refusal(ticket.info.model, full)

    def withdraw(self, ticket: Ticket, now: float) -> None:
        if self.queue.remove(ticket):
            billing.leave(ticket.info, now)
        elif isinstance(placement := self.queue.ended.pop(ticket, None), Lease):
            self.leases.finish(placement, now, Outcome.MOOT)

    def pop_due(self, now: float) -> list[tuple[Ticket, Lease | Refusal]]:
        """Remove and return the tickets that are placed, refused or expired."""
        queue = self.queue
        if not queue.length and not queue.ended:
            return []
        self.fleet.start_due_decodes(now)
        if queue.remote_queues is not None:  # other processes may need room
            queue.make_room(queue.mean_amounts, self.placer.place_queued, now)
        self._evict(queue.choose_surplus(), now)
        ended: list[tuple[Ticket, Lease | Refusal]] = [*queue.ended.items()]
        queue.ended.clear()
        for ticket in queue.pop_expired(now):
            refusal = waited_too_long(ticket, queue, now)
            ended.append((ticket, self.placer.count_refusal(ticket.info.model, refusal)))
        ended += queue.dispatch(self._place_or_refuse, now)
        for ticket, placement in ended:
            if isinstance(placement, Refusal):
                billing.leave(ticket.info, now)
        return ended

    def _place_or_refuse(self, ticket: Ticket, now: float) -> Lease | Refusal | CacheWait | None:
        """Place a queued request, or refuse one without hope; None: it waits on."""
        info, attempts = ticket.info, ticket.attempts
        placement: Lease | Refusal | CacheWait | None = None
        if now >= attempts.retry_at and (not attempts.unpaid or self._retries.has_retry(now)):
            placement = self.placer.place_queued(ticket, now)
        if attempts.unpaid and isinstance(placement, Lease):
            self._retries.spend(now)
            placement.attempts = replace(placement.attempts, unpaid=False)
        if placement is not None:
            return placement
        refusal = candidates.why_hopeless(self._roster, info, now, attempts)
        return self._count_if_refused(info.model, refusal)

    def _refuse_retry(
        self, info: RequestInfo, now: float, attempts: Attempts, *, free: bool
    ) -> Refusal | None:
        if attempts.drops >= MAX_DROPS:
            return self.placer.count_refusal(info.model, refusals.dropped())
        longest_s = self.queue.longest_wait_s(info)
        if attempts.paused and now - attempts.failing_since > longest_s:
            why = f"no other one has continued it in {longest_s:g} s"
        elif not free and attempts.failures >= self.settings.max_attempts:
            why = "it has used all its attempts (router.retries.attempts)"
        else:
            return None
        return self.placer.count_refusal(info.model, refusals.no_worker_left(why))

    def may_retry(self, lease: Lease, now: float, attempts: Attempts) -> bool:
        """Return whether a request would be retried if the current leg failed."""
        leg = lease.running_leg
        is_prefill = leg is not lease  # needs no budget: see `submit_again`
        attempts = replace(
            attempts, tried=attempts.tried | {leg.worker}, failures=attempts.failures + 1
        )
        if not is_prefill and attempts.failures >= self.settings.max_attempts:
            return False
        if not candidates.may_take(self._roster, lease.info, now, attempts):
            return False
        if is_prefill:
            return True
        is_free = self._failure_events.has_free_retry(leg.worker, leg.charged_at, now)
        return (is_free and len(attempts.failed_on) == 1) or self._retries.has_retry(now)

    def _spend_retry(
        self, info: RequestInfo, now: float, attempts: Attempts, failed: Lease | None
    ) -> bool:
        """Spend a retry of the budget; return False if there is none.

        The first retry of a request that failed with its worker is free.
        """
        if failed is not None and self._retries.share:
            live_workers = len(self._roster.pool(info.model).all)
            at = failed.charged_at
            is_free = self._failure_events.take_free_retry(failed.worker, at, now, live_workers)
            if is_free and len(attempts.failed_on) == 1:
                return True
        return self._retries.spend(now)

    def reconfigure(self, settings: RouterSettings, workers: Iterable[WorkerSpec]) -> None:
        """Apply a new fleet file; remaining workers keep what was learned."""
        self._roster.ejections.set_threshold(settings.panic_threshold)
        self._parser.reconfigure(settings)
        self._retries.share = settings.retry_budget
        self.placer.reconfigure(settings)
        self._roster.replace(workers)

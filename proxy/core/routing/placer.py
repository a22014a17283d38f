"""Place a request: candidates, the rule's choice, the charge."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import inf

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.kv_links import KvLinks
from proxy.core.fleet.leases import FIRST_ATTEMPT, Attempts, CacheWait, Decision, Lease
from proxy.core.fleet.worker import Worker
from proxy.core.learned.traffic import Traffic
from proxy.core.learned.transfer_time import TransferTimes
from proxy.core.lifecycle.retries import RetryBudget
from proxy.core.model import refusals
from proxy.core.model.settings import RouterSettings
from proxy.core.model.specs import Score
from proxy.core.model.types import Reason, Refusal, RequestInfo
from proxy.core.queue import fairness
from proxy.core.queue.eviction import amounts_of
from proxy.core.queue.latency_admission import NO_TARGETS, placed_too_late
from proxy.core.queue.queue import MAX_CACHE_WAIT_SHARE, Queue
from proxy.core.queue.ticket import Ticket
from proxy.core.routing import candidates as candidate_rules
from proxy.core.routing import handover_cost
from proxy.core.routing.registry import rule
from proxy.core.routing.view import HandoverOffer, View
from proxy.core.tenants.tenants import Rank

BATCH = Rank.BATCH
# Longer queues of prefills get no request that another worker serves.
MAX_MOVE_WAIT_S = 0.5


class Placer:
    def __init__(self, settings: RouterSettings, fleet: Fleet) -> None:
        self.settings = settings
        self.fleet = fleet
        self.roster = fleet.roster
        self.retries = RetryBudget(settings.retry_budget)
        self.queue = Queue(
            settings.queue_requests,
            settings.queue_bytes,
            settings.queue_wait_s,
            settings.queue_tokens,
            settings.fairness,
        )
        self.decisions: dict[tuple[str, Reason], int] = {}
        self.handovers: dict[tuple[str, str], int] = {}  # by model and verdict
        self.transfer_times: dict[str, TransferTimes] = defaultdict(TransferTimes)  # by model
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self.links = KvLinks()
        self.rule = rule(settings.policy)
        self.roster.rank_by(self.rule.rank)

    def reconfigure(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.rule = rule(settings.policy)
        queue = self.queue
        queue.max_requests, queue.max_bytes = settings.queue_requests, settings.queue_bytes
        queue.max_wait_s, queue.max_tokens = settings.queue_wait_s, settings.queue_tokens
        queue.fairness = settings.fairness
        self.roster.rank_by(self.rule.rank)

    def place(
        self, info: RequestInfo, now: float, attempts: Attempts, *, none_ahead: bool
    ) -> Lease | Refusal | CacheWait | None:
        """Place a request that arrives or is retried; `none_ahead`: no other request waits."""
        is_new = not attempts.is_retry
        view, decision = self.decide(info, now, attempts, wait_since=now if is_new else None)
        if view.cache_wait is not None and not self._has_room_to_wait(view):
            view, decision = self.decide(info, now, attempts)
        if decision is None:
            return view.cache_wait
        if is_new:
            refusal = placed_too_late(self.settings.admission or NO_TARGETS, info, decision, now)
            if refusal is not None:
                return self.count_refusal(info.model, refusal)
        return self._charge(view, decision, attempts, none_ahead=none_ahead)

    def place_queued(self, ticket: Ticket, now: float) -> Lease | Refusal | CacheWait | None:
        info, attempts, waited_s = ticket.info, ticket.attempts, now - ticket.since
        late = waited_s >= handover_cost.FALLBACK_WAIT_SHARE * (ticket.deadline - ticket.since)
        may_wait = not attempts.is_retry and now < ticket.cache_until
        since = ticket.since if may_wait else None
        view, decision = self.decide(
            info, now, attempts, aged=ticket.aged, late=late, wait_since=since
        )
        if decision is None:
            return view.cache_wait
        return self._charge(view, decision, attempts, none_ahead=False)

    def _charge(
        self, view: View, decision: Decision, attempts: Attempts, *, none_ahead: bool
    ) -> Lease:
        """Charge a request to the chosen workers and to its tenant, and count the decision."""
        info, now, worker, handover = view.info, view.now, decision.worker, decision.handover
        if view.pool.num_decodes and self.settings.transfer:
            decision.verdict = handover_cost.handover_verdict(decision, view)
            key = info.model, decision.verdict
            self.handovers[key] = self.handovers.get(key, 0) + 1
        if attempts.is_retry:
            decision = replace(decision, reason=Reason.RETRY)
        if decision.why_whole:
            attempts = replace(attempts, why_whole=decision.why_whole)
        lease = self.fleet.charge(info, decision, now, attempts)
        if info.session:
            decision.turn = candidate_rules.turn_of(view, worker)
            lease.session = self.roster.sessions.get_or_create(info.session, now)
        if info.tenant is not None:
            info.bill.free = none_ahead
            cached = decision.cached_tokens if handover is None else handover.cached_tokens
            fairness.charge(self.settings.fairness, info.tenant, info, cached)
        if info.prefix:  # a decode worker has it after the transfer: see `lease_book`
            self.roster.expect_prefix(info, worker if handover is None else handover.prefill)
        self.count_decision(info.model, decision.reason)
        return lease

    def may_move(self, info: RequestInfo, now: float, attempts: Attempts) -> bool:
        """Return whether a worker has room for a request, and would soon prefill it."""
        self.fleet.start_due_decodes(now)
        _, decision = self.decide(info, now, attempts)
        return (
            decision is not None and decision.worker.wait_s(now, for_long=True) <= MAX_MOVE_WAIT_S
        )

    def decide(
        self,
        info: RequestInfo,
        now: float,
        attempts: Attempts,
        *,
        aged: bool = False,
        late: bool = False,
        wait_since: float | None = None,
    ) -> tuple[View, Decision | None]:
        """Choose a worker, and choose again while other processes fill it.

        `wait_since`: the request's arrival, if it may wait for the worker that has its cache.
        """
        while True:
            view = self._make_view(info, now, attempts)
            decision = None if attempts.is_retry else self._choose_trial(view)
            if decision is None:
                if wait_since is not None:
                    self._allow_wait(view, wait_since)
                decision = self._choose_worker(view, aged=aged, late=late)
            if decision is None or not self._is_filled(decision, now):
                return view, decision

    def _choose_trial(self, view: View) -> Decision | None:
        """Choose a worker that failed, for a request that loses little if it fails again.

        A rule might never choose the worker: for example, others have its requests' caches.
        """
        info, now, settings = view.info, view.now, self.settings
        if not self.roster.ejections.ejected or len(view.candidates) < 2:
            return None
        worker = candidate_rules.find_due_trial(view.candidates, view.cached_prefixes, now)
        if worker is None or info.deadline < inf or not info.needs_engine:
            return None
        if settings.max_attempts < 2 or not self.retries.has_retry(now):
            return None
        cached = worker.cached_tokens(view.cached_prefixes)
        decision = Decision(
            worker, Reason.TRIAL, worker.ttft_s(info, now, cached), cached_tokens=cached
        )
        refusal = placed_too_late(settings.admission or NO_TARGETS, info, decision, now)
        return decision if refusal is None else None

    def _is_filled(self, decision: Decision, now: float) -> bool:
        handover, roster = decision.handover, self.roster
        if handover is not None and roster.is_filled_elsewhere(handover.prefill, now):
            return True
        return roster.is_filled_elsewhere(decision.worker, now)

    def _choose_worker(self, view: View, *, aged: bool, late: bool) -> Decision | None:
        info = view.info
        if info.deadline < inf and view.offer is None:
            candidate_rules.keep_in_time(view)
        fair, is_spare = self.settings.fairness, info.rank is BATCH and not aged
        if is_spare:
            candidate_rules.leave_batch_reserve(view, fair)
        candidates = view.candidates
        decision = self._apply_rule(view)
        if decision is None and late and not is_spare and view.offer is not None:
            decision = self._choose_fallback(view, view.offer, candidates)
        if decision is None or not is_spare:
            return decision
        if candidate_rules.disturbs_handovers(decision, view, fair):
            candidate_rules.avoid_handovers(view, fair)
            return self._apply_rule(view)
        return decision

    def _allow_wait(self, view: View, since: float) -> None:
        """Let the rule choose a wait for the worker with the prompt's cache."""
        info, queue = view.info, self.queue
        if info.pinned or info.rank is BATCH or view.pool.num_decodes or not queue.max_requests:
            return
        view.cache_waits = queue.cache_waits
        view.first_token_due = (self.settings.admission or NO_TARGETS).due(info, since)
        longest_s = min(queue.longest_wait_s(info), info.deadline - since)
        view.wait_until = since + MAX_CACHE_WAIT_SHARE * longest_s

    def _has_room_to_wait(self, view: View) -> bool:
        queue, more, wait = self.queue, amounts_of(view.info), view.cache_wait
        if wait is not None and wait.others_late:
            return queue.make_room(more, self.place_queued, view.now)
        return queue.has_room(more)

    def _apply_rule(self, view: View) -> Decision | None:
        while view.candidates:
            decision = self.rule.choose(view)
            if decision is None or view.offer is None:
                return decision
            refined = handover_cost.consider_handover(decision, view)
            if refined is not None:
                return refined
            full = decision.worker  # another decode worker may have room
            view.candidates = [worker for worker in view.candidates if worker is not full]
        return None

    def _choose_fallback(
        self, view: View, offer: HandoverOffer, candidates: list[Worker]
    ) -> Decision | None:
        """Choose for a request that waited long for a decode worker."""
        info, view.candidates = view.info, candidates
        # Without the hand-over it would wait for the same slot, and then stall decodes.
        offer.may_wait_for_slot = True
        if (decision := self._apply_rule(view)) is not None:
            must_wait = decision.handover is not None and offer.prefill.prefill_tokens > 0
            return None if must_wait else decision
        view.offer = None
        view.candidates = [w for w in candidates if handover_cost.may_queue(w, info)]
        decision = self._apply_rule(view)
        if decision is not None:
            decision.why_whole = handover_cost.HandoverVerdict.NO_ROOM
        return decision

    def _make_view(self, info: RequestInfo, now: float, attempts: Attempts) -> View:
        queue, traffic = self.queue, self.traffic[info.model]
        view = candidate_rules.find_candidates(self.roster, info, now, attempts, traffic)
        view.longs_waiting = queue.has_waiting and queue.count_waiting(info.model, long=True) > 0
        pool = view.pool
        if pool.prefills and pool.num_decodes and self.settings.transfer and not view.why_whole:
            view.offer = self._offer_handover(view)
        return view

    def _offer_handover(self, view: View) -> HandoverOffer | None:
        tried, links, settings = view.tried, self.links, self.settings
        if tried and len(tried) >= settings.max_attempts - 1:
            return None  # the last attempt uses one worker: the best chance
        may_try_failed = not tried and bool(self.roster.ejections.ejected)
        best = handover_cost.choose_prefill(view, links, may_try_failed=may_try_failed)
        if best is None:
            return None
        times, above = self.transfer_times[view.info.model], settings.disaggregate_above
        shorts_per_s = 0.0
        if above is None:
            shorts_per_s = view.traffic.shorts_per_s(view.now) / view.pool.num_decodes
        return HandoverOffer(*best, times, above, links, settings.transfer_within_s, shorts_per_s)

    def record_traffic(self, info: RequestInfo, now: float) -> None:
        if not info.needs_engine:
            return
        traffic = self.traffic[info.model]
        if not info.long:
            traffic.record_short(now)
            return
        pool = self.roster.pool(info.model)
        likely = pool.for_longs or pool.all
        token_s = likely[0].pace.token_s if likely else 0.0
        traffic.record_long(now, info.prompt_tokens * token_s)

    def explain(self, info: RequestInfo, now: float) -> Decision | Refusal:
        """Return the placement of a request now, with all scores."""
        self.fleet.start_due_decodes(now)
        view = self._make_view(info, now, FIRST_ATTEMPT)
        view.explain = True
        if self.queue.has_room(amounts_of(info)):
            self._allow_wait(view, now)
        trial = self._choose_trial(view)
        decision = self._apply_rule(view)
        scored = {score.worker: score for score in decision.scores} if decision else {}
        decision = trial or decision
        scores = tuple(
            candidate_rules.note_panic(
                scored.get(w.name) or Score(w.name, 0.0, note=self._note(w, view)), w
            )
            for w in self.roster.workers_of(info.model)
        )
        if decision is not None:
            hands_over = view.pool.num_decodes and self.settings.transfer
            verdict = handover_cost.handover_verdict(decision, view) if hands_over else ""
            turn = candidate_rules.turn_of(view, decision.worker) if info.session else ""
            return replace(decision, scores=scores, verdict=verdict, turn=turn)
        return replace(self._explain_wait(view), scores=scores)

    def _explain_wait(self, view: View) -> Refusal:
        if (wait := view.cache_wait) is not None:
            return Refusal(
                429,
                Reason.AWAITS_CACHE,
                f"The request would wait for a slot of {wait.worker.name}, whose cache saves more: "
                f"it is due in {wait.seconds:.1f} s. Another worker would get the request "
                f"after {wait.until - view.now:.1f} s.",
            )
        hopeless = candidate_rules.why_hopeless(self.roster, view.info, view.now, FIRST_ATTEMPT)
        has_room = self.queue.has_room(amounts_of(view.info))
        return hopeless or refusals.no_worker_now(queue_has_room=has_room)

    def _note(self, worker: Worker, view: View) -> str:
        barred = self.links.describe(worker, view.now) if worker.up else ""
        return (
            barred
            or candidate_rules.why_excluded(worker, view.info, view.now)
            or self.rule.note(worker, view)
        )

    def count_refusal(self, model: str, refusal: Refusal) -> Refusal:
        self.count_decision(model, refusal.reason)
        return refusal

    def count_decision(self, model: str, reason: Reason) -> None:
        key = (model, reason)
        self.decisions[key] = self.decisions.get(key, 0) + 1

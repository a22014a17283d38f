"""A placed request: its legs, tokens and end."""

from __future__ import annotations

from dataclasses import replace

from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import Worker
from proxy.core.learned.sessions import Session, Turn, Visit, end_mark
from proxy.core.lifecycle import billing, feedback
from proxy.core.model.types import Outcome, RequestInfo, Usage
from proxy.core.queue import fairness
from proxy.core.request.session_key import session_key
from proxy.core.request.sizing import Sizer, enlarge
from proxy.core.routing import handover_cost
from proxy.core.routing.placer import Placer

DONE, CLIENT_GONE = Outcome.DONE, Outcome.CLIENT_GONE  # faster than enum look-ups


class LeaseBook:
    def __init__(self, placer: Placer, sizer: Sizer) -> None:
        self._fleet = placer.fleet
        self._placer = placer
        self._roster = placer.fleet.roster
        self._sizer = sizer

    def record_first_token(self, lease: Lease, now: float) -> None:
        """Note the first token, or the first byte without generation."""
        if lease.prefill is not None and lease.sent and lease.first_token_at is None:
            self._learn_transfer(lease, now)
            self._record_prefix(lease)
        self._fleet.record_first_token(lease, now)
        if lease.attempts.erred_on:
            feedback.count_500(self._fleet, lease, now)

    def record_begin(self, lease: Lease, now: float) -> None:
        if lease.begun_at is None:
            lease.begun_at = now

    def _learn_transfer(self, lease: Lease, now: float) -> None:
        handover = lease.decision.handover
        if lease.worker.queued_before:  # may include its queue
            return
        if handover is not None and handover.tokens and lease.info.stream and not lease.released:
            step_s = lease.worker.pace.step_s(lease.worker.num_decoding)
            seconds = max(now - lease.charged_at - step_s, 0.0)
            times = self._placer.transfer_times[lease.info.model]
            times.learn(handover.prefill.name, lease.worker.name, handover.tokens, seconds)

    def end_prefill(self, lease: Lease, now: float, usage: Usage | None) -> None:
        prefill_leg, handover = lease.prefill, lease.decision.handover
        if prefill_leg is None or handover is None or prefill_leg.released:
            return
        self._fleet.hand_over(lease, now)
        feedback.update_breaker(self._fleet, prefill_leg, now, DONE)
        if usage is not None:
            feedback.learn_cached(prefill_leg.worker, handover.cached_tokens, usage)

    def recheck_decode_worker(
        self, lease: Lease, now: float, *, may_move: bool, spent_s: float = 0.0
    ) -> bool:
        """Check the decode worker between the legs; False if none can decode.

        `may_move`: any decode worker can fetch. `spent_s`: since the prefill.
        """
        within_s = self._placer.settings.transfer_within_s - spent_s
        can_decode = self._ensure_decode_worker(lease, now, within_s, may_move=may_move)
        if can_decode and not lease.info.stream:  # it shows no first token
            self._record_prefix(lease)
        return can_decode

    def _ensure_decode_worker(
        self, lease: Lease, now: float, within_s: float, *, may_move: bool
    ) -> bool:
        may_stay = handover_cost.may_still_decode(lease, now, within_s)
        if may_stay and not lease.worker.draining:
            return True
        other = self._choose_other_decode(lease, now, within_s) if may_move else None
        if other is not None:
            self._fleet.move(lease, other, now)
            return True
        if may_stay or within_s <= 0.0 or handover_cost.is_healthy(lease):
            return may_stay
        # Probes may be wrong: without an alternative the worker is tried.
        return not self.has_other_worker(lease)

    def _choose_other_decode(self, lease: Lease, now: float, within_s: float) -> Worker | None:
        workers, links = self._roster.pool(lease.info.model).all, self._placer.links
        while True:
            other = handover_cost.choose_other_decode(workers, lease, now, links, within_s)
            if other is None or not self._roster.is_filled_elsewhere(other, now):
                return other

    def _record_prefix(self, lease: Lease) -> None:
        """Record the prefix on the decode worker.

        Earlier, other requests would count it as cached.
        """
        if lease.info.prefix:
            self._roster.expect_prefix(lease.info, lease.worker)

    def record_tokens(self, lease: Lease, count: int) -> None:
        self._fleet.record_tokens(lease, count)
        info = lease.info
        if info.tenant is not None and lease.seen_tokens > info.bill.prepaid_output:
            more, settings = lease.seen_tokens - info.bill.prepaid_output, self._placer.settings
            fairness.charge_output(settings.fairness, info, more)
            info.bill.prepaid_output = lease.seen_tokens

    def may_learn(self, lease: Lease, now: float) -> bool:
        """Return whether sizes may be learned from its usage."""
        return now >= lease.worker.pace.steps_learnable_at

    def wants_usage(self, lease: Lease, now: float) -> bool:
        return lease.info.tenant is not None or self.may_learn(lease, now)

    def finish(
        self,
        lease: Lease,
        now: float,
        outcome: Outcome,
        usage: Usage | None = None,
        *,
        retry_after_s: float | None = None,
        why: str = "",
    ) -> None:
        """Release the lease and learn from the running leg's outcome.

        `why`: an HTTP status or an error's name.
        """
        leg, decoding = lease.running_leg, lease.worker.num_decoding
        if not self._fleet.release(lease):
            return
        self._placer.queue.record_freed_slot(now)
        if lease.info.tenant is not None:
            billing.settle(self._placer.settings.fairness, lease, now, outcome, usage)
        feedback.update_breaker(
            self._fleet, leg, now, outcome, retry_after_s=retry_after_s, why=why
        )
        if leg is not lease:  # the prefill failed
            feedback.update_breaker(self._fleet, lease, now, Outcome.MOOT)
            return
        if outcome is CLIENT_GONE:
            feedback.learn_from_disconnect(self._fleet, lease, now)
        elif outcome is DONE:
            if lease.attempts.erred_on:
                feedback.count_500(self._fleet, lease, now)
            self._learn(lease, now, usage, decoding)
        session = lease.session
        if session is not None and (outcome is DONE or lease.first_token_at is not None):
            self._end_turn(lease, session, usage)

    def record_response_id(self, lease: Lease, response_id: str, now: float) -> None:
        """Let a response name its session."""
        info, sessions = lease.info, self._roster.sessions
        if not info.is_chained:
            return
        owner = "" if info.tenant is None else info.tenant.name
        key = session_key(owner, info.model, response_id.encode(errors="replace"))
        if lease.session is None:
            lease.session = sessions.get_or_create(key, now)
            lease.decision.turn = Turn.NEW
        else:
            sessions.rename(lease.session, key)

    def _end_turn(self, lease: Lease, session: Session, usage: Usage | None) -> None:
        info, worker = lease.info, lease.worker
        if not self._roster.contains(worker):
            return
        tokens = info.prompt_tokens + lease.seen_tokens
        if usage is not None:
            tokens = usage.prompt_tokens + usage.completion_tokens
        depth, mark = end_mark(info.prefix, info.prefix_bytes)
        visit = Visit(worker.index, worker.up_since, tokens, worker.total_written, depth, mark)
        sessions = self._roster.sessions
        sessions.record_turn(session, info.prefix, info.prefix_bytes, visit)
        sessions.count(info.model, lease.decision.turn)

    def _learn(self, lease: Lease, now: float, usage: Usage | None, decoding: int) -> None:
        may_learn = self.may_learn(lease, now)
        may_learn_pace = may_learn and not lease.attempts.continues
        if usage is not None:
            # One tenant's requests must not delay learning for another.
            if may_learn or self._sizer.has_few_samples(lease.info):
                self._sizer.learn(lease.info, usage)
            if may_learn_pace:
                feedback.learn(lease, now, usage, decoding)
        elif may_learn_pace and (written := feedback.tokens_by_events(lease)) > 0:
            self._sizer.learn_output(lease.info, written)
            feedback.learn_pace(lease, now, written, decoding)

    def has_larger(self, lease: Lease) -> bool:
        info = lease.info
        pool = self._roster.pool(info.model)
        return not info.pinned and lease.worker.context_limit < pool.largest_context

    def enlarge_request(self, lease: Lease) -> RequestInfo:
        """Return the request as the next attempt sees it: larger than this worker."""
        larger = enlarge(lease.info, lease.worker.context_limit, self._placer.settings.short_limit)
        lease.attempts = replace(lease.attempts, enlarged=larger)
        return larger

    def has_other_prefill(self, lease: Lease, now: float) -> bool:
        info, prefill_leg, links = lease.info, lease.prefill, self._placer.links
        failed = None if prefill_leg is None else prefill_leg.worker
        pool = self._roster.pool(info.model)
        return any(
            worker is not failed
            and handover_cost.may_prefill(worker, info, now, links)
            and links.can_reach(worker, pool.all, now)
            for worker in pool.prefills
        )

    def has_other_worker(self, lease: Lease) -> bool:
        """Return whether another worker could serve all of it."""
        others = (w for w in self._roster.pool(lease.info.model).all if w is not lease.worker)
        return any(not w.is_barred and w.may_fit(lease.info) for w in others)

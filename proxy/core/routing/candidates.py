"""The workers that may take a request now, or the reason for none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from proxy.core.fleet.leases import Attempts, Decision
from proxy.core.fleet.pool import MAX_PREFIX_HOLDERS, Pool
from proxy.core.fleet.roster import Roster
from proxy.core.fleet.worker import PrefixHolders, Worker
from proxy.core.learned.prefix_index import Matches, workers_of_deepest
from proxy.core.learned.sessions import Session, Turn
from proxy.core.learned.traffic import Traffic
from proxy.core.model import refusals
from proxy.core.model.role import Role
from proxy.core.model.specs import Score
from proxy.core.model.types import Refusal, RequestInfo
from proxy.core.queue.fairness import FairnessSettings
from proxy.core.routing.cached_tokens import cached_tokens, session_of
from proxy.core.routing.view import View

DECODE = Role.DECODE
MAX_TRIAL_LOSS_S = 0.5  # of a prefill that another worker has cached
IN_PANIC = "failed recently; used because too few workers of its pool are healthy (panic_threshold)"


def find_candidates(
    roster: Roster, info: RequestInfo, now: float, attempts: Attempts, traffic: Traffic
) -> View:
    """Return the candidates and their cached prefixes."""
    pool, tried = roster.pool(info.model), attempts.tried
    if attempts.continues:
        tried |= {worker for worker in pool.all if not attempts.may_try_now(worker, now)}
    matches = roster.prefixes.matches(info.prefix) if info.prefix else []
    session = session_of(roster, info)
    prefixes = cached_tokens(roster, info, matches, session)
    holders = _cache_holders(roster, matches, session) if pool.ranked and prefixes else []
    if info.pinned:
        workers = _pinned_worker(roster, info, now)
    else:
        workers = pool.available_workers(info, now, roster.ejections.ejected, holders)
    if tried:
        workers = [worker for worker in workers if worker not in tried]
    if attempts.paused:
        workers = [worker for worker in workers if worker not in attempts.paused] or workers
    if attempts.continues and not attempts.any_worker:  # the others may ignore its tokens
        workers = [worker for worker in workers if worker.reports_prefixes] or workers
    if not workers and not info.pinned and (info.prompt_error or attempts.continues):
        workers = _possible_fits(pool, info, now, attempts)
    why_whole = attempts.why_whole or info.why_whole
    view = View(info, now, workers, pool, traffic, prefixes, tried, why_whole, info.explain)
    view.cache_holders = holders if pool.ranked else pool.all
    view.session = session
    return view


def _cache_holders(roster: Roster, matches: Matches, session: Session | None) -> list[Worker]:
    """Return the workers with the longest cached prefix, and those of the session's turns."""
    indexes = [*workers_of_deepest(matches, MAX_PREFIX_HOLDERS)] if matches else []
    if session is not None:
        indexes += [visit.worker for visit in session.visits]
    return [roster.by_index[i] for i in indexes if i in roster.by_index]


def _pinned_worker(roster: Roster, info: RequestInfo, now: float) -> list[Worker]:
    worker = roster.get(info.pinned)
    if worker is None or not worker.up:
        return []
    return [worker] if worker.accepts(now) and worker.may_fit(info) else []


def turn_of(view: View, worker: Worker) -> str:
    if view.session is None:
        return Turn.NEW
    last = view.session.visits[-1]
    if last.worker == worker.index and last.since == worker.up_since:
        return Turn.STAYED
    could = any(w.index == last.worker and w.up_since == last.since for w in view.candidates)
    return Turn.MOVED if could else Turn.DISPLACED


def find_due_trial(workers: Iterable[Worker], prefixes: PrefixHolders, now: float) -> Worker | None:
    """Return an idle worker that should be tried, unless much of the prompt is cached elsewhere."""
    for worker in workers:
        if worker.requests or not (worker.is_barred and worker.breaker.is_trial_due(now)):
            continue
        lost = prefixes[0][0] - worker.cached_tokens(prefixes) if prefixes else 0
        if worker.pace.token_s * lost <= MAX_TRIAL_LOSS_S:
            return worker
    return None


def keep_in_time(view: View) -> None:
    """Keep the workers that should meet a client's deadline, if any."""
    info, now, prefixes = view.info, view.now, view.cached_prefixes
    left_s = info.deadline - now
    view.candidates = [
        w for w in view.candidates if w.ttft_s(info, now, w.cached_tokens(prefixes)) <= left_s
    ] or view.candidates


def leave_batch_reserve(view: View, settings: FairnessSettings) -> None:
    info, now = view.info, view.now
    view.candidates = [w for w in view.candidates if leaves_room(w, info, now, settings)]


def disturbs_handovers(decision: Decision, view: View, settings: FairnessSettings) -> bool:
    info, handover, offer = view.info, decision.handover, view.offer
    if handover is not None:
        return not leaves_room(handover.prefill, info, view.now, settings)
    if not view.pool.prefills or view.why_whole or view.tried:
        return False
    if offer is not None and leaves_room(offer.prefill, info, view.now, settings):
        return False  # the rule compared both
    return stops_decodes(decision.worker, info.prompt_tokens - decision.cached_tokens, settings)


def avoid_handovers(view: View, settings: FairnessSettings) -> None:
    """Keep workers where batch needs no prefill worker and stalls no decodes."""
    prompt, prefixes = view.info.prompt_tokens, view.cached_prefixes
    view.offer = None
    view.candidates = [
        w
        for w in view.candidates
        if not stops_decodes(w, prompt - w.cached_tokens(prefixes), settings)
    ]


def stops_decodes(worker: Worker, tokens: int, settings: FairnessSettings) -> bool:
    busy = worker.role is DECODE and worker.requests > 0
    return busy and worker.pace.token_s * tokens >= settings.batch_gap_s


def leaves_room(worker: Worker, info: RequestInfo, now: float, settings: FairnessSettings) -> bool:
    """Return whether a batch request leaves room for others."""
    if not worker.requests:
        return True
    share = 1.0 - settings.batch_reserve
    if worker.requests + 1 > share * (worker.request_limit + worker.reserved):
        return False
    room, tokens = worker.kv_capacity, info.prompt_tokens + info.expected_output * info.samples
    if room and worker.kv_held + tokens > share * room:
        return False
    return worker.wait_s(now, for_long=False) <= settings.batch_gap_s


def _possible_fits(pool: Pool, info: RequestInfo, now: float, attempts: Attempts) -> list[Worker]:
    """Return workers that may fit a high estimate, if all that surely fit have failed."""
    fitting = [w for w in pool.all if w.may_fit(info) and attempts.may_try_now(w, now)]
    if any(w.surely_fits(info) and (not w.is_barred or w.breaker.busy) for w in fitting):
        return []  # full or busy: worth the wait
    return [w for w in fitting if w.accepts(now)]


def may_take(roster: Roster, info: RequestInfo, now: float, attempts: Attempts) -> bool:
    return not info.pinned and any(
        attempts.may_try_now(w, now) and w.may_fit(info) and (not w.is_barred or w.accepts(now))
        for w in roster.pool(info.model).all
    )


def why_hopeless(
    roster: Roster, info: RequestInfo, now: float, attempts: Attempts
) -> Refusal | None:
    """Return the refusal if waiting cannot help, else None."""
    if not info.pinned and any(_can_serve(w, info, attempts) for w in roster.pool(info.model).all):
        return None
    workers = _workers_for(roster, info)
    fitting = [w for w in workers if w.may_fit(info)]
    if workers and not fitting:
        return refusals.too_long(info, max(w.context_limit for w in workers))
    untried = [w for w in fitting if not w.draining and attempts.may_try(w)]
    if attempts.continues:  # its client can't send it again
        return None if untried else refusals.no_worker_left("no other worker can continue it")
    if any(not w.probed for w in untried):
        return None  # its first probe is due
    live = [w for w in fitting if w.up and (info.pinned or not w.draining)]
    live_untried = [w for w in live if attempts.may_try(w)]
    if live and not live_untried:
        return refusals.no_worker_left("no other worker can take it")
    if any(_can_serve(w, info, attempts) for w in live_untried):
        return None
    soonest = min((w.breaker.until - now for w in live_untried), default=None)
    return refusals.no_worker(info.model, soonest)


def _workers_for(roster: Roster, info: RequestInfo) -> list[Worker]:
    """Return the workers of a request, down and draining ones included."""
    if info.pinned:
        worker = roster.get(info.pinned)
        return [] if worker is None else [worker]
    return [worker for worker in roster.workers_of(info.model) if worker.role.can_serve]


def _can_serve(worker: Worker, info: RequestInfo, attempts: Attempts) -> bool:
    well = not worker.is_barred or worker.breaker.busy
    return well and attempts.may_try(worker) and worker.may_fit(info)


def why_excluded(worker: Worker, info: RequestInfo, now: float) -> str:
    breaker = worker.breaker
    reasons = (
        (worker.draining, "draining"),
        (not worker.probed, "not probed yet"),
        (not worker.up, f"down: {worker.probe_error}" if worker.probe_error else "down"),
        (not worker.may_send(now), "busy" if breaker.busy else "failed recently"),
        (not worker.role.can_serve, "prefills only"),
        (not worker.may_fit(info), f"too small: holds {worker.context_limit} tokens"),
        (not worker.surely_fits(info), f"may be too small: holds {worker.context_limit} tokens"),
        (worker.is_full, "full"),
    )
    return next((text for holds, text in reasons if holds), "")


def note_panic(score: Score, worker: Worker) -> Score:
    if worker.breaker.closed or worker.is_barred:
        return score
    return replace(score, note=f"{score.note}; {IN_PANIC}" if score.note else IN_PANIC)

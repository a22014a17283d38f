"""Whether two legs are better than one, and on which workers.

Idea: prefill on one worker and decode on another, undisturbed. Per decode worker, compare the
request's cost there (prefill, stalled decodes, delayed requests) with the prefill leg plus the
transfer; with a threshold, compare uncached tokens. The prefill worker is the first to be done. The
prefill starts once the decode worker has room, and a slot by its end. After a long wait for a slot,
requests are handed over one at a time; after a long wait for room, the decode worker gets the whole
request. Both wait in its engine.

Cost: some ten multiplications per prefill worker, twenty per decode worker. How it fails: a fast
decode worker is unknown until it prefills long prompts. The prefill worker may have the slowest
link. With a threshold, requests wait for a busy prefill worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from proxy.core.fleet import slots
from proxy.core.fleet.kv_links import ANY_DECODE, KvLinks
from proxy.core.fleet.leases import Decision, Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.role import Role
from proxy.core.model.types import RequestInfo
from proxy.core.routing.candidates import find_due_trial
from proxy.core.routing.view import View, fits

DECODE = Role.DECODE  # faster than an enum look-up
FALLBACK_WAIT_SHARE = 0.5  # of the longest wait, before the fallbacks


class HandoverVerdict:
    """A metric label; no enum, whose members hash slowly."""

    HANDED_OVER: Final = "handed_over"
    ELSEWHERE: Final = "elsewhere"  # whole, on a general worker
    NOT_WORTH_IT: Final = "not_worth_it"  # whole on a decode worker
    CACHED: Final = "cached"  # the same, mostly cached
    NO_PREFILL: Final = "no_prefill_worker"  # none is live
    NO_ROOM: Final = "no_room"  # waited too long for room
    # All are busy or have no link.
    PREFILL_BUSY: Final = "prefill_busy"
    # Or the reasons of `split_check`.


class PrefillChoice(NamedTuple):
    worker: Worker
    prefill_s: float  # until its response
    cached_tokens: int


def whole_s(worker: Worker, view: View) -> float:
    info, now, prefixes = view.info, view.now, view.cached_prefixes
    cost = worker.flat_price + worker.prompt_price * info.prompt_tokens
    cost += worker.output_price * info.expected_output * info.samples
    cost += worker.wait_s(now, for_long=info.long)
    return cost - worker.cached_price * worker.cached_tokens(prefixes) if prefixes else cost


def may_queue(worker: Worker, info: RequestInfo) -> bool:
    """Return whether a request may wait in a worker's engine: one of its size at a time."""
    return worker.role is not DECODE or worker.prefill_tokens < info.prompt_tokens


def may_prefill(worker: Worker, info: RequestInfo, now: float, links: KvLinks) -> bool:
    """Return whether a prefill worker can take a prompt, if it has a link to a decode worker."""
    if not worker.accepts(now) or info.largest_prompt - info.prompt_error >= worker.context_limit:
        return False
    return not (links.has_failures and links.is_barred(worker, ANY_DECODE, now))


def choose_prefill(view: View, links: KvLinks, *, may_try_failed: bool) -> PrefillChoice | None:
    """Return the first prefill worker to be done.

    Workers without a link to a decode worker are skipped; idle, they would always win.
    `may_try_failed`: a failed worker takes its place for a trial.
    """
    info, now, pool, prefixes = view.info, view.now, view.pool, view.cached_prefixes
    best: PrefillChoice | None = None
    failed: list[Worker] = []
    for worker in pool.prefills:
        if worker in view.tried or not may_prefill(worker, info, now, links):
            continue
        if may_try_failed and worker.is_barred and links.can_reach(worker, pool.all, now):
            failed.append(worker)
        cached = worker.cached_tokens(prefixes)
        seconds = worker.ttft_s(info, now, cached)
        if best is not None and (seconds, worker.last_used) >= (
            best.prefill_s,
            best.worker.last_used,
        ):
            continue
        if links.can_reach(worker, pool.all, now):
            best = PrefillChoice(worker, seconds, cached)
    if failed and best is not None and (due := find_due_trial(failed, prefixes, now)) is not None:
        return PrefillChoice(due, best.prefill_s, due.cached_tokens(prefixes))
    return best


def may_still_decode(lease: Lease, now: float, within_s: float) -> bool:
    worker, handover = lease.worker, lease.decision.handover
    if not is_healthy(lease):
        return False
    if handover is None or not handover.tokens or within_s == inf:
        return True
    return worker.wait_s(now, for_long=lease.info.long) + handover.transfer_s <= within_s


def is_healthy(lease: Lease) -> bool:
    return lease.worker.up and (not lease.worker.is_barred or lease.trial)


def choose_other_decode(
    workers: Iterable[Worker], lease: Lease, now: float, links: KvLinks, within_s: float
) -> Worker | None:
    """Return the decode worker with the shortest wait."""
    info, prefill_leg, handover = lease.info, lease.prefill, lease.decision.handover
    if prefill_leg is None or handover is None:
        return None
    ranked = [
        (wait_s, worker.requests, worker.last_used, worker)
        for worker in workers
        if worker.role is DECODE
        and worker is not lease.worker
        and worker.accepts(now)
        and worker.may_fit(info)
        and not slots.must_wait(worker, now)
        and fits(worker, info, now)
        and not links.is_unusable(prefill_leg.worker, worker, now)
        and (wait_s := worker.wait_s(now, for_long=info.long)) + handover.transfer_s <= within_s
    ]
    return min(ranked)[-1] if ranked else None


def consider_handover(decision: Decision, view: View) -> Decision | None:
    """Convert a decision to a hand-over if that is better.

    Return None to wait for room.
    """
    offer, worker = view.offer, decision.worker
    if offer is None or decision.handover is not None or worker.role is not DECODE:
        return decision
    if offer.cost_if_better(worker, view, whole_s(worker, view)) is None:
        return decision
    if not offer.may_begin(worker, view):
        return None
    return replace(offer.decision(worker, view), scores=decision.scores)


def handover_verdict(decision: Decision, view: View) -> str:
    info, worker = view.info, decision.worker
    if decision.handover is not None:
        return HandoverVerdict.HANDED_OVER
    if why_whole := decision.why_whole or view.why_whole:
        return why_whole
    if not view.pool.prefills:
        return HandoverVerdict.NO_PREFILL
    if view.offer is None:
        return HandoverVerdict.PREFILL_BUSY
    if worker.role is not DECODE:
        return HandoverVerdict.ELSEWHERE
    offer = view.offer
    if offer.links.is_unusable(offer.prefill, worker, view.now):
        costs_s = whole_s(worker, view), offer.transfer_s(worker, view)
        if offer.cost_without_link_check(worker, view, *costs_s) is not None:
            return HandoverVerdict.PREFILL_BUSY
    if 2 * worker.cached_tokens(view.cached_prefixes) > info.prompt_tokens:
        return HandoverVerdict.CACHED
    return HandoverVerdict.NOT_WORTH_IT

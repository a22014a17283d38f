"""One request on two workers: when that is better, and which two.

Idea: prefill on a worker that does nothing else, decode on one that is not disturbed by prefills,
and pay a transfer of the prompt's KV cache in between. Per decode worker the question is one of
seconds: what the prompt would cost there (its own prefill, the time that those who decode there
lose by it, and those who come meanwhile) against the prefill worker's wait and prefill, and the
transfer. Or, where the operator set a threshold, of tokens: those that the decode worker would have
to prefill. So the decode worker is chosen first, by what the request costs there in the better way;
the prefill worker is the one that will be done soonest. Nothing is sent to it before the decode
worker's cache has room, and should have a seat when the prefill is done. Where shorts leave no seat
for too long it is handed over all the same, one at a time; where they leave no room, the decode
worker is given all of it. In either case its engine has it wait.

Cost: some ten multiplications per prefill worker and twenty per decode worker. How it fails: a
decode worker that is faster than the prefill worker is not known to be, until it has had some long
prompts itself; the prefill worker that is done soonest may have the slowest link to the decode
worker; with a threshold, a busy prefill worker is waited for though a decode worker could do it
sooner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Final

from proxy.core.fleet import slots
from proxy.core.fleet.kv_links import KvLinks
from proxy.core.fleet.leases import Decision, Lease
from proxy.core.fleet.worker import PrefixHolders, Worker
from proxy.core.model.role import Role
from proxy.core.model.types import RequestInfo
from proxy.core.routing.view import View, fits

DECODE = Role.DECODE  # looked up once: see reading.py
PATIENCE = 0.5  # of the time that one may wait at all, for room to be handed over


class HandoverVerdict:
    """What became of the question whether to hand a request over; a label in metrics.

    No enum: its members hash in Python, and one is counted with every request.
    """

    HANDED_OVER: Final = "handed_over"
    ELSEWHERE: Final = "elsewhere"  # whole, on a worker that is neither for prefill nor for decode
    NOT_WORTH_IT: Final = "not_worth_it"  # whole on a decode worker: little to prefill
    CACHED: Final = "cached"  # the same, because most of it should be cached there
    NO_PREFILL: Final = "no_prefill_worker"  # none is live
    NO_ROOM: Final = "no_room"  # no decode worker had any for so long that one was given all of it
    # None that is live takes more, or is connected to who decodes.
    PREFILL_BUSY: Final = "prefill_busy"
    # Or else why it can't be split: see `splitting`.


def whole_s(worker: Worker, view: View) -> float:
    """Reckon what a request costs a decode worker and those on it, prompt and all."""
    ask, now, held = view.ask, view.now, view.held
    cost = worker.flat_price + worker.prompt_price * ask.prompt_tokens
    cost += worker.output_price * ask.expected_output * ask.samples
    cost += worker.wait_s(now, for_long=ask.long)
    return cost - worker.cached_price * worker.cached(held) if held else cost


def may_queue(worker: Worker, ask: RequestInfo) -> bool:
    """Whether a request may wait in a worker's engine: one of its size at a time."""
    return worker.role is not DECODE or worker.prefill_tokens < ask.prompt_tokens


def choose_prefill(
    workers: Iterable[Worker],
    ask: RequestInfo,
    now: float,
    held: PrefixHolders,
    tried: frozenset[Worker],
    links: KvLinks,
    decodes: Iterable[Worker],
) -> tuple[Worker, float, int] | None:
    """Name the prefill worker that would be done soonest, when, and what it has cached.

    One that can hand nothing over to any of `decodes` is idle, and would be chosen each time.
    """
    best: tuple[Worker, float, int] | None = None
    for worker in workers:
        if not worker.takes(now) or worker in tried or not _may_prefill(worker, ask):
            continue
        if links.bars and links.is_barred(worker, None, now):
            continue
        cached = worker.cached(held)
        seconds = worker.ttft_s(ask, now, cached)
        if best is not None and (seconds, worker.served) >= (best[1], best[0].served):
            continue
        if links.reaches(worker, decodes, now):
            best = worker, seconds, cached
    return best


def stands(lease: Lease, now: float, within_s: float) -> bool:
    """Whether the decode worker that was chosen before the prefill is still good for the rest."""
    worker, halves = lease.worker, lease.decision.handover
    if not is_well(lease):
        return False
    if halves is None or not halves.tokens or within_s == inf:
        return True
    return worker.wait_s(now, for_long=lease.ask.long) + halves.transfer_s <= within_s


def is_well(lease: Lease) -> bool:
    """Whether a lease's worker answers, as far as is known."""
    return lease.worker.up and (not lease.worker.barred or lease.trial)


def instead(
    workers: Iterable[Worker], lease: Lease, now: float, links: KvLinks, within_s: float
) -> Worker | None:
    """Name another decode worker for the rest of a hand-over: the one with the least ahead."""
    ask, first, halves = lease.ask, lease.prefill, lease.decision.handover
    if first is None or halves is None:
        return None
    found = [
        (wait_s, worker.requests, worker.served, worker)
        for worker in workers
        if worker.role is DECODE
        and worker is not lease.worker
        and worker.takes(now)
        and worker.may_hold(ask)
        and not slots.must_wait(worker, now)
        and fits(worker, ask, now)
        and not links.is_shut(first.worker, worker, now)
        and (wait_s := worker.wait_s(now, for_long=ask.long)) + halves.transfer_s <= within_s
    ]
    return min(found)[-1] if found else None


def _may_prefill(worker: Worker, ask: RequestInfo) -> bool:
    return ask.largest_prompt - ask.prompt_error < worker.limit


def refine(decision: Decision, view: View) -> Decision | None:
    """Hand over what a rule that knows nothing of it gave to a decode worker, if that is better.

    None if it has to wait until the decode worker has room.
    """
    handing, worker = view.handing, decision.worker
    if handing is None or decision.handover is not None or worker.role is not DECODE:
        return decision
    if handing.offer(worker, view, whole_s(worker, view)) is None:
        return decision
    if not handing.may_begin(worker, view):
        return None
    return replace(handing.decision(worker, view), scores=decision.scores)


def why(decision: Decision, view: View) -> str:
    """Say what became of the question."""
    ask, worker = view.ask, decision.worker
    if decision.handover is not None:
        return HandoverVerdict.HANDED_OVER
    if ask.whole:
        return ask.whole
    if not view.pool.prefills:
        return HandoverVerdict.NO_PREFILL
    if view.handing is None:
        return HandoverVerdict.PREFILL_BUSY
    if worker.role is not DECODE:
        return HandoverVerdict.ELSEWHERE
    handing, links = view.handing, view.handing.links
    if links.is_shut(handing.prefill, worker, view.now):
        transfer_s = handing.transfer_s(worker, view)
        if handing.worth(worker, view, whole_s(worker, view), transfer_s) is not None:
            return HandoverVerdict.PREFILL_BUSY
    return (
        HandoverVerdict.CACHED
        if 2 * worker.cached(view.held) > ask.prompt_tokens
        else HandoverVerdict.NOT_WORTH_IT
    )

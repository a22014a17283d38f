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
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Final

from proxy.core.fleet import slots
from proxy.core.fleet.kv_links import KvLinks
from proxy.core.fleet.kv_usage import KV_FULL, more
from proxy.core.fleet.leases import Decision, HandoverDecision, Lease
from proxy.core.fleet.worker import STALL, Held, Worker
from proxy.core.learned.transfer_time import TransferTimes
from proxy.core.model.types import Reason, RequestInfo, Role

if TYPE_CHECKING:
    from proxy.core.routing.view import View

DECODE, HANDOVER = Role.DECODE, Reason.HANDOVER  # looked up once: see reading.py
PATIENCE = 0.5  # of the time that one may wait at all, for room to be handed over
GAIN, GAIN_S = 0.03, 0.002  # a hand-over that gains less, as a share and in seconds, is none


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


@dataclass(slots=True)
class HandoverOffer:
    """What a hand-over would be for one request, now."""

    prefill: Worker  # who would prefill
    prefill_s: float  # until that has answered
    cached_tokens: int  # there
    transfers: TransferTimes
    above: int | None  # tokens to prefill; None = where it costs less
    links: KvLinks
    within_s: float = inf  # that a transfer may take, with the wait for it
    shorts_per_s: float = 0.0  # that each decode worker is likely to be asked for
    stands: bool = False  # whether it may wait in the decode worker's engine for a seat

    def tokens(self, worker: Worker, view: View) -> int:
        """Count what would have to be transferred to a decode worker."""
        prompt, held = view.ask.prompt_tokens, view.held
        return max(prompt - worker.cached(held), 1) if held else prompt or 1

    def transfer_s(self, worker: Worker, view: View) -> float:
        """Predict how long that takes."""
        time = self.transfers.of(self.prefill.name, worker.name)
        return time.seconds(self.tokens(worker, view))

    def cost_s(self, worker: Worker, view: View, transfer_s: float) -> float:
        """Reckon what it costs everybody, as `adaptive` reckons the whole."""
        ask, pace = view.ask, worker.pace
        step_s = pace.step_s(worker.decoding)
        output_s = worker.output_price * ask.expected_output * ask.samples
        return self.prefill_s + self.wait_s(worker, view) + transfer_s + step_s + output_s

    def wait_s(self, worker: Worker, view: View) -> float:
        """Reckon for how long what a decode worker prefills itself outlasts the prefill."""
        if not (worker.prefill_tokens or worker.strange_tokens):
            return 0.0
        return max(worker.wait_s(view.now, for_long=view.ask.long) - self.prefill_s, 0.0)

    def harm_s(self, worker: Worker, view: View) -> float:
        """Reckon what a decode worker's own prefill costs beyond what `adaptive` reckons of it.

        Its pace is that of the short prompts that it prefills itself; of long ones, whose tokens
        are dearer, the prefill worker has the word. While chunks of a prompt are computed those who
        decode get hardly a token: they lose all of the time but one step, not a part of it. Shorts
        that come meanwhile wait. And to wait for a seat takes a hand-over no time until its
        prefill is done.
        """
        tokens, here, there = self.tokens(worker, view), worker.pace, self.prefill.pace
        token_s = here.token_s
        if there.length and there.token_s > token_s:
            token_s += (there.token_s - token_s) * min(tokens / there.length, 1.0)
        prefill_s = token_s * tokens
        lost_s = max(prefill_s - here.step_s(worker.decoding), STALL * prefill_s)
        others_s = lost_s * (worker.decoding + worker.strangers)
        more_s = max(prefill_s + others_s - worker.prompt_price * tokens, 0.0)
        tide_s = self.shorts_per_s * prefill_s * prefill_s / 2.0
        return more_s + tide_s + min(slots.wait_s(worker, view.now), self.prefill_s)

    def offer(self, worker: Worker, view: View, whole_s: float) -> float | None:
        """Reckon what a hand-over to a decode worker costs; None if it had better do it all.

        That costs `whole_s`.
        """
        if worker.role is not DECODE:
            return None
        transfer_s = self.transfer_s(worker, view)
        if not self.may(worker, view, transfer_s):
            return None
        return self.worth(worker, view, whole_s, transfer_s)

    def worth(self, worker: Worker, view: View, whole_s: float, transfer_s: float) -> float | None:
        """Reckon the same, whether or not there is a link to that decode worker."""
        cost_s = self.cost_s(worker, view, transfer_s)
        if self.above is not None:
            return cost_s if self.tokens(worker, view) > self.above else None
        whole_s += self.harm_s(worker, view)
        return cost_s if cost_s * (1.0 + GAIN) + GAIN_S < whole_s else None

    def may(self, worker: Worker, view: View, transfer_s: float) -> bool:
        """Whether a transfer to a decode worker has reason to succeed, and in time."""
        now = view.now
        if self.links.is_shut(self.prefill, worker, now):
            return False
        if worker.prefill_tokens or worker.strange_tokens:
            transfer_s += worker.wait_s(now, for_long=view.ask.long)
        return transfer_s <= self.within_s

    def is_seated(self, worker: Worker, view: View) -> bool:
        """Whether a decode worker has a seat by the time that the prefill is done."""
        return self.stands or not slots.are_taken(worker, view.now, self.prefill_s)

    def may_begin(self, worker: Worker, view: View) -> bool:
        """Whether a decode worker has room now, and a seat by the time that the prefill is done."""
        return self.is_seated(worker, view) and fits(worker, view.ask, view.now)

    def decision(self, worker: Worker, view: View) -> Decision:
        """Write down a hand-over to a decode worker."""
        tokens, transfer_s = self.tokens(worker, view), self.transfer_s(worker, view)
        handover = HandoverDecision(
            self.prefill, self.cached_tokens, tokens, self.prefill_s, transfer_s
        )
        ttft_s = self.prefill_s + self.wait_s(worker, view) + transfer_s
        ttft_s += worker.pace.step_s(worker.decoding)
        cached = worker.cached(view.held)
        return Decision(worker, HANDOVER, ttft_s, (), cached, handover)


def whole_s(worker: Worker, view: View) -> float:
    """Reckon what a request costs a decode worker and those on it, prompt and all."""
    ask, now, held = view.ask, view.now, view.held
    cost = worker.flat_price + worker.prompt_price * ask.prompt_tokens
    cost += worker.output_price * ask.expected_output * ask.samples
    cost += worker.wait_s(now, for_long=ask.long)
    return cost - worker.cached_price * worker.cached(held) if held else cost


def fits(worker: Worker, ask: RequestInfo, now: float) -> bool:
    """Whether a decode worker's cache has room for a request right now, as far as is known."""
    capacity = worker.kv_capacity
    if not capacity or not worker.requests or not (held := worker.kv_held):
        return True
    need = ask.prompt_tokens + ask.expected_output * ask.samples
    return held + more(worker, now) + need <= KV_FULL * capacity


def may_queue(worker: Worker, ask: RequestInfo) -> bool:
    """Whether a request may wait in a worker's engine: one of its size at a time."""
    return worker.role is not DECODE or worker.prefill_tokens < ask.prompt_tokens


def choose_prefill(
    workers: Iterable[Worker],
    ask: RequestInfo,
    now: float,
    held: Held,
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
        and not slots.are_taken(worker, now)
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

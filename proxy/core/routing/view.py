"""What a routing rule is shown, and what it must be able to say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from proxy.core.fleet import slots
from proxy.core.fleet.kv_links import KvLinks
from proxy.core.fleet.kv_usage import KV_FULL, more
from proxy.core.fleet.leases import Decision, HandoverDecision
from proxy.core.fleet.pool import Pool
from proxy.core.fleet.worker import PREFILL_STALL_SHARE, PrefixHolders, Worker
from proxy.core.learned.traffic import Traffic
from proxy.core.learned.transfer_time import TransferTimes
from proxy.core.model.role import Role
from proxy.core.model.types import Reason, RequestInfo

WRONG = 2  # the misfit of the other size's pool

SHORT_REASONS = Reason.SHORT_POOL, Reason.GENERAL_POOL, Reason.SPILL_TO_LONG
LONG_REASONS = Reason.LONG_POOL, Reason.GENERAL_POOL, Reason.SPILL_TO_SHORT
ONLY_CHOICE, DECODE_POOL = Reason.ONLY_CHOICE, Reason.DECODE_POOL
DECODE, HANDOVER = Role.DECODE, Reason.HANDOVER
GAIN, GAIN_S = 0.03, 0.002  # a hand-over that gains less, as a share and in seconds, is none


@dataclass(slots=True)
class View:
    """The moment of one decision."""

    ask: RequestInfo
    now: float
    candidates: list[Worker]  # each may be given it now; never empty
    pool: Pool  # all that is live of the model
    traffic: Traffic
    held: PrefixHolders  # how much of the prompt is cached, and where
    longs_waiting: bool  # in the router's queue, for this model
    tried: frozenset[Worker]
    explain: bool  # whether somebody wants to see the scores
    handing: HandoverOffer | None = None  # what a hand-over would be, where there may be one


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
        lost_s = max(prefill_s - here.step_s(worker.decoding), PREFILL_STALL_SHARE * prefill_s)
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
        return self.stands or not slots.must_wait(worker, view.now, self.prefill_s)

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


class Rule:
    """A way to choose. One file each; the registry knows them by name."""

    name: ClassVar[str]
    by_size: ClassVar[bool] = False  # whether longs and shorts are different to it
    affine: ClassVar[bool] = False  # whether it heeds what is cached where

    def choose(self, view: View) -> Decision | None:
        """Choose a worker, or none: then the request waits."""
        raise NotImplementedError

    def rank(self, worker: Worker) -> float:
        """Say where a worker stands in a group too large to be looked at whole; least first."""
        raise NotImplementedError

    def note(self, worker: Worker, view: View) -> str:  # noqa: ARG002
        """Say something of a candidate that was given no score."""
        return f"{worker.requests} requests"


def fits(worker: Worker, ask: RequestInfo, now: float) -> bool:
    """Whether a decode worker's cache has room for a request right now, as far as is known."""
    capacity = worker.kv_capacity
    if not capacity or not worker.requests or not (held := worker.kv_held):
        return True
    need = ask.prompt_tokens + ask.expected_output * ask.samples
    return held + more(worker, now) + need <= KV_FULL * capacity


def reason_for(worker: Worker, view: View) -> Reason:
    """Say why a worker was right, where its pool and its load decided."""
    own, general, other = LONG_REASONS if view.ask.long else SHORT_REASONS
    misfit = worker.misfit_long if view.ask.long else worker.misfit_short
    if not misfit:
        return own
    if worker.role is DECODE:
        return DECODE_POOL
    if len(view.candidates) == 1:
        return ONLY_CHOICE
    return general if misfit < WRONG else other


def suits(worker: Worker, *, long: bool) -> bool:
    """Whether a worker is there for requests of this size, be it among others."""
    return (worker.misfit_long if long else worker.misfit_short) < WRONG


def own_pool_is_full(view: View) -> bool:
    """Whether a worker meant for this size is there, well, and merely full."""
    now = view.now
    return any(w.full and w.lets_pass(now) for w in _untried_of_own_pool(view))


def own_pool_is_left(view: View) -> bool:
    """Whether a worker meant for this size is worth the wait: well, or busy, or being tried."""
    if any(suits(worker, long=view.ask.long) for worker in view.candidates):  # nearly always
        return True
    now = view.now
    return any(
        not w.barred or w.breaker.busy or now >= w.breaker.until for w in _untried_of_own_pool(view)
    )


def _untried_of_own_pool(view: View) -> Iterator[Worker]:
    """Name the workers meant for this size that hold it and have not failed it."""
    ask, pool = view.ask, view.pool
    fitting = {group.limit for group in pool.holding(ask)}
    for worker in pool.for_longs if ask.long else pool.for_shorts:
        if worker.limit in fitting and worker not in view.tried:
            yield worker

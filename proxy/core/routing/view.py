"""The input and interface of routing rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from proxy.core.fleet import slots
from proxy.core.fleet.kv_links import KvLinks
from proxy.core.fleet.kv_usage import KV_FULL, uncharged_tokens
from proxy.core.fleet.leases import CacheWait, Decision, HandoverDecision
from proxy.core.fleet.pool import Pool
from proxy.core.fleet.worker import PREFILL_STALL_SHARE, PrefixHolders, Worker
from proxy.core.learned.sessions import Session
from proxy.core.learned.traffic import Traffic
from proxy.core.learned.transfer_time import TransferTimes
from proxy.core.model.role import Role
from proxy.core.model.types import Reason, RequestInfo
from proxy.core.queue.cache_waits import CacheWaits

MISFIT_OTHER_POOL = 2

SHORT_REASONS = Reason.SHORT_POOL, Reason.GENERAL_POOL, Reason.SPILL_TO_LONG
LONG_REASONS = Reason.LONG_POOL, Reason.GENERAL_POOL, Reason.SPILL_TO_SHORT
ONLY_CHOICE, DECODE_POOL = Reason.ONLY_CHOICE, Reason.DECODE_POOL
DECODE, HANDOVER = Role.DECODE, Reason.HANDOVER
MIN_GAIN_SHARE, MIN_GAIN_S = 0.03, 0.002  # a hand-over must gain more (share, seconds)


@dataclass(slots=True)
class View:
    """State of one decision."""

    info: RequestInfo
    now: float
    candidates: list[Worker]  # never empty
    pool: Pool  # the model's live workers
    traffic: Traffic
    cached_prefixes: PrefixHolders  # cached prefix lengths and their workers
    tried: frozenset[Worker]
    why_whole: str  # why it cannot be split; empty if it can
    explain: bool
    longs_waiting: bool = False  # queued, of this model
    offer: HandoverOffer | None = None
    session: Session | None = None  # that the prompt extends
    cache_holders: Sequence[Worker] = ()  # of its cache, among many workers
    cache_waits: CacheWaits | None = None  # None: it may not wait for a cache
    first_token_due: float = inf  # of a request that may wait for a cache
    wait_until: float = inf  # end of the longest wait, if other workers are in time
    cache_wait: CacheWait | None = None  # why no worker is chosen


@dataclass(slots=True)
class HandoverOffer:
    """A prefill worker that can take the prefill leg of one request."""

    prefill: Worker
    prefill_s: float  # until its response
    cached_tokens: int  # on the prefill worker
    transfers: TransferTimes
    min_tokens: int | None  # threshold in tokens; None: compare costs
    links: KvLinks
    max_transfer_s: float = inf  # limit of wait and transfer
    shorts_per_s: float = 0.0  # expected per decode worker
    may_wait_for_slot: bool = False  # in the decode engine

    def tokens_to_transfer(self, worker: Worker, view: View) -> int:
        prompt, prefixes = view.info.prompt_tokens, view.cached_prefixes
        return max(prompt - worker.cached_tokens(prefixes), 1) if prefixes else prompt or 1

    def transfer_s(self, worker: Worker, view: View) -> float:
        time = self.transfers.estimate_for(self.prefill.name, worker.name)
        return time.seconds(self.tokens_to_transfer(worker, view))

    def cost_s(self, worker: Worker, view: View, transfer_s: float) -> float:
        """Return the cost to all requests, comparable with `adaptive`."""
        info, pace = view.info, worker.pace
        step_s = pace.step_s(worker.num_decoding)
        output_s = worker.output_price * info.expected_output * info.samples
        return self.prefill_s + self.wait_s(worker, view) + transfer_s + step_s + output_s

    def wait_s(self, worker: Worker, view: View) -> float:
        """Return how long the worker's own prefills outlast the prefill leg."""
        if not (worker.prefill_tokens or worker.foreign_tokens):
            return 0.0
        return max(worker.wait_s(view.now, for_long=view.info.long) - self.prefill_s, 0.0)

    def harm_s(self, worker: Worker, view: View) -> float:
        """Return a decode worker's prefill cost beyond what `adaptive` counts.

        Its pace is learned from short prompts; for long ones the prefill worker's counts. Chunks
        stall decodes for all but one step. A hand-over waits for a slot only after its prefill.
        """
        tokens, pace, remote = self.tokens_to_transfer(worker, view), worker.pace, self.prefill.pace
        token_s = pace.token_s
        if remote.handover_tokens and remote.token_s > token_s:
            token_s += (remote.token_s - token_s) * min(tokens / remote.handover_tokens, 1.0)
        prefill_s = token_s * tokens
        lost_s = max(prefill_s - pace.step_s(worker.num_decoding), PREFILL_STALL_SHARE * prefill_s)
        others_s = lost_s * (worker.num_decoding + worker.foreign_requests)
        more_s = max(prefill_s + others_s - worker.prompt_price * tokens, 0.0)
        later_shorts_s = self.shorts_per_s * prefill_s * prefill_s / 2.0
        return more_s + later_shorts_s + min(slots.wait_s(worker, view.now), self.prefill_s)

    def cost_if_better(self, worker: Worker, view: View, whole_s: float) -> float | None:
        """Return a hand-over's cost; None if `whole_s` is less."""
        if worker.role is not DECODE:
            return None
        transfer_s = self.transfer_s(worker, view)
        if not self.may_transfer(worker, view, transfer_s):
            return None
        return self.cost_without_link_check(worker, view, whole_s, transfer_s)

    def cost_without_link_check(
        self, worker: Worker, view: View, whole_s: float, transfer_s: float
    ) -> float | None:
        cost_s = self.cost_s(worker, view, transfer_s)
        if self.min_tokens is not None:
            return cost_s if self.tokens_to_transfer(worker, view) > self.min_tokens else None
        whole_s += self.harm_s(worker, view)
        return cost_s if cost_s * (1.0 + MIN_GAIN_SHARE) + MIN_GAIN_S < whole_s else None

    def may_transfer(self, worker: Worker, view: View, transfer_s: float) -> bool:
        """Return whether a transfer should succeed in time."""
        now = view.now
        if self.links.is_unusable(self.prefill, worker, now):
            return False
        if worker.prefill_tokens or worker.foreign_tokens:
            transfer_s += worker.wait_s(now, for_long=view.info.long)
        return transfer_s <= self.max_transfer_s

    def has_slot(self, worker: Worker, view: View) -> bool:
        """Return whether a slot is free by the end of the prefill."""
        return self.may_wait_for_slot or not slots.must_wait(worker, view.now, self.prefill_s)

    def may_begin(self, worker: Worker, view: View) -> bool:
        """Return whether room is free now, and a slot by the end of the prefill."""
        return self.has_slot(worker, view) and fits(worker, view.info, view.now)

    def decision(self, worker: Worker, view: View) -> Decision:
        tokens, transfer_s = self.tokens_to_transfer(worker, view), self.transfer_s(worker, view)
        handover = HandoverDecision(
            self.prefill, self.cached_tokens, tokens, self.prefill_s, transfer_s
        )
        ttft_s = self.prefill_s + self.wait_s(worker, view) + transfer_s
        ttft_s += worker.pace.step_s(worker.num_decoding)
        cached = worker.cached_tokens(view.cached_prefixes)
        return Decision(worker, HANDOVER, ttft_s, (), cached, handover)


class Rule:
    """A routing rule, one per file."""

    name: ClassVar[str]
    by_size: ClassVar[bool] = False  # distinguishes short and long
    affine: ClassVar[bool] = False  # uses cached prefixes

    def choose(self, view: View) -> Decision | None:
        """Return a decision; None lets the request wait."""
        raise NotImplementedError

    def rank(self, worker: Worker) -> float:
        """Return a sort key for groups too large to scan; least first."""
        raise NotImplementedError

    def note(self, worker: Worker, view: View) -> str:  # noqa: ARG002
        """Describe a candidate without a score."""
        return f"{worker.requests} requests"


def fits(worker: Worker, info: RequestInfo, now: float) -> bool:
    """Return whether the KV cache has room, if known."""
    capacity = worker.kv_capacity
    if not capacity or not worker.requests or not (held := worker.kv_held):
        return True
    need = info.prompt_tokens + info.expected_output * info.samples
    return held + uncharged_tokens(worker, now) + need <= KV_FULL * capacity


def reason_for(worker: Worker, view: View) -> Reason:
    own, general, other = LONG_REASONS if view.info.long else SHORT_REASONS
    misfit = worker.misfit_long if view.info.long else worker.misfit_short
    if not misfit:
        return own
    if worker.role is DECODE:
        return DECODE_POOL
    if len(view.candidates) == 1:
        return ONLY_CHOICE
    return general if misfit < MISFIT_OTHER_POOL else other


def suits(worker: Worker, *, long: bool) -> bool:
    return (worker.misfit_long if long else worker.misfit_short) < MISFIT_OTHER_POOL


def own_pool_is_full(view: View) -> bool:
    """Return whether a healthy worker for this size is merely full."""
    now = view.now
    return any(w.is_full and w.may_send(now) for w in _untried_of_own_pool(view))


def own_pool_is_left(view: View) -> bool:
    """Return whether a worker for this size is worth waiting for."""
    if any(suits(worker, long=view.info.long) for worker in view.candidates):  # nearly always
        return True
    now = view.now
    return any(
        not w.is_barred or w.breaker.busy or now >= w.breaker.until
        for w in _untried_of_own_pool(view)
    )


def _untried_of_own_pool(view: View) -> Iterator[Worker]:
    info, pool = view.info, view.pool
    fitting = {group.context_limit for group in pool.groups_for(info)}
    for worker in pool.for_longs if info.long else pool.for_shorts:
        if worker.context_limit in fitting and worker not in view.tried:
            yield worker

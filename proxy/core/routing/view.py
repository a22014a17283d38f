"""What a routing rule is shown, and what it must be able to say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.pool import Pool
from proxy.core.fleet.worker import Held, Worker
from proxy.core.learned.traffic import Traffic
from proxy.core.model.types import Reason, RequestInfo, Role
from proxy.core.routing.handover_cost import HandoverOffer

WRONG = 2  # the misfit of the other size's pool

SHORT_REASONS = Reason.SHORT_POOL, Reason.GENERAL_POOL, Reason.SPILL_TO_LONG
LONG_REASONS = Reason.LONG_POOL, Reason.GENERAL_POOL, Reason.SPILL_TO_SHORT
ONLY_CHOICE, DECODE_POOL = Reason.ONLY_CHOICE, Reason.DECODE_POOL
DECODE = Role.DECODE


@dataclass(slots=True)
class View:
    """The moment of one decision."""

    ask: RequestInfo
    now: float
    candidates: list[Worker]  # each may be given it now; never empty
    pool: Pool  # all that is live of the model
    traffic: Traffic
    held: Held  # how much of the prompt is cached, and where
    longs_waiting: bool  # in the router's queue, for this model
    tried: frozenset[Worker]
    explain: bool  # whether somebody wants to see the scores
    handing: HandoverOffer | None = None  # what a hand-over would be, where there may be one


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

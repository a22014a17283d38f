"""Refuse a request at once if its first token would come too late.

Idea: serving a client that has given up is wasted. A request predicted to miss its target is
refused with a retry time. If its prefill alone exceeds the target, only the wait counts. A client's
deadline replaces the target, and always counts.

How it fails: requests are accepted until a worker's pace and the queue's speed are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from proxy.core.fleet.leases import Decision
from proxy.core.model import refusals
from proxy.core.model.types import Refusal, RequestInfo
from proxy.core.queue.queue import Queue
from proxy.core.queue.ticket import Ticket
from proxy.core.queue.urgency import Urgency
from proxy.core.tenants.tenants import Rank

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 120.0


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Target seconds to the first token and per later token, by class."""

    ttft_s: Mapping[Rank, float] = field(default_factory=dict)
    tpot_s: Mapping[Rank, float] = field(default_factory=dict)

    def ttft_of(self, info: RequestInfo) -> float | None:
        tenant = info.tenant
        if tenant is not None and tenant.spec.ttft_s is not None and info.rank is tenant.spec.rank:
            return tenant.spec.ttft_s
        return self.ttft_s.get(info.rank)

    def tpot_of(self, info: RequestInfo) -> float | None:
        tenant = info.tenant
        if tenant is not None and tenant.spec.tpot_s is not None and info.rank is tenant.spec.rank:
            return tenant.spec.tpot_s
        return self.tpot_s.get(info.rank)

    def left_s(self, info: RequestInfo, now: float) -> float | None:
        """Return the time until a first token is due."""
        return self.ttft_of(info) if info.deadline == inf else info.deadline - now

    def due(self, info: RequestInfo, now: float) -> float:
        left_s = self.left_s(info, now)
        return inf if left_s is None else now + left_s


NO_TARGETS = AdmissionSettings()


def placed_too_late(
    settings: AdmissionSettings, info: RequestInfo, decision: Decision, now: float
) -> Refusal | None:
    target_s = settings.left_s(info, now)
    handover = decision.handover
    worker = decision.worker if handover is None else handover.prefill
    if target_s is None or not worker.pace.prefills:
        return None
    cached = decision.cached_tokens if handover is None else handover.cached_tokens
    own_s = worker.pace.first_token_s(info.prompt_tokens - cached, 0.0, cached)
    wait_s = worker.wait_s(now, for_long=info.long)
    if handover is not None:
        own_s += handover.transfer_s
        # The decode worker's own prefills go first.
        wait_s += max(decision.worker.wait_s(now, for_long=info.long) - handover.prefill_s, 0.0)
    return _refuse_late(info, target_s, wait_s, own_s)


def queued_too_late(
    settings: AdmissionSettings, info: RequestInfo, queue: Queue, urgency: Urgency, now: float
) -> Refusal | None:
    target_s = settings.left_s(info, now)
    if target_s is None or (wait_s := queue.wait_s(now, queue.ahead_of(info, urgency.key))) is None:
        return None
    return _refuse_late(info, target_s, wait_s, urgency.prefill_s)


def _refuse_late(info: RequestInfo, target_s: float, wait_s: float, own_s: float) -> Refusal | None:
    by_client = info.deadline < inf
    for_wait_s = target_s - own_s if own_s < target_s or by_client else target_s
    if wait_s <= for_wait_s:
        return None
    retry_s = min(max(wait_s - for_wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
    if by_client:
        return refusals.deadline(wait_s + own_s, target_s, retry_s)
    return refusals.too_slow(wait_s + own_s, target_s, retry_s)


def waited_too_long(ticket: Ticket, queue: Queue, now: float) -> Refusal:
    retry_s = queue.retry_after_s(now)
    if ticket.for_client:
        return refusals.deadline_in_queue(now - ticket.since, retry_s)
    return refusals.queue_timeout(ticket.deadline - ticket.since, retry_s)

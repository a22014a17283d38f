"""Refuse a request at once if its first token would come too late.

Idea: serving a client that has given up is wasted. A request predicted to miss its target is
refused with a retry time. If its prefill alone exceeds the target, only the wait counts.

How it fails: requests are accepted until a worker's pace and the queue's speed are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.core.fleet.leases import Decision
from proxy.core.fleet.worker import Worker
from proxy.core.model import refusals
from proxy.core.model.types import Refusal, RequestInfo
from proxy.core.queue.queue import Queue
from proxy.core.tenants.tenants import Rank

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 120.0


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Target seconds to the first token, per class."""

    ttft_s: Mapping[Rank, float] = field(default_factory=dict)


def placed_too_late(
    settings: AdmissionSettings, ask: RequestInfo, decision: Decision, now: float
) -> Refusal | None:
    target_s = settings.ttft_s.get(ask.rank)
    halves = decision.handover
    worker = decision.worker if halves is None else halves.prefill
    if target_s is None or not worker.pace.prefills:
        return None
    cached = decision.cached_tokens if halves is None else halves.cached_tokens
    own_s = worker.pace.first_token_s(ask.prompt_tokens - cached, 0.0, cached)
    wait_s = worker.wait_s(now, for_long=ask.long)
    if halves is not None:
        own_s += halves.transfer_s
        # The decode worker's own prefills go first.
        wait_s += max(decision.worker.wait_s(now, for_long=ask.long) - halves.prefill_s, 0.0)
    return _judged(target_s, wait_s, own_s)


def queued_too_late(
    settings: AdmissionSettings, ask: RequestInfo, queue: Queue, likely: Worker | None, now: float
) -> Refusal | None:
    target_s = settings.ttft_s.get(ask.rank)
    if target_s is None or (wait_s := queue.wait_s(now, queue.ahead_of(ask))) is None:
        return None
    own_s = 0.0
    if likely is not None and likely.pace.prefills:
        own_s = likely.pace.first_token_s(ask.prompt_tokens, 0.0, 0)
    return _judged(target_s, wait_s, own_s)


def _judged(target_s: float, wait_s: float, own_s: float) -> Refusal | None:
    for_wait_s = target_s - own_s if own_s < target_s else target_s
    if wait_s <= for_wait_s:
        return None
    retry_s = min(max(wait_s - for_wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
    return refusals.too_slow(wait_s + own_s, target_s, retry_s)

"""Whether a request can still be answered in time; if not, it is better told so at once.

Idea: a client that will give up after some seconds is served by nobody if it waits for them, and
takes its worker's time from those who would stay. A request whose first token is predicted to come
later than its target is refused, with the time after which the wait should be short enough. What
its own prompt takes does not count against it where that alone is more than the target: no wait
makes it shorter.

How it fails: predictions are of this router's making. Until a worker's pace is learnt, and where
nothing tells how fast the queue moves, everybody is let in.
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

LEAST_RETRY_S, LONGEST_RETRY_S = 1.0, 120.0


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What the operator chose: seconds to the first token, for each class that has a target."""

    ttft_s: Mapping[Rank, float] = field(default_factory=dict)


def placed_too_late(
    settings: AdmissionSettings, ask: RequestInfo, decision: Decision, now: float
) -> Refusal | None:
    """Refuse a request that its worker would begin too late."""
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
        # What the decode worker prefills itself comes first there.
        wait_s += max(decision.worker.wait_s(now, for_long=ask.long) - halves.prefill_s, 0.0)
    return _judged(target_s, wait_s, own_s)


def queued_too_late(
    settings: AdmissionSettings, ask: RequestInfo, queue: Queue, likely: Worker | None, now: float
) -> Refusal | None:
    """Refuse a request whose turn in the queue would come too late."""
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
    retry_s = min(max(wait_s - for_wait_s, LEAST_RETRY_S), LONGEST_RETRY_S)
    return refusals.too_slow(wait_s + own_s, target_s, retry_s)

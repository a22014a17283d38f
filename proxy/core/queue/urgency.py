"""The order of a tenant's waiting requests.

Idea: the least sum of arrival and `PREFILL_WEIGHT` predicted prefills goes first, or the latest
start by a deadline. A mostly cached turn passes a fresh long prompt, which waits for no request
that arrives later than `PREFILL_WEIGHT` times its prefill, nor after a quarter of the longest wait.
The key is fixed on arrival and never before it.

How it fails: a prefix that is evicted or cached meanwhile does not change the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from proxy.core.fleet.roster import Roster
from proxy.core.fleet.worker import PrefixHolders, Worker
from proxy.core.model.role import Role
from proxy.core.model.types import RequestInfo
from proxy.core.routing.cached_tokens import cached_tokens, session_of

PREFILL_WEIGHT = 4.0  # chosen with `benchmarks.turn_priority`
MAX_WAIT_SHARE = 0.25
MAX_WORKERS = 64  # that are compared


@dataclass(frozen=True, slots=True)
class Urgency:
    """A queued request's predicted prefill and sort key."""

    prefill_s: float = 0.0
    key: float = 0.0
    latest_start: float = inf  # by the client's deadline


NOT_URGENT = Urgency()


def urgency_of(
    roster: Roster, info: RequestInfo, now: float, wait_s: float, due: float = inf
) -> Urgency:
    """Return the urgency of a request that may wait `wait_s`; its first token is `due`."""
    prefill_s, is_learnt = predict_prefill_s(roster, info)
    key, latest = now + min(PREFILL_WEIGHT * prefill_s, MAX_WAIT_SHARE * wait_s), due - prefill_s
    key = min(key, latest) if latest >= now else key
    if not is_learnt:
        prefill_s = 0.0  # good enough for an order only
    by_client = inf if due == inf else info.deadline
    return Urgency(prefill_s, key, by_client - prefill_s)


def predict_prefill_s(roster: Roster, info: RequestInfo) -> tuple[float, bool]:
    """Return the least predicted prefill, and whether all paces are learned."""
    pool = roster.pool(info.model)
    matches = roster.prefixes.matches(info.prefix) if info.prefix else []
    prefixes = cached_tokens(roster, info, matches, session_of(roster, info))
    best, is_learnt = inf, True
    for worker in _likely_workers(pool.all, prefixes) + pool.prefills[:MAX_WORKERS]:
        if worker.may_fit(info) and not (info.long and worker.role is Role.SHORT):
            cached = worker.cached_tokens(prefixes)
            seconds = worker.pace.first_token_s(info.prompt_tokens - cached, 0.0, cached)
            is_learnt = is_learnt and worker.pace.prefills > 0
            best = min(best, seconds)
    return (0.0, False) if best == inf else (best, is_learnt)


def _likely_workers(workers: list[Worker], prefixes: PrefixHolders) -> list[Worker]:
    """Return some workers, those with most of the prompt first."""
    if len(workers) <= MAX_WORKERS:
        return workers
    holders = prefixes[0][1] if prefixes else 0
    return [w for w in workers if w.bit & holders][:MAX_WORKERS] + workers[:MAX_WORKERS]

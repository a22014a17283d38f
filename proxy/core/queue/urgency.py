"""The order of a tenant's waiting requests.

Idea: the least sum of arrival and `WEIGHT` predicted prefills goes first, or the latest start by a
deadline. A mostly cached turn passes a fresh long prompt, which waits for no request that arrives
later than `WEIGHT` times its prefill. The key is fixed on arrival and never before it.

How it fails: a prefix that is evicted or cached meanwhile does not change the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from proxy.core.fleet.roster import Roster
from proxy.core.learned.prefix_index import COVERED
from proxy.core.model.types import RequestInfo

WEIGHT = 4.0  # chosen with `benchmarks.turn_priority`


@dataclass(frozen=True, slots=True)
class Urgency:
    """A queued request's predicted prefill and sort key."""

    prefill_s: float = 0.0
    key: float = 0.0
    latest_start: float = inf  # by the client's deadline


NOT_URGENT = Urgency()


def urgency_of(roster: Roster, ask: RequestInfo, now: float, due: float) -> Urgency:
    """Return the urgency of a request that arrives now; its first token is `due`."""
    prefill_s, is_learnt = prefill_left_s(roster, ask)
    key, latest = now + WEIGHT * prefill_s, due - prefill_s
    key = min(key, latest) if latest >= now else key
    if not is_learnt:
        prefill_s = 0.0  # good enough for an order only
    return Urgency(prefill_s, key, ask.deadline - prefill_s)


def prefill_left_s(roster: Roster, ask: RequestInfo) -> tuple[float, bool]:
    """Return the least predicted prefill, and whether the worker's pace is learnt."""
    workers = roster.pool(ask.model).all
    if not workers:
        return 0.0, False
    likely, cached = workers[0], 0
    if ask.prefix and (matches := roster.prefixes.matches(ask.prefix)):
        blocks, holders = matches[0]
        likely = next((worker for worker in workers if worker.bit & holders), likely)
        if likely.bit & holders:
            per_byte = ask.prompt_tokens / ask.prefix_bytes
            cached = min(int(COVERED[blocks] * per_byte), ask.prompt_tokens)
    pace = likely.pace
    return pace.first_token_s(ask.prompt_tokens - cached, 0.0, cached), pace.prefills > 0

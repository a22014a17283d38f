"""What the workers should have cached of a prompt: by the prefix index, and by its session."""

from __future__ import annotations

from proxy.core.fleet.roster import Roster
from proxy.core.fleet.worker import PrefixHolders
from proxy.core.learned.prefix_index import Matches
from proxy.core.learned.sessions import Session
from proxy.core.model.types import RequestInfo


def cached_tokens(
    roster: Roster, info: RequestInfo, matches: Matches, session: Session | None
) -> PrefixHolders:
    prefixes: PrefixHolders = []
    if matches:
        prefixes = roster.prefixes.matched_tokens(
            matches, info.prefix, info.prefix_bytes, info.bytes_before, info.prompt_tokens
        )
    may_extend = session is not None and (not info.pinned or info.stored_tokens > 0)
    if session is not None and may_extend and session.extends_nearly_all(info.prefix):
        prefixes = with_visits(prefixes, session, roster, info)
    return prefixes


def session_of(roster: Roster, info: RequestInfo) -> Session | None:
    session = roster.sessions.get(info.session) if info.session else None
    if session is None or not session.visits:
        return None
    return session if info.pinned or session.may_extend(info.prefix) else None


def with_visits(
    prefixes: PrefixHolders, session: Session, roster: Roster, info: RequestInfo
) -> PrefixHolders:
    """Replace estimates by what the session's visits left.

    What other workers hold is a common beginning.
    """
    left = _left_by_visits(prefixes, session, roster, info)
    visited = sum(bit for _, bit in left)
    masks: dict[int, int] = {}
    for tokens, holders in prefixes:
        if others := holders & ~visited:
            masks[tokens] = masks.get(tokens, 0) | others
    common, less_left = max(masks, default=0), visited
    for tokens, bit in left:
        if tokens > common:
            masks[tokens] = masks.get(tokens, 0) | bit
            less_left &= ~bit
    for tokens, holders in prefixes:
        if tokens >= common > 0:
            masks[common] |= less_left & holders
    return sorted(masks.items(), reverse=True)


def _left_by_visits(
    prefixes: PrefixHolders, session: Session, roster: Roster, info: RequestInfo
) -> PrefixHolders:
    """Return what each visited worker should still have; a session visits a worker once."""
    left: PrefixHolders = []
    for visit in session.visits:
        worker = roster.by_index.get(visit.worker)
        if worker is None or worker.up_since != visit.since:
            continue
        if worker.reports_prefixes and not info.stored_tokens:  # the journal has them
            continue
        tokens = visit.cached_tokens(worker.kv_capacity, worker.total_written)
        common_tokens = worker.cached_tokens(prefixes)
        if common_tokens and not visit.may_go_on(info.prefix):
            tokens = min(tokens, common_tokens)
        left.append((min(tokens, info.prompt_tokens), worker.bit))
    return left

"""Time limits for the start of a worker's response.

A response that is no stream begins when it is complete, so it gets extra time for its tokens. It
gets more while the worker computes, because a retry would take as long. The total is limited: an
engine may hang while its HTTP server lives.
"""

from __future__ import annotations

from math import inf

from proxy.core.fleet.leases import Lease

SLOW_STEP_S = 0.5  # without measured steps
LATE_FACTOR = 4.0  # times the predicted duration
MAX_WAIT_FACTOR = 2.0  # times the usual limit


def response_timeout_s(lease: Lease, usual_s: float) -> float:
    """Return the usual limit plus the time for the client's output limit.

    The model's limit gives no extra time: few responses reach it.
    """
    info, pace = lease.info, lease.worker.pace
    if info.stream or not info.output_tokens or not pace.steps:
        return usual_s
    return min(usual_s + info.output_tokens * _late_step_s(lease), MAX_WAIT_FACTOR * usual_s)


def extra_timeout_s(lease: Lease, now: float, usual_s: float, late_at: float = inf) -> float:
    """Return the extra time, until `late_at` at most, for a worker at its limit."""
    if not is_only_slow(lease, now):
        return 0.0
    return max(min(lease.charged_at + MAX_WAIT_FACTOR * usual_s, late_at) - now, 0.0)


def is_only_slow(lease: Lease, now: float) -> bool:
    """Return True if the worker computes and the request is no stream."""
    info = lease.info
    return info.needs_engine and not info.stream and lease.worker.shows_progress(now)


def decode_timeout_s(lease: Lease, within_s: float) -> float:
    """Return the time limit for a decode worker to prove that it fetched the blocks.

    The proof is a stream's first token, or the end of another response.
    """
    info = lease.info
    if info.stream or within_s == inf:
        return within_s
    output = info.output_tokens
    tokens = lease.worker.context_limit - info.largest_prompt if output is None else output
    return within_s + tokens * _late_step_s(lease)


def prefill_timeout_s(lease: Lease, least_s: float, usual_s: float) -> float:
    """Return the time limit of a prefill leg: as predicted, or as usual before any measurement."""
    first, handover = lease.prefill, lease.decision.handover
    if first is None or handover is None or not first.worker.pace.prefills:
        return usual_s
    return min(least_s + LATE_FACTOR * handover.prefill_s, usual_s)


def _late_step_s(lease: Lease) -> float:
    pace = lease.worker.pace
    return LATE_FACTOR * pace.step_s(lease.worker.num_decoding + 1) if pace.steps else SLOW_STEP_S

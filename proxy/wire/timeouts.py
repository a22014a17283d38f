"""How long a worker may take until its answer begins.

A stream begins with its first token, and any other answer when all of it is made: it has the time
that as many tokens may take, or a long one would be taken for a worker that hangs, and made again
elsewhere. Where nobody said how many, or more time is needed than that, it has more while the
worker is known to compute: to begin anew elsewhere would take as long again. Twice the usual is the
most: an engine may hang under a server that lives.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.fleet.leases import Lease

SLOW_STEP_S = 0.5  # of a worker of whose steps nothing is known
LATE = 4.0  # times what was predicted, a prefill or an answer is
MOST = 2.0  # times the usual, that an answer may take


def answer_patience_s(lease: Lease, usual_s: float) -> float:
    """Tell how long a worker may take: what is usual, and as long as the client's tokens take.

    The client's limit is believed, where it states one; of the model's own most use little.
    """
    ask, pace = lease.ask, lease.worker.pace
    if ask.stream or not ask.output_tokens or not pace.steps:
        return usual_s
    return min(usual_s + ask.output_tokens * _late_step_s(lease), MOST * usual_s)


def more_patience_s(lease: Lease, now: float, usual_s: float, late_at: float = inf) -> float:
    """Tell how much longer a worker has whose time is up; no longer than until `late_at`."""
    if not is_only_slow(lease, now):
        return 0.0
    return max(min(lease.charged_at + MOST * usual_s, late_at) - now, 0.0)


def is_only_slow(lease: Lease, now: float) -> bool:
    """Whether a worker that does not answer must be taken to be making the answer."""
    ask = lease.ask
    return ask.computes and not ask.stream and lease.worker.works(now)


def decode_patience_s(lease: Lease, within_s: float) -> float:
    """Tell how long a decode worker may take to show that it has read the blocks in time.

    A stream shows it by its first token, and any other answer by its last.
    """
    ask = lease.ask
    if ask.stream or within_s == inf:
        return within_s
    output = ask.output_tokens
    most = lease.worker.limit - ask.largest_prompt if output is None else output
    return within_s + most * _late_step_s(lease)


def prefill_patience_s(lease: Lease, least_s: float, usual_s: float) -> float:
    """Tell how long a prefill worker may take: one that hangs is not to cost ten minutes.

    Nobody knows how long a worker takes that has prefilled nothing yet: as long as is usual.
    """
    first, halves = lease.prefill, lease.decision.handover
    if first is None or halves is None or not first.worker.pace.prefills:
        return usual_s
    return min(least_s + LATE * halves.prefill_s, usual_s)


def _late_step_s(lease: Lease) -> float:
    pace = lease.worker.pace
    return LATE * pace.step_s(lease.worker.decoding + 1) if pace.steps else SLOW_STEP_S

"""Updates a worker's breaker and estimators from a finished request."""

from __future__ import annotations

from dataclasses import replace

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import Worker
from proxy.core.lifecycle.billing import first_token_time
from proxy.core.model.types import Outcome, Usage

MIN_STEPS = 4
FAILED, BUSY = Outcome.FAILED, Outcome.BUSY
ERRED = Outcome.ERRED
STATUS_500 = "500"
# No evidence about the worker.
INCONCLUSIVE = (Outcome.CLIENT_GONE, Outcome.UNFINISHED, Outcome.MOOT)


def update_breaker(
    fleet: Fleet,
    lease: Lease,
    now: float,
    outcome: Outcome,
    *,
    retry_after_s: float | None = None,
    why: str = "",
) -> None:
    """Update the breaker; only a trial may close it."""
    worker = lease.worker
    if outcome not in INCONCLUSIVE and lease.info.needs_engine:
        worker.note_progress(now)
    if outcome is FAILED or outcome is BUSY:
        fleet.health.record_failure(worker, now, retry_after_s, busy=outcome is BUSY, why=why)
    elif outcome is ERRED or outcome in INCONCLUSIVE:
        if lease.trial:
            worker.breaker.abandon_trial()
            fleet.roster.load_changed(worker)
    elif not worker.breaker.has_no_failures and (lease.trial or worker.breaker.closed):
        fleet.health.record_success(worker)


def count_500(fleet: Fleet, lease: Lease, now: float) -> None:
    """Count a 500 against a worker once another worker has succeeded.

    Until then the request may be at fault, and must not open every breaker.
    """
    for name in lease.attempts.erred_on:
        if (worker := fleet.roster.get(name)) is not None:
            fleet.health.record_failure(worker, now, why=STATUS_500)
    lease.attempts = replace(lease.attempts, erred_on=())


def tokens_by_events(lease: Lease) -> int:
    """Return a stream's tokens by events; 0 if unreliable.

    A tool call puts many tokens into one event.
    """
    info = lease.info
    return lease.seen_tokens if info.stream and info.generates and not info.tool_bytes else 0


def learn(lease: Lease, now: float, usage: Usage, decoding: int) -> None:
    learn_pace(lease, now, usage.completion_tokens, decoding)
    if lease.prefill is None:  # the prefill worker had these tokens cached
        learn_cached(lease.worker, lease.decision.cached_tokens, usage)


def learn_pace(lease: Lease, now: float, tokens: int, decoding: int) -> None:
    info, pace = lease.info, lease.worker.pace
    if not info.generates:
        return
    steps = tokens // max(info.samples, 1) - 1
    beside = (lease.decoding_before + decoding) / 2
    if lease.first_token_at is not None:
        since = first_token_time(lease)
        if info.stream and steps >= MIN_STEPS and since is not None:
            pace.learn_steps(beside, (now - since) / steps, now)
    elif not info.stream and steps >= 0:
        seconds, handover = now - lease.charged_at, lease.decision.handover
        if handover is None:
            work = lease.prefill_work(lease.decision.cached_tokens)
            pace.learn_total(work, beside, steps, seconds, now)
        elif steps >= MIN_STEPS and handover.tokens:  # its first token follows the transfer
            decode_s = max(seconds - handover.transfer_s, 0.0)
            pace.learn_steps(beside, decode_s / (steps + 1), now)


def learn_from_disconnect(fleet: Fleet, lease: Lease, now: float) -> None:
    """Learn from a client that left before its response.

    Otherwise a hung worker would look fast.
    """
    info, worker = lease.info, lease.worker
    pace = worker.pace
    if lease.first_token_at is not None or not lease.sent or not info.needs_engine:
        return
    if lease.prefill is not None:  # only successful transfers count
        return
    if now < pace.first_token_learnable_at:  # many clients leave at once
        return
    waited_s = now - lease.charged_at
    work = lease.prefill_work(lease.decision.cached_tokens)
    expected_s = pace.first_token_s(*work)
    if info.stream or not info.generates:
        if waited_s <= expected_s:
            return
        pace.learn_first_token(work, waited_s, now)
    else:
        if info.output_tokens is None or info.samples > 1:
            return  # unknown total
        beside, steps = worker.num_decoding + 1, max(info.output_tokens - 1, 0)
        if waited_s <= expected_s + steps * pace.step_s(beside):
            return
        pace.learn_total(work, beside, steps, waited_s, now)
    worker.reprice()
    fleet.roster.load_changed(worker)


def learn_cached(worker: Worker, cached: int, usage: Usage) -> None:
    """Learn the missing cache share, if reported."""
    if usage.cached_tokens:
        worker.reports_cache = True
    if worker.reports_cache and cached:
        worker.pace.learn_cached(min(usage.cached_tokens / cached, 1.0))

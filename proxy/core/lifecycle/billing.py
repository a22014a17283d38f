"""A request's charges to its tenant's limits and share."""

from __future__ import annotations

from math import inf

from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model import refusals
from proxy.core.model.route_table import route_names
from proxy.core.model.types import Outcome, Refusal, RequestInfo, Usage
from proxy.core.queue.fairness import FairnessSettings, charge_output, charge_prompt
from proxy.core.tenants.limits import Decided, LimitExceeded, PendingDecision
from proxy.core.tenants.tenants import Tenant

DONE = Outcome.DONE  # faster than an enum look-up
# Routes with a stream that begins with the first token; a chat sends the role first.
FIRST_EVENT_IS_TOKEN = route_names(lambda route: route.begins_with_token)
STOPPED_EARLY = (Outcome.CLIENT_GONE, Outcome.UNFINISHED)  # what was computed is charged


def ask_other_hosts(info: RequestInfo, on_decided: Decided) -> PendingDecision | None:
    """Have all hosts together decide whether a request exceeds its tenant's limits.

    Returns None if this host decides, or may admit it. `on_decided` is followed by `enter`, or by
    `leave`.
    """
    tenant = info.tenant
    if tenant is None:
        return None
    ledger = tenant.ledger
    if (
        ledger.remote_limits is None
        or not ledger.is_limited
        or ledger.too_long(info.min_prompt_size) is not None
    ):
        return None
    tokens = _tokens_to_charge(info)
    if ledger.remote_limits.take_from_advance(tokens):
        info.bill.decided_tokens, info.bill.exceeded = tokens, None
        return None

    def decided(exceeded: LimitExceeded | None) -> None:
        info.bill.decided_tokens, info.bill.exceeded = tokens, exceeded
        on_decided(exceeded)

    return ledger.remote_limits.request_decision(tokens, decided)


def _tokens_to_charge(info: RequestInfo) -> int:
    """Return what a request may use, without what an earlier attempt has been charged."""
    tokens = info.prompt_tokens + info.expected_output * info.samples
    return max(tokens - info.bill.settled_prompt - info.bill.settled_output, 0)


def enter(
    info: RequestInfo, now: float, *, is_retry: bool, uncounted: bool = False
) -> Refusal | None:
    """Admit a request, or return the limit that it exceeds.

    `uncounted`: a worker counts the prompt first, then `enter` is called again. Counting is work,
    so all limits apply.
    """
    tenant = info.tenant
    if tenant is None:
        return None
    ledger, bill = tenant.ledger, info.bill
    exceeded: LimitExceeded | None = None
    tokens = _tokens_to_charge(info)
    if bill.entered_tokens is not None:  # admitted for counting
        exceeded = ledger.too_long(info.min_prompt_size)
    elif bill.decided_tokens is not None:
        exceeded, tokens = ledger.enter_decided(bill.exceeded), bill.decided_tokens
        bill.decided_tokens = None
    elif is_retry:
        ledger.enter_again(now, tokens)
    else:
        prompt = info.least_prompt if uncounted else info.min_prompt_size
        exceeded = ledger.enter(now, tokens, prompt)
    if exceeded is not None:
        leave(info, now)
        _count_limited(tenant, exceeded)
        return refusals.limited(info, exceeded)
    if bill.entered_tokens is None:
        bill.entered_tokens = tokens
        tenant.notify_watches()
    return None


def exhausted_limit(tenant: Tenant, now: float) -> Refusal | None:
    """Return the limit that refuses every request now."""
    exceeded = tenant.ledger.spent_limit(now)
    return None if exceeded is None else _refuse_for_now(tenant, exceeded)


def charge_refused_read(tenant: Tenant, now: float) -> None:
    tenant.ledger.charge_read(now)
    tenant.notify_watches()


def enter_without_worker(tenant: Tenant, now: float) -> Refusal | None:
    exceeded = tenant.ledger.enter(now, 0, 0)
    if exceeded is None:
        tenant.notify_watches()
        return None
    return _refuse_for_now(tenant, exceeded)


def leave_without_worker(tenant: Tenant, now: float) -> None:
    tenant.ledger.leave(now, 0, 0)
    tenant.notify_watches()


def _refuse_for_now(tenant: Tenant, exceeded: LimitExceeded) -> Refusal:
    _count_limited(tenant, exceeded)
    return refusals.limited_for_now(exceeded, exceeded.retry_after_s or 0.0)


def _count_limited(tenant: Tenant, exceeded: LimitExceeded) -> None:
    limited, limit = tenant.totals.limited, exceeded.limit.value
    limited[limit] = limited.get(limit, 0) + 1


def leave(info: RequestInfo, now: float, used: int = 0) -> None:
    tenant = info.tenant
    if tenant is None:
        return
    bill = info.bill
    if bill.decided_tokens is not None:  # it never entered
        if bill.exceeded is None:
            tenant.ledger.refund(now, bill.decided_tokens)
        bill.decided_tokens = None
    if bill.entered_tokens is not None:
        tenant.ledger.leave(now, bill.entered_tokens, used)
        tenant.notify_watches()
        bill.entered_tokens = None


def settle(
    settings: FairnessSettings, lease: Lease, now: float, outcome: Outcome, usage: Usage | None
) -> None:
    """Charge a tenant; worker failures are free, and earlier attempts of a stream are settled."""
    info = lease.info
    tenant = info.tenant
    if tenant is None:
        return
    bill = info.bill
    if outcome is DONE and usage is not None:
        prompt, output = usage.prompt_tokens, max(usage.completion_tokens - bill.settled_output, 0)
        if not info.pinned:  # most is cached
            charge_prompt(tenant, info, prompt - info.prompt_tokens)
    else:
        output = _output_without_usage(lease, now, outcome)
        prompt = info.prompt_tokens if output or outcome is DONE or outcome in STOPPED_EARLY else 0
    prompt = max(prompt - bill.settled_prompt, 0)
    charge_output(settings, info, output - bill.prepaid_output)
    bill.prepaid_output = 0
    if not prompt:
        charge_prompt(tenant, info, -bill.paid_prompt)
    tenant.settle(bill.unsettled, info.rank)
    bill.unsettled = 0.0
    bill.settled_prompt += prompt
    bill.settled_output += output
    tenant.totals.prompt_tokens += prompt
    tenant.totals.output_tokens += output
    leave(info, now, prompt + output)


def _output_without_usage(lease: Lease, now: float, outcome: Outcome) -> int:
    seen, bill = lease.seen_tokens, lease.info.bill
    if outcome is DONE:
        unseen = 0 if bill.settled_output else bill.prepaid_output
        return max(seen or unseen, _estimate_output(lease, now))
    return max(seen, _estimate_output(lease, now)) if outcome in STOPPED_EARLY else seen


def _estimate_output(lease: Lease, now: float) -> int:
    """Estimate output without usage, by decoding time.

    Otherwise disconnects, or many tokens per event, would be free.
    """
    info, worker = lease.info, lease.worker
    if not info.generates or not lease.sent:
        return 0
    since = _decode_start(lease)
    step_s = worker.pace.step_s(worker.num_decoding + info.samples)
    decoded_s = _last_computed_at(worker, since, now) - since if since < now else 0.0
    steps = max(int(decoded_s / step_s), 0)
    limit = info.output_tokens
    if limit is None:
        limit = max(worker.context_limit - info.largest_prompt, 0)
    return min(steps, limit) * info.samples


def first_token_time(lease: Lease) -> float | None:
    """Return the time of the first token, even a hidden one."""
    if lease.begun_at is not None and lease.info.route in FIRST_EVENT_IS_TOKEN:
        return lease.begun_at
    return lease.first_token_at


def _decode_start(lease: Lease) -> float:
    """Return when the first token was or should have been written; inf if never.

    The first visible token may be late.
    """
    info, pace = lease.info, lease.worker.pace
    first_at, begun_at = lease.first_token_at, lease.begun_at
    if info.stream and (begun_at is None or info.route in FIRST_EVENT_IS_TOKEN):
        since = first_token_time(lease)
        return inf if since is None else since
    handover = lease.decision.handover
    if handover is None:
        work = lease.prefill_work(lease.decision.cached_tokens)
        since = lease.charged_at + pace.first_token_s(*work)
    else:
        since = lease.charged_at + handover.transfer_s
    if info.stream and begun_at is not None:
        since = max(since, begun_at)  # typed streams announce a response early
    return since if first_at is None else min(since, first_at)


def _last_computed_at(worker: Worker, since: float, now: float) -> float:
    """Return when a worker last computed; a hung worker is free."""
    gauges, worked_at = worker.gauges, worker.worked_at
    hangs = gauges is not None and worked_at > -inf and gauges.at > max(worked_at, since)
    return min(now, worked_at) if hangs else now

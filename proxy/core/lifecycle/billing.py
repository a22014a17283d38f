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


def ask_other_hosts(ask: RequestInfo, done: Decided) -> PendingDecision | None:
    """Have all hosts together decide whether a request exceeds its tenant's limits.

    Returns None if this host decides, or may admit it. `done` is followed by `enter`, or by
    `leave`.
    """
    tenant = ask.tenant
    if tenant is None:
        return None
    ledger = tenant.ledger
    if (
        ledger.remote is None
        or not ledger.is_limited
        or ledger.too_long(ask.min_prompt_size) is not None
    ):
        return None
    tokens = _tokens(ask)
    if ledger.remote.take(tokens):
        ask.bill.decided, ask.bill.exceeded = tokens, None
        return None

    def decided(exceeded: LimitExceeded | None) -> None:
        ask.bill.decided, ask.bill.exceeded = tokens, exceeded
        done(exceeded)

    return ledger.remote.ask(tokens, decided)


def _tokens(ask: RequestInfo) -> int:
    """Return what a request may use, without what an earlier attempt has been charged."""
    tokens = ask.prompt_tokens + ask.expected_output * ask.samples
    return max(tokens - ask.bill.settled_prompt - ask.bill.settled_output, 0)


def enter(ask: RequestInfo, now: float, *, again: bool, uncounted: bool = False) -> Refusal | None:
    """Admit a request, or return the limit that it exceeds; `again`: a retry.

    `uncounted`: a worker counts the prompt first, then `enter` is called again. Counting is work,
    so all limits apply.
    """
    tenant = ask.tenant
    if tenant is None:
        return None
    ledger = tenant.ledger
    breach: LimitExceeded | None = None
    tokens = _tokens(ask)
    if ask.bill.entered >= 0:  # admitted for counting
        breach = ledger.too_long(ask.min_prompt_size)
    elif ask.bill.decided >= 0:
        breach, tokens = ledger.enter_decided(ask.bill.exceeded), ask.bill.decided
        ask.bill.decided = -1
    elif again:
        ledger.enter_again(now, tokens)
    else:
        breach = ledger.enter(now, tokens, ask.least_prompt if uncounted else ask.min_prompt_size)
    if breach is not None:
        leave(ask, now)
        _count(tenant, breach)
        return refusals.limited(ask, breach)
    if ask.bill.entered < 0:
        ask.bill.entered = tokens
        tenant.notify_watches()
    return None


def exhausted_limit(tenant: Tenant, now: float) -> Refusal | None:
    """Return the limit that refuses every request now."""
    breach = tenant.ledger.spent_limit(now)
    return None if breach is None else _refuse_for_now(tenant, breach)


def charge_refused(tenant: Tenant, now: float) -> None:
    tenant.ledger.charge_read(now)
    tenant.notify_watches()


def enter_without_worker(tenant: Tenant, now: float) -> Refusal | None:
    breach = tenant.ledger.enter(now, 0, 0)
    if breach is None:
        tenant.notify_watches()
        return None
    return _refuse_for_now(tenant, breach)


def leave_without_worker(tenant: Tenant, now: float) -> None:
    tenant.ledger.leave(now, 0, 0)
    tenant.notify_watches()


def _refuse_for_now(tenant: Tenant, breach: LimitExceeded) -> Refusal:
    _count(tenant, breach)
    return refusals.limited_for_now(breach, breach.retry_after_s or 0.0)


def _count(tenant: Tenant, breach: LimitExceeded) -> None:
    limited, which = tenant.totals.limited, breach.limit.value
    limited[which] = limited.get(which, 0) + 1


def leave(ask: RequestInfo, now: float, used: int = 0) -> None:
    if ask.tenant is None:
        return
    if ask.bill.decided >= 0:  # it never entered
        if ask.bill.exceeded is None:
            ask.tenant.ledger.refund(now, ask.bill.decided)
        ask.bill.decided = -1
    if ask.bill.entered >= 0:
        ask.tenant.ledger.leave(now, ask.bill.entered, used)
        ask.tenant.notify_watches()
        ask.bill.entered = -1


def settle(
    settings: FairnessSettings, lease: Lease, now: float, outcome: Outcome, usage: Usage | None
) -> None:
    """Charge a tenant; worker failures are free, and earlier attempts of a stream are settled."""
    ask = lease.ask
    tenant = ask.tenant
    if tenant is None:
        return
    bill = ask.bill
    prompt = output = 0
    if outcome is DONE and usage is not None:
        prompt, output = usage.prompt_tokens, usage.completion_tokens
        if not ask.pinned:  # most is cached
            charge_prompt(tenant, ask, prompt - ask.prompt_tokens)
        output = max(output - bill.settled_output, 0)
    elif outcome is DONE:
        prompt = ask.prompt_tokens
        unseen = 0 if bill.settled_output else bill.prepaid
        output = max(lease.seen_tokens or unseen, _estimate_output(lease, now))
    elif outcome in STOPPED_EARLY:
        prompt, output = ask.prompt_tokens, max(lease.seen_tokens, _estimate_output(lease, now))
    elif lease.seen_tokens:
        prompt, output = ask.prompt_tokens, lease.seen_tokens
    prompt = max(prompt - bill.settled_prompt, 0)
    charge_output(settings, ask, output - bill.prepaid)
    bill.prepaid = 0
    if not prompt:
        charge_prompt(tenant, ask, -bill.paid)
    tenant.settle(bill.unsettled, ask.rank)
    bill.unsettled = 0.0
    bill.settled_prompt += prompt
    bill.settled_output += output
    tenant.totals.prompt_tokens += prompt
    tenant.totals.output_tokens += output
    leave(ask, now, prompt + output)


def _estimate_output(lease: Lease, now: float) -> int:
    """Estimate output without usage, by decoding time.

    Otherwise disconnects, or many tokens per event, would be free.
    """
    ask, worker = lease.ask, lease.worker
    if not ask.generates or not lease.sent:
        return 0
    since = _decode_start(lease)
    step_s = worker.pace.step_s(worker.decoding + ask.samples)
    decoded_s = _last_computed_at(worker, since, now) - since if since < now else 0.0
    steps = max(int(decoded_s / step_s), 0)
    most = ask.output_tokens
    if most is None:
        most = max(worker.limit - ask.largest_prompt, 0)
    return min(steps, most) * ask.samples


def first_token_time(lease: Lease) -> float | None:
    """Return the time of the first token, even a hidden one."""
    if lease.begun_at is not None and lease.ask.route in FIRST_EVENT_IS_TOKEN:
        return lease.begun_at
    return lease.first_token_at


def _decode_start(lease: Lease) -> float:
    """Return when the first token was or should have been written; inf if never.

    The first visible token may be late.
    """
    ask, pace = lease.ask, lease.worker.pace
    first_at, begun_at = lease.first_token_at, lease.begun_at
    if ask.stream and (begun_at is None or ask.route in FIRST_EVENT_IS_TOKEN):
        since = first_token_time(lease)
        return inf if since is None else since
    cached, halves = lease.decision.cached_tokens, lease.decision.handover
    if halves is None:
        tokens = lease.ahead_tokens + ask.prompt_tokens - cached
        since = lease.charged_at + pace.first_token_s(tokens, lease.behind_long, cached)
    else:
        since = lease.charged_at + halves.transfer_s
    if ask.stream and begun_at is not None:
        since = max(since, begun_at)  # typed streams announce a response early
    return since if first_at is None else min(since, first_at)


def _last_computed_at(worker: Worker, since: float, now: float) -> float:
    """Return when a worker last computed; a hung worker is free."""
    gauges, worked_at = worker.gauges, worker.worked_at
    hangs = gauges is not None and worked_at > -inf and gauges.at > max(worked_at, since)
    return min(now, worked_at) if hangs else now

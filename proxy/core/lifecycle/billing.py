"""What a tenant's request takes of its limits and of its share: when it comes, and when it ends."""

from __future__ import annotations

from math import inf

from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model import refusals
from proxy.core.model.route_table import route_names
from proxy.core.model.types import Outcome, Refusal, RequestInfo, Usage
from proxy.core.queue.fairness import FairnessSettings, charge_output, charge_prompt, give_back
from proxy.core.tenants.limits import LimitExceeded
from proxy.core.tenants.tenants import Tenant

DONE = Outcome.DONE  # looked up once: see reading.py
BEGINS_WITH_TOKEN = route_names(lambda route: route.begins_with_token)
UNREAD = (Outcome.CLIENT_GONE, Outcome.UNFINISHED)  # what was computed by then was computed


def enter(ask: RequestInfo, now: float, *, again: bool, uncounted: bool = False) -> Refusal | None:
    """Let a request in, or say which limit keeps it out; `again`: another worker is to try it.

    `uncounted`: a worker is to count its prompt first, and then it is asked about once more. To
    count is work, so all limits hold for it; that of a prompt, as far as no count could help.
    """
    tenant = ask.tenant
    if tenant is None:
        return None
    ledger = tenant.ledger
    breach: LimitExceeded | None = None
    tokens = ask.prompt_tokens + ask.expected_output * ask.samples
    if ask.bill.entered >= 0:  # it was let in to be counted
        breach = ledger.too_long(_sure(ask))
    elif again:
        ledger.enter_again(now, tokens)
    else:
        breach = ledger.enter(now, tokens, ask.least_prompt if uncounted else _sure(ask))
    if breach is not None:
        leave(ask, now)
        _count(tenant, breach)
        return refusals.limited(ask, breach)
    if ask.bill.entered < 0:
        ask.bill.entered = tokens
        tenant.change()
    return None


def _sure(ask: RequestInfo) -> int:
    """Say how many tokens its largest prompt has at least.

    To be cut off where a context ends makes it no shorter for its tenant.
    """
    sure = ask.sure_prompt
    return ask.largest_prompt - ask.prompt_error if sure < 0 else sure


def spent(tenant: Tenant, now: float) -> Refusal | None:
    """Say which limit keeps out whatever a tenant asks now: so it need not be read."""
    breach = tenant.ledger.spent(now)
    if breach is None:
        return None
    _count(tenant, breach)
    return refusals.limited_for_now(breach, breach.retry_after_s or 0.0)


def was_read(tenant: Tenant, now: float) -> None:
    """Have a tenant pay for a request that was refused for what it is."""
    tenant.ledger.was_read(now)
    tenant.change()


def visit(tenant: Tenant, now: float) -> Refusal | None:
    """Let in what no worker is asked for, or say which limit keeps it out; `left` when it ends."""
    breach = tenant.ledger.enter(now, 0, 0)
    if breach is None:
        tenant.change()
        return None
    _count(tenant, breach)
    return refusals.limited_for_now(breach, breach.retry_after_s or 0.0)


def left(tenant: Tenant, now: float) -> None:
    """Let out what was let in by `visit`."""
    tenant.ledger.leave(now, 0, 0)
    tenant.change()


def _count(tenant: Tenant, breach: LimitExceeded) -> None:
    limited, which = tenant.totals.limited, breach.limit.value
    limited[which] = limited.get(which, 0) + 1


def leave(ask: RequestInfo, now: float, used: int = 0) -> None:
    """Let a request out, with the tokens it used."""
    if ask.tenant is not None and ask.bill.entered >= 0:
        ask.tenant.ledger.leave(now, ask.bill.entered, used)
        ask.tenant.change()
        ask.bill.entered = -1


def settle(
    settings: FairnessSettings, lease: Lease, now: float, outcome: Outcome, usage: Usage | None
) -> None:
    """Have a tenant pay for what it got, and no more: a worker's failure is not its expense."""
    ask = lease.ask
    tenant = ask.tenant
    if tenant is None:
        return
    prompt = output = 0
    if outcome is DONE and usage is not None:
        prompt, output = usage.prompt_tokens, usage.completion_tokens
        if not ask.pinned:  # else most of it was said in turns before, and is cached
            charge_prompt(tenant, ask, prompt - ask.prompt_tokens)
    elif outcome is DONE:
        prompt = ask.prompt_tokens
        output = max(lease.seen_tokens or ask.bill.prepaid, _written(lease, now))
    elif outcome in UNREAD:
        prompt, output = ask.prompt_tokens, max(lease.seen_tokens, _written(lease, now))
    elif lease.seen_tokens:
        prompt, output = ask.prompt_tokens, lease.seen_tokens
    charge_output(settings, ask, output - ask.bill.prepaid)
    ask.bill.prepaid = 0
    if not prompt:
        give_back(tenant, ask)
    tenant.settle(ask.bill.unsettled, ask.rank)
    ask.bill.unsettled = 0.0
    tenant.totals.prompt_tokens += prompt
    tenant.totals.output_tokens += output
    leave(ask, now, prompt + output)


def _written(lease: Lease, now: float) -> int:
    """Reckon what was written of an answer of which no usage is known, by how long it was decoded.

    Were it free to leave before the end, or were events all that counts, the fleet would be theirs
    who always leave, or who get many tokens in an event: an engine that speculates or writes in
    intervals, a call of a tool or hidden reasoning that comes in one piece.
    """
    ask, worker = lease.ask, lease.worker
    if not ask.generates or not lease.sent:
        return 0
    since = _decoded_since(lease)
    step_s = worker.pace.step_s(worker.decoding + ask.samples)
    decoded_s = _worked_until(worker, since, now) - since if since < now else 0.0
    steps = max(int(decoded_s / step_s), 0)
    most = ask.output_tokens
    if most is None:
        most = max(worker.limit - ask.largest_prompt, 0)
    return min(steps, most) * ask.samples


def shown_since(lease: Lease) -> float | None:
    """When a stream's first token came, be it hidden, as far as the router has seen."""
    if lease.begun_at is not None and lease.ask.route in BEGINS_WITH_TOKEN:
        return lease.begun_at
    return lease.first_token_at


def _decoded_since(lease: Lease) -> float:
    """When an answer's first token was written, or should have been.

    Never, of a stream that has not begun: it was waited for in vain. Of one that has, the first
    token that was seen may be late: some are hidden, others held back until they call a tool.
    """
    ask, pace = lease.ask, lease.worker.pace
    first_at, begun_at = lease.first_token_at, lease.begun_at
    if ask.stream and (begun_at is None or ask.route in BEGINS_WITH_TOKEN):
        since = shown_since(lease)
        return inf if since is None else since
    cached, halves = lease.decision.cached_tokens, lease.decision.handover
    if halves is None:
        tokens = lease.ahead_tokens + ask.prompt_tokens - cached
        since = lease.charged_at + pace.first_token_s(tokens, lease.behind_long, cached)
    else:
        since = lease.charged_at + halves.transfer_s
    if ask.stream and begun_at is not None:
        since = max(since, begun_at)  # typed streams tell of an answer before it is begun
    return since if first_at is None else min(since, first_at)


def _worked_until(worker: Worker, since: float, now: float) -> float:
    """When a worker was known last to compute: nobody pays for the time in which one hangs."""
    gauges, worked_at = worker.gauges, worker.worked_at
    hangs = gauges is not None and worked_at > -inf and gauges.at > max(worked_at, since)
    return min(now, worked_at) if hangs else now

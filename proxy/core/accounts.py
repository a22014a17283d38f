"""What a tenant's request takes of its limits and of its share: when it comes, and when it ends."""

from __future__ import annotations

from proxy.core import refusals
from proxy.core.fairness import FairnessSettings, charge_output, give_back
from proxy.core.limits import Breach
from proxy.core.tenants import Tenant
from proxy.core.types import Ask, Lease, Outcome, Refusal, Usage

DONE = Outcome.DONE  # looked up once: see reading.py
UNREAD = (Outcome.CLIENT_GONE, Outcome.UNFINISHED)  # what was computed by then was computed


def enter(ask: Ask, now: float, *, again: bool) -> Refusal | None:
    """Let a request in, or say which limit keeps it out; `again`: another worker is to try it."""
    tenant = ask.tenant
    if tenant is None:
        return None
    tokens = ask.prompt_tokens + ask.expected_output * ask.samples
    if again:
        tenant.ledger.enter_again(now, tokens)
    else:
        # To be cut off where a context ends makes it no shorter for its tenant.
        sure = ask.sure_prompt
        sure = ask.largest_prompt - ask.prompt_error if sure < 0 else sure
        breach = tenant.ledger.enter(now, tokens, sure)
        if breach is not None:
            _count(tenant, breach)
            return refusals.limited(ask, breach)
    tenant.change()
    ask.entered = tokens
    return None


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


def _count(tenant: Tenant, breach: Breach) -> None:
    limited, which = tenant.totals.limited, breach.limit.value
    limited[which] = limited.get(which, 0) + 1


def leave(ask: Ask, now: float, used: int = 0) -> None:
    """Let a request out, with the tokens it used."""
    if ask.tenant is not None and ask.entered >= 0:
        ask.tenant.ledger.leave(now, ask.entered, used)
        ask.tenant.change()
        ask.entered = -1


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
    elif outcome is DONE:
        prompt, output = ask.prompt_tokens, lease.seen_tokens or ask.prepaid
    elif outcome in UNREAD or lease.seen_tokens:
        prompt, output = ask.prompt_tokens, lease.seen_tokens
        if outcome in UNREAD and not output:
            output = _unseen(lease, now)
    charge_output(settings, ask, output - ask.prepaid)
    ask.prepaid = 0
    if not prompt:
        give_back(tenant, ask)
    tenant.totals.prompt_tokens += prompt
    tenant.totals.output_tokens += output
    leave(ask, now, prompt + output)


def _unseen(lease: Lease, now: float) -> int:
    """Reckon what was written of an answer that comes whole, by how long it was decoded.

    Were it free to leave before its end, the fleet would be theirs who always do.
    """
    ask, worker = lease.ask, lease.worker
    if ask.stream or not ask.generates or not lease.sent:
        return 0
    halves, cached = lease.decision.handover, lease.decision.cached_tokens
    if halves is None:
        tokens = lease.ahead_tokens + ask.prompt_tokens - cached
        first_s = worker.pace.first_token_s(tokens, lease.behind_long, cached)
    else:
        first_s = halves.transfer_s
    decoded_s = now - lease.charged_at - first_s
    steps = max(int(decoded_s / worker.pace.step_s(worker.decoding + ask.samples)), 0)
    most = ask.output_tokens
    if most is None:
        most = max(worker.limit - ask.largest_prompt, 0)
    return min(steps, most) * ask.samples

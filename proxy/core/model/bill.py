"""The account of one request with its tenant."""

from __future__ import annotations

from proxy.core.tenants.limits import LimitExceeded


class Bill:
    """Amounts charged to a tenant for a request; the request's end settles them."""

    def __init__(self) -> None:
        self.decided_tokens: int | None = None  # taken by a decision for all hosts
        self.exceeded: LimitExceeded | None = None  # by that decision
        self.entered_tokens: int | None = None  # taken from the tenant's limit while in flight
        self.free = False  # placed while no request waited, so it costs no share
        self.paid_prompt = 0.0  # charged at the placement, in tokens
        self.unsettled = 0.0  # the part of the tenant's share that was charged by estimates
        self.prepaid_output = 0  # tokens that were charged before they were written
        # Of earlier attempts of a stream.
        self.settled_prompt = self.settled_output = 0

"""The account of one request with its tenant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Bill:
    """Amounts that a tenant was charged for a request, and that the end of the request settles."""

    entered: int = -1  # tokens taken from the tenant's limit while in flight; -1: none
    free: bool = False  # placed while no request waited, so it costs no share
    paid: float = 0.0  # charged for the prompt at the placement
    unsettled: float = 0.0  # the part of the tenant's share that was charged by estimates
    prepaid: int = 0  # output tokens that were charged before they were written

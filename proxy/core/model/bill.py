"""The account of one request with its tenant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Bill:
    """A tenant's charges for a request, settled at its end."""

    entered: int = -1  # tokens taken from the limit; -1: none
    free: bool = False  # placed without a queue: costs no share
    paid: float = 0.0  # for the prompt, at placement
    unsettled: float = 0.0  # share charged by estimates
    prepaid: int = 0  # output tokens charged before they were written

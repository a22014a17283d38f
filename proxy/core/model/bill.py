"""A request's account with its tenant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Bill:
    """Charges that the end of the request settles."""

    entered: int = -1  # tokens of the limit; -1: none
    free: bool = False  # placed without a queue
    paid: float = 0.0  # for the prompt
    unsettled: float = 0.0  # estimated share
    prepaid: int = 0  # output tokens charged in advance

"""How much of bodies is kept, over all connections.

A client may take its time over a large body, and a thousand may at once; and a worker over the
first byte of its answer. What came of a body lies in memory until it is whole, and then until that
byte, for another worker may be asked; an upload until the store has it. Together no more than this.
"""

from __future__ import annotations

from proxy.core.types import Reason, Refusal
from proxy.wire.http import RefusedError


class Collecting:
    """The count of it."""

    __slots__ = ("held", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    def take(self, size: int) -> None:
        """Count a piece; raises `RefusedError` where that is too much."""
        if self.held + size > self.most:
            message = "Too many large requests are being sent at once. Retry after the time given."
            refusal = Refusal(503, Reason.QUEUE_FULL, message, "too_many_bodies", retry_after_s=1.0)
            raise RefusedError(refusal)
        self.held += size

    def give(self, size: int) -> None:
        """Count out what is passed on, or dropped."""
        self.held -= size

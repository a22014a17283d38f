"""How much of bodies is kept, over all connections.

A client may take its time over a large body, and a thousand may at once; and a worker over the
first byte of its answer. What came of a body lies in memory until it is whole, and then until that
byte, for another worker may be asked; an upload until the store has it; what was sent ahead until
it is its turn. Together no more than this.

Of a tenant no more than is left free beside it: whoever fills its part leaves as much to all
others, and what they fill of that leaves some again. One body it may have whatever its size. Those
who show no key are as one tenant. Where there are no tenants, all have all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.types import Reason, Refusal
from proxy.wire.http import RefusedError

if TYPE_CHECKING:
    from proxy.core.tenants import Tenant, Tenants

STRANGERS = ""
CODE, AGAIN_S = "too_many_bodies", 1.0


class Collecting:
    """The count of it."""

    __slots__ = ("_of", "_tenants", "held", "most")

    def __init__(self, most: int, tenants: Tenants | None = None) -> None:
        self.most = most
        self.held = 0
        self._tenants = tenants
        self._of: dict[str, int] = {}  # what each has who has any

    def account(self, tenant: Tenant | None) -> str | None:
        """Say whose part a body is of; None where there are no parts."""
        tenants = self._tenants
        if tenants is None or tenants.open:
            return None
        return STRANGERS if tenant is None else tenant.name

    def take(self, size: int, whose: str | None = None, before: int = 0) -> None:
        """Count a piece; raises `RefusedError` where that is too much.

        `before`: what was counted of the same body.
        """
        held = self.held + size
        if held > self.most:
            message = "Too many large requests are being sent at once. Retry after the time given."
            raise _refused(503, Reason.QUEUE_FULL, message)
        if whose is not None and size:
            own = self._of.get(whose, 0) + size
            if own > self.most - held and own > before + size:
                message = (
                    "Too many large requests of yours are being sent, or wait, at once. Retry "
                    "after the time given."
                )
                raise _refused(429, Reason.LIMITED, message)
            self._of[whose] = own
        self.held = held

    def give(self, size: int, whose: str | None = None) -> None:
        """Count out what is passed on, or dropped."""
        self.held -= size
        if whose is not None and size:
            left = self._of[whose] - size
            if left:
                self._of[whose] = left
            else:
                del self._of[whose]


def _refused(status: int, reason: Reason, message: str) -> RefusedError:
    return RefusedError(Refusal(status, reason, message, CODE, retry_after_s=AGAIN_S))

"""How much of bodies is kept, over all connections.

A client may take its time over a large body, and a thousand may at once; and a worker over the
first byte of its answer. What came of a body lies in memory until it is whole, and then until that
byte, for another worker may be asked; an upload until the store has it; what was sent ahead until
it is its turn. Together no more than this.

Where there are tenants, each has a part that no other can fill: a quarter of all there is, in
equal parts. What is more than its part it has of the rest, of which it has no more than it leaves
free: whoever fills that leaves as much to all others, and what they fill of it leaves some again.
One body it may have there whatever its size, beside what is within its part; so a few may fill the
rest with a large one each, and everybody's small ones pass even so. Those who show no key are as
one tenant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.model.types import Reason, Refusal
from proxy.http.headers import RefusedError

if TYPE_CHECKING:
    from proxy.core.tenants.tenants import Tenant, Tenants

STRANGERS = ""
CODE, AGAIN_S = "too_many_bodies", 1.0
APART = 4  # of so many bytes one is in parts, unless the largest body had no room beside them


class BodyBudget:
    """The count of it."""

    __slots__ = ("_edition", "_largest", "_most", "_of", "_part", "_room", "_shared", "_tenants")

    def __init__(self, most: int, tenants: Tenants | None = None, largest: int = 0) -> None:
        self._most = self._room = most
        self._largest = largest  # a body may be
        self._tenants = tenants
        self._edition = 0 if tenants is None else tenants.edition
        self._part = 0  # of each
        self._shared = 0  # held of the rest
        self._of: dict[str, int] = {}  # what each has who has any
        self._arrange()

    @property
    def held(self) -> int:
        """How much is held in all."""
        return self._shared + self._apart()

    def limit(self, most: int, largest: int) -> None:
        """Take new bounds: of all, and of one body."""
        self._most, self._largest = most, largest
        self._arrange()

    def account(self, tenant: Tenant | None) -> str | None:
        """Say whose part a body is of; None where there are no parts."""
        tenants = self._tenants
        if tenants is None:
            return None
        if tenants.edition != self._edition:
            self._edition = tenants.edition
            self._arrange()
        if tenants.open:
            return None
        return STRANGERS if tenant is None else tenant.name

    def take(self, size: int, whose: str | None = None, before: int = 0) -> None:
        """Count a piece; raises `RefusedError` where that is too much.

        `before`: what was counted of the same body.
        """
        if whose is None:
            shared = self._shared + size
            if shared > self._room:
                raise _too_many()
            self._shared = shared
        elif size:
            own, part = self._of.get(whose, 0), self._part
            now = own + size
            if now > part:
                beyond = now - part
                shared = self._shared + beyond - max(own - part, 0)
                if shared > self._room:
                    raise _too_many()
                if beyond > self._room - shared and now - before - size > part:
                    raise _too_many_of_yours()
                self._shared = shared
            self._of[whose] = now

    def give(self, size: int, whose: str | None = None) -> None:
        """Count out what is passed on, or dropped."""
        if whose is None:
            self._shared -= size
        elif size:
            own, part = self._of[whose], self._part
            left = own - size
            if own > part:
                self._shared -= own - max(left, part)
            if left:
                self._of[whose] = left
            else:
                del self._of[whose]

    def _arrange(self) -> None:
        """Make the parts anew, for those that there are now."""
        held, tenants = self.held, self._tenants
        self._part = 0
        if tenants is not None and not tenants.open:
            apart = min(self._most // APART, max(self._most - self._largest, 0))
            self._part = apart // (len(tenants) + 1)
        self._room = self._most - self._part * (0 if tenants is None else len(tenants) + 1)
        self._shared = held - self._apart()

    def _apart(self) -> int:
        return sum(min(own, self._part) for own in self._of.values())


def _too_many() -> RefusedError:
    message = "Too many large requests are being sent at once. Retry after the time given."
    return RefusedError(Refusal(503, Reason.QUEUE_FULL, message, CODE, retry_after_s=AGAIN_S))


def _too_many_of_yours() -> RefusedError:
    message = (
        "Too many large requests of yours are being sent, or wait, at once. Retry after the time "
        "given."
    )
    return RefusedError(Refusal(429, Reason.LIMITED, message, CODE, retry_after_s=AGAIN_S))

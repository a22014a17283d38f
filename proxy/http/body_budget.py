"""A limit on the bytes of request bodies that the router holds in memory.

A body is held until its response begins, because the request may be retried on another worker.
Uploads and pipelined requests count too.

A quarter of the budget is reserved for tenants in equal shares; the rest is common. Beyond its
share, a tenant may hold no more of the common part than it leaves free, except for a single body.
So large bodies of a few tenants never exclude small ones of others. Requests without a key count
as one tenant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.model.types import Reason, Refusal
from proxy.http.headers import RefusedError

if TYPE_CHECKING:
    from proxy.core.tenants.tenants import Tenant, Tenants

STRANGERS = ""
CODE, AGAIN_S = "too_many_bodies", 1.0
APART = 4  # 1/APART is reserved, or less if the largest body would not fit


class BodyBudget:
    """The bytes held, in all and per tenant."""

    __slots__ = ("_edition", "_largest", "_most", "_of", "_part", "_room", "_shared", "_tenants")

    def __init__(self, most: int, tenants: Tenants | None = None, largest: int = 0) -> None:
        self._most = self._room = most
        self._largest = largest  # bytes of one body at most
        self._tenants = tenants
        self._edition = 0 if tenants is None else tenants.edition
        self._part = 0  # bytes reserved for each tenant
        self._shared = 0  # bytes held of the common part
        self._of: dict[str, int] = {}  # bytes held per tenant
        self._arrange()

    @property
    def held(self) -> int:
        """Bytes held in total."""
        return self._shared + self._apart()

    def limit(self, most: int, largest: int) -> None:
        """Set new limits for the total and for one body."""
        self._most, self._largest = most, largest
        self._arrange()

    def account(self, tenant: Tenant | None) -> str | None:
        """Return the account of a tenant, None if there are no tenants."""
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
        """Add `size` bytes to the `before` of the same body, or raise `RefusedError`."""
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
        """Subtract bytes that are no longer held."""
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
    message = "Too many large requests are in progress. Retry after the time in Retry-After."
    return RefusedError(Refusal(503, Reason.QUEUE_FULL, message, CODE, retry_after_s=AGAIN_S))


def _too_many_of_yours() -> RefusedError:
    message = (
        "Too many large requests of this tenant are in progress. Retry after the time in "
        "Retry-After."
    )
    return RefusedError(Refusal(429, Reason.LIMITED, message, CODE, retry_after_s=AGAIN_S))

"""A limit on the bytes of request bodies that the router holds in memory.

A body is held until its response begins, for retries, and that of a stream which may be continued
longer. Uploads and pipelined requests count too.

A quarter of the budget is reserved for tenants in equal shares; the rest is common. Beyond its
share, a tenant may hold no more of the common part than it leaves free, except for a single body.
Requests without a key count as one tenant.
"""

from __future__ import annotations

from proxy.core.model.refusals import RefusedError
from proxy.core.model.types import Reason, Refusal
from proxy.core.tenants.tenants import Tenant, Tenants

ANONYMOUS_ACCOUNT = ""
ERROR_CODE, RETRY_AFTER_S = "too_many_bodies", 1.0
KEPT_DIVISOR = 4  # of the common part, a tenant may keep a quarter for continuations
RESERVED_DIVISOR = 4  # a quarter is reserved, or less if the largest body would not fit


class BodyBudget:
    __slots__ = (
        "_common_held", "_common_limit", "_edition", "_held_by_account", "_max_body", "_max_bytes",
        "_share", "_tenants",
    )  # fmt: skip

    def __init__(self, max_bytes: int, tenants: Tenants | None = None, largest: int = 0) -> None:
        self._max_bytes = self._common_limit = max_bytes
        self._max_body = largest
        self._tenants = tenants
        self._edition = 0 if tenants is None else tenants.edition
        self._share = 0  # bytes reserved for each tenant
        self._common_held = 0
        self._held_by_account: dict[str, int] = {}
        self._recompute_shares()

    @property
    def held(self) -> int:
        return self._common_held + self._reserved_held()

    def may_be_kept(self, account: str | None) -> bool:
        """Return whether bodies of responses that have begun may stay: they exclude no request."""
        if 2 * self._common_held >= self._common_limit:
            return False
        beyond = 0 if account is None else self._held_by_account.get(account, 0) - self._share
        return KEPT_DIVISOR * beyond < self._common_limit

    def limit(self, max_bytes: int, largest: int) -> None:
        self._max_bytes, self._max_body = max_bytes, largest
        self._recompute_shares()

    def account(self, tenant: Tenant | None) -> str | None:
        """Return the account of a tenant, None if there are no tenants."""
        tenants = self._tenants
        if tenants is None:
            return None
        if tenants.edition != self._edition:
            self._edition = tenants.edition
            self._recompute_shares()
        if tenants.open:
            return None
        return ANONYMOUS_ACCOUNT if tenant is None else tenant.name

    def reserve(self, size: int, account: str | None = None, before: int = 0) -> None:
        """Add `size` bytes to the `before` of the same body, or raise `RefusedError`."""
        if account is None:
            common = self._common_held + size
            if common > self._common_limit:
                raise _exceeded(503, Reason.QUEUE_FULL)
            self._common_held = common
        elif size:
            own, share = self._held_by_account.get(account, 0), self._share
            now = own + size
            if now > share:
                beyond = now - share
                common = self._common_held + beyond - max(own - share, 0)
                if common > self._common_limit:
                    raise _exceeded(503, Reason.QUEUE_FULL)
                if beyond > self._common_limit - common and now - before - size > share:
                    raise _exceeded(429, Reason.LIMITED, " of this tenant")
                self._common_held = common
            self._held_by_account[account] = now

    def release(self, size: int, account: str | None = None) -> None:
        if account is None:
            self._common_held -= size
        elif size:
            own, share = self._held_by_account[account], self._share
            left = own - size
            if own > share:
                self._common_held -= own - max(left, share)
            if left:
                self._held_by_account[account] = left
            else:
                del self._held_by_account[account]

    def _recompute_shares(self) -> None:
        held, tenants = self.held, self._tenants
        self._share = 0
        if tenants is not None and not tenants.open:
            reserved = min(
                self._max_bytes // RESERVED_DIVISOR, max(self._max_bytes - self._max_body, 0)
            )
            self._share = reserved // (len(tenants) + 1)
        self._common_limit = self._max_bytes - self._share * (
            0 if tenants is None else len(tenants) + 1
        )
        self._common_held = held - self._reserved_held()

    def _reserved_held(self) -> int:
        return sum(min(own, self._share) for own in self._held_by_account.values())


class BodyCharge:
    """Bytes that count on one account of a budget."""

    __slots__ = ("_account", "_budget", "size")

    def __init__(self, budget: BodyBudget) -> None:
        self.size = 0
        self._account: str | None = None
        self._budget = budget

    def add(self, size: int, tenant: Tenant | None) -> None:
        """Count bytes, or raise `RefusedError`; the first decide the account."""
        if not self.size:
            self._account = self._budget.account(tenant)
        self._budget.reserve(size, self._account, self.size)
        self.size += size

    def release(self, size: int) -> None:
        self._budget.release(size, self._account)
        self.size -= size


def _exceeded(status: int, reason: Reason, scope: str = "") -> RefusedError:
    message = (
        f"Too many large requests{scope} are in progress. Retry after the time in Retry-After."
    )
    return RefusedError(Refusal(status, reason, message, ERROR_CODE, retry_after_s=RETRY_AFTER_S))

"""Which worker stores a response that a client may refer to, and whose the response is.

So many are remembered in all. When there is no room for another, one goes of a tenant that has more
than an equal part of it, its oldest first: who keeps to its part loses none by what others store.

Cost: a look-up; only who keeps to its part while the whole is full has all tenants looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

from proxy.core.tenants.tenants import Tenant

MOST_RESPONSES = 10_000


class ResponseOwners:
    """The responses that are remembered."""

    __slots__ = ("_count", "_of")

    def __init__(self) -> None:
        self._of: dict[Tenant | None, dict[str, str]] = {}  # their workers; oldest first
        self._count = 0

    def __len__(self) -> int:
        """Count them."""
        return self._count

    def __iter__(self) -> Iterator[tuple[str, str, Tenant | None]]:
        """List them: responses, workers, and whose they are."""
        for tenant, theirs in self._of.items():
            for response_id, worker in theirs.items():
                yield response_id, worker, tenant

    def holder(self, response_id: str, tenant: Tenant | None) -> str:
        """Name the worker that stores a tenant's response; empty if none is known."""
        theirs = self._of.get(tenant)
        return "" if theirs is None else theirs.get(response_id, "")

    def remember(self, response_id: str, worker: str, tenant: Tenant | None) -> None:
        """Note which worker stores one."""
        theirs = self._of.setdefault(tenant, {})
        self._count += response_id not in theirs
        theirs[response_id] = worker
        if self._count > MOST_RESPONSES:
            self._forget(tenant if len(theirs) * len(self._of) > MOST_RESPONSES else self._most())

    def _most(self) -> Tenant | None:
        """Name who has most: more than an equal part."""
        return max(self._of, key=lambda tenant: len(self._of[tenant]))

    def _forget(self, tenant: Tenant | None) -> None:
        theirs = self._of[tenant]
        del theirs[next(iter(theirs))]
        if not theirs:
            del self._of[tenant]
        self._count -= 1

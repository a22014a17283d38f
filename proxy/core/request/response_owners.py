"""The worker and the tenant of each stored response.

A full store forgets the oldest response of a tenant above an equal part.

Cost: a look-up; a full store may scan all tenants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from proxy.core.tenants.tenants import Tenant

MAX_RESPONSES = 10_000
OWNER_WAIT_S = 0.1  # hosts publish such news within 20 ms


class UnknownOwnerError(Exception):
    """No worker is known for a response, but another router process may report it soon."""


class OwnerWait:
    """A wait for news of a response's owner; `on_done` is called at the deadline."""

    __slots__ = ("_done", "deadline")

    def __init__(self, deadline: float, on_done: Callable[[float], None]) -> None:
        self.deadline = deadline
        self._done = on_done

    def expire(self, now: float) -> None:
        self._done(now)


class ResponseOwners:
    def __init__(self) -> None:
        self._by_tenant: dict[Tenant | None, dict[str, str]] = {}  # workers; oldest first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[str, str, Tenant | None]]:
        for tenant, own in self._by_tenant.items():
            for response_id, worker in own.items():
                yield response_id, worker, tenant

    def find_worker(self, response_id: str, tenant: Tenant | None) -> str:
        own = self._by_tenant.get(tenant)
        return "" if own is None else own.get(response_id, "")

    def remember(self, response_id: str, worker: str, tenant: Tenant | None) -> None:
        own = self._by_tenant.setdefault(tenant, {})
        self._count += response_id not in own
        own[response_id] = worker
        if self._count > MAX_RESPONSES:
            is_above_mean = len(own) * len(self._by_tenant) > MAX_RESPONSES
            self._forget(tenant if is_above_mean else self._largest_owner())

    def _largest_owner(self) -> Tenant | None:
        return max(self._by_tenant, key=lambda tenant: len(self._by_tenant[tenant]))

    def _forget(self, tenant: Tenant | None) -> None:
        own = self._by_tenant[tenant]
        del own[next(iter(own))]
        if not own:
            del self._by_tenant[tenant]
        self._count -= 1

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
        self._worker_of: dict[
            Tenant | None, dict[str, str]
        ] = {}  # worker by response; oldest first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[str, str, Tenant | None]]:
        for tenant, own in self._worker_of.items():
            for response_id, worker in own.items():
                yield response_id, worker, tenant

    def find_worker(self, response_id: str, tenant: Tenant | None) -> str:
        own = self._worker_of.get(tenant)
        return "" if own is None else own.get(response_id, "")

    def remember(self, response_id: str, worker: str, tenant: Tenant | None) -> None:
        own = self._worker_of.setdefault(tenant, {})
        self._count += response_id not in own
        own[response_id] = worker
        if self._count > MAX_RESPONSES:
            self._forget(
                tenant if len(own) * len(self._worker_of) > MAX_RESPONSES else self._most()
            )

    def _most(self) -> Tenant | None:
        return max(self._worker_of, key=lambda tenant: len(self._worker_of[tenant]))

    def _forget(self, tenant: Tenant | None) -> None:
        own = self._worker_of[tenant]
        del own[next(iter(own))]
        if not own:
            del self._worker_of[tenant]
        self._count -= 1

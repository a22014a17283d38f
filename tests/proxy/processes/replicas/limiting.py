"""A tenant's limits in one process, decided on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.config.shared import SharedConfig
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Tenants, TenantSpec
from proxy.processes.replicas.limits import SharedLimiter, TenantLimits
from proxy.processes.shared.shared_memory import SharedTable
from tests.proxy.wire.site import eventually


def per_minute(requests: int) -> Limits:
    return Limits(requests_per_minute=requests)


@asynccontextmanager
async def limiting(
    settings: SharedConfig, limits: Limits, password: str | None = None
) -> AsyncIterator[tuple[SharedLimiter, TenantLimits]]:
    """Let the server decide the requests of a tenant."""
    tenants, table = Tenants(), SharedTable.make(1)
    tenants.replace([TenantSpec("t", limits=limits)], {})
    clock = asyncio.get_running_loop().time
    limiter = SharedLimiter(settings, password, tenants, table, clock)
    task = asyncio.create_task(limiter.run())
    await eventually(lambda: limiter.is_up)
    [tenant] = tenants
    remote = tenant.ledger.remote_limits
    assert isinstance(remote, TenantLimits)
    yield limiter, remote
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    table.close()

"""Shares a router's state with the other processes."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.router import Router
from proxy.processes.shared.limits import SharedLimits
from proxy.processes.shared.load import SharedLoad
from proxy.processes.shared.prefixes import SharedPrefixes
from proxy.processes.shared.process_sheet import LIFE
from proxy.processes.shared.queue import SharedQueues
from proxy.processes.shared.shared_memory import SharedTable
from proxy.processes.shared.traffic import SharedTraffic


def share_router(
    router: Router,
    table: SharedTable,
    process: int,
    clock: Callable[[], float],
    soon: Callable[[Callable[[], None]], object],
    *,
    life: int,
) -> tuple[SharedLoad, SharedQueues]:
    """Share a router through a process's sheet; `life` differs from that of its predecessor."""
    shared_load = SharedLoad(table, process, router.fleet, clock, soon)
    shared_load.sheet.write_count(LIFE, life)
    queues = SharedQueues(router.queue, shared_load)
    shared_load.parts += (
        queues,
        SharedLimits(router.tenants, router.queue.shares, table, shared_load),
        SharedTraffic(router, shared_load),
        SharedPrefixes(router.fleet, shared_load),
    )
    router.fleet.roster.remote_load, router.queue.remote_queues = shared_load, queues
    return shared_load, queues

"""Processor time per request of a router alone and of a router among others that share its state.

Each router gets requests at the same rate. The measured one has a processor of its own, as on a
machine of its own, and is not slowed by other routers that take turns with it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.processes import Cpus, mock_worker
from benchmarks.replicas.stage import key_of, make_router, started
from benchmarks.router import mock, processes
from benchmarks.router.load import HOST, closed_loop
from benchmarks.router.prompts import Prompts
from tests.redis_server import RedisServer
from vllm_sched.workers.launch import Worker, free_port

SETTLE_S, MICRO = 2.0, 1e6
BODY_BYTES = 1024
CONNECTIONS = 32  # of each router
KEY = b"sk-0123456789abcdef0123456789abcdef"  # in every prompt
LIMITS = {"limits": {"requests_per_minute": 10_000_000, "concurrency": 10_000}}
TENANTS = {"free": {}, "limited": LIMITS}


@dataclass(frozen=True)
class Window:
    seconds: float
    per_s: float  # requests to each router


class Sample(NamedTuple):
    """Processor time per request in microseconds, and the requests of the measured router."""

    router: float
    server: float
    count: int


async def measure(
    routers: Sequence[Worker], redis: RedisServer, tenant: str, window: Window, seed: int
) -> Sample:
    """Send requests to all routers, and measure the first."""
    pids = processes.tree(routers[0].pid or 0)
    servers = [redis.process.pid]
    before, before_server = processes.cpu_seconds(pids), processes.cpu_seconds(servers)
    async with asyncio.TaskGroup() as tasks:
        loads = [
            tasks.create_task(_load(router.port, window, TenantPrompts(tenant, seed + number)))
            for number, router in enumerate(routers)
        ]
    counts = [load.result() for load in loads]
    used = processes.cpu_seconds(pids) - before
    used_server = processes.cpu_seconds(servers) - before_server
    return Sample(used / counts[0] * MICRO, used_server / sum(counts) * MICRO, counts[0])


class TenantPrompts(Prompts):
    """Requests with a tenant's key."""

    def __init__(self, tenant: str, seed: int) -> None:
        super().__init__(BODY_BYTES, seed=seed)
        self._key = key_of(tenant).encode()

    def next(self) -> tuple[bytes, bytes, bytes]:
        before, number, after = super().next()
        return before.replace(KEY, self._key, 1), number, after


async def _load(port: int, window: Window, prompts: Prompts) -> int:
    pause_s = CONNECTIONS / window.per_s
    async with closed_loop(port, prompts, CONNECTIONS, pause_s) as clients:
        await asyncio.sleep(window.seconds)
    if clients.errors:
        raise RuntimeError(f"requests failed at port {port}: {dict(clients.errors)}")
    return clients.tally.done


async def run(folder: Path, counts: Sequence[int], rounds: int, window: Window) -> None:
    """Print the medians."""
    cpus = Cpus.here(1)
    samples: dict[tuple[str, int, bool], list[Sample]] = defaultdict(list)
    with ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        workers = {f"w{port}": f"http://{HOST}:{port}" for port in ports}
        with processes.running_on(cpus.others):
            redis = RedisServer(folder)
            stack.callback(redis.close)
            for port in ports:
                stack.enter_context(mock_worker(port))
        sides = {}
        for count in counts:
            for shares in (False, True):
                sides[count, shares] = routers = [
                    make_router(
                        folder / f"{count}-{shares}-{number}.yaml",
                        workers,
                        redis if shares else None,
                        model=mock.MODEL,
                        tenants=TENANTS,
                        fleet_name=f"fleet-of-{count}",
                    )
                    for number in range(count)
                ]
                with processes.running_on(cpus.routers):
                    stack.enter_context(started(routers[:1]))
                with processes.running_on(cpus.others):
                    stack.enter_context(started(routers[1:]))
        await asyncio.sleep(SETTLE_S)
        for number in range(rounds):
            for side in list(sides)[:: 1 if number % 2 else -1]:
                for tenant in TENANTS:
                    sample = await measure(sides[side], redis, tenant, window, number)
                    samples[tenant, *side].append(sample)
    for tenant in TENANTS:
        print(f"tenant {tenant}:")
        first = medians(samples[tenant, counts[0], False]).router
        for count in counts:
            before, after = (medians(samples[tenant, count, shares]) for shares in (False, True))
            print(
                f"  {count} routers: {before.router:.0f} us per request without router.shared, "
                f"{after.router:.0f} us with it, {after.router / before.router:.2f}x, or "
                f"{after.router / first:.2f}x of {counts[0]} without; the server: "
                f"{after.server:.0f} us; {after.count / window.seconds:.0f} requests/s"
            )


def medians(samples: Sequence[Sample]) -> Sample:
    return Sample(*map(median, zip(*samples, strict=True)))


def main(folder: Path, counts: Sequence[int], rounds: int, window: Window) -> None:
    asyncio.run(run(folder, counts, rounds, window))

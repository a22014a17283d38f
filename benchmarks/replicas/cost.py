"""Processor time per request of one router alone and of several that share their state."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.processes import Cpus, mock_worker
from benchmarks.replicas.stage import key_of, make_router, started
from benchmarks.router import mock, processes
from benchmarks.router.load import HOST, closed_loop
from benchmarks.router.prompts import Prompts
from tests.redis_server import RedisServer
from vllm_sched.workers.launch import Worker, free_port

SETTLE_S, MICRO = 2.0, 1e6
BODY_BYTES = 1024
CONNECTIONS = 32  # of each router: with fewer, it wakes for fewer requests at a time
KEY = b"sk-0123456789abcdef0123456789abcdef"  # in every prompt
LIMITS = {"limits": {"requests_per_minute": 10_000_000, "concurrency": 10_000}}
TENANTS = {"free": {}, "limited": LIMITS}


async def measure(
    routers: Sequence[Worker], redis: RedisServer, tenant: str, seconds: float, seed: int
) -> tuple[float, float]:
    """Return the processor time per request in microseconds: of the routers, of the server."""
    pids = [pid for router in routers for pid in processes.tree(router.pid or 0)]
    servers = [redis.process.pid]
    before, before_server = processes.cpu_seconds(pids), processes.cpu_seconds(servers)
    async with asyncio.TaskGroup() as tasks:
        loads = [
            tasks.create_task(
                _load(router.port, CONNECTIONS, seconds, TenantPrompts(tenant, seed + number))
            )
            for number, router in enumerate(routers)
        ]
    requests = sum(load.result() for load in loads)
    used = processes.cpu_seconds(pids) - before
    used_server = processes.cpu_seconds(servers) - before_server
    return used / requests * MICRO, used_server / requests * MICRO


class TenantPrompts(Prompts):
    """Requests with a tenant's key."""

    def __init__(self, tenant: str, seed: int) -> None:
        super().__init__(BODY_BYTES, seed=seed)
        self._key = key_of(tenant).encode()

    def next(self) -> tuple[bytes, bytes, bytes]:
        before, number, after = super().next()
        return before.replace(KEY, self._key, 1), number, after


async def _load(port: int, connections: int, seconds: float, prompts: Prompts) -> int:
    async with closed_loop(port, prompts, connections) as clients:
        await asyncio.sleep(seconds)
    if clients.errors:
        raise RuntimeError(f"requests failed at port {port}: {dict(clients.errors)}")
    return clients.tally.done


async def run(folder: Path, counts: Sequence[int], rounds: int, seconds: float) -> None:
    """Print the medians."""
    cpus = Cpus.here(1)
    samples: dict[tuple[str, int, bool], list[tuple[float, float]]] = defaultdict(list)
    with ExitStack() as stack:
        ports = [free_port() for _ in range(2)]
        workers = {f"w{port}": f"http://{HOST}:{port}" for port in ports}
        with processes.running_on(cpus.others):
            redis = RedisServer(folder)
            stack.callback(redis.close)
            for port in ports:
                stack.enter_context(mock_worker(port))
        sides = {}
        with processes.running_on(cpus.routers):
            for count in counts:
                for shares in (False, True):
                    sides[count, shares] = [
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
        for number in range(rounds):
            for side in list(sides)[:: 1 if number % 2 else -1]:
                with processes.running_on(cpus.routers):
                    stack.enter_context(started(sides[side])) if not number else None
                if not number:
                    await asyncio.sleep(SETTLE_S)
                for tenant in TENANTS:
                    found = await measure(sides[side], redis, tenant, seconds, number)
                    samples[tenant, *side].append(found)
    for tenant in TENANTS:
        print(f"tenant {tenant}:")
        for count in counts:
            before, _ = medians(samples[tenant, count, False])
            cpu, server = medians(samples[tenant, count, True])
            first, _ = medians(samples[tenant, counts[0], False])
            print(
                f"  {count} routers: {before:.0f} us per request without router.shared, "
                f"{cpu:.0f} us with it, {cpu / before:.2f}x, or {cpu / first:.2f}x of "
                f"{counts[0]} without; the server: {server:.0f} us"
            )


def medians(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return median(cpu for cpu, _ in found), median(server for _, server in found)


def main(folder: Path, counts: Sequence[int], rounds: int, seconds: float) -> None:
    asyncio.run(run(folder, counts, rounds, seconds))

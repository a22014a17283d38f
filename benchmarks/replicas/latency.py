"""Time until the server has decided a request of a tenant near its limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

import uvloop

from proxy.config.shared import SharedConfig
from proxy.core.tenants.limits import LimitExceeded, Limits
from proxy.processes.replicas.limits import SharedLimiter, TenantLimits
from tests.proxy.processes.replicas.limiting import limiting
from tests.redis_server import RedisServer

CONCURRENCY, TOKENS = 50, 10  # too few for requests charged in advance
LOADS = ((1, 0.0), (1, 0.005), (8, 0.003))  # clients, and their pause between two requests


async def measure(
    limiter: SharedLimiter, limits: TenantLimits, clients: int, pause_s: float, seconds: float
) -> Sequence[float]:
    """Return the seconds of each decision."""
    latencies: list[float] = []
    until = time.perf_counter() + seconds
    ledger = limits.tenant.ledger

    async def client() -> None:
        while (began := time.perf_counter()) < until:
            decided: asyncio.Future[LimitExceeded | None] = asyncio.Future()
            if limits.request_decision(TOKENS, decided.set_result) is None:
                raise RuntimeError("the limiter has lost its server")
            exceeded = await decided
            latencies.append(time.perf_counter() - began)
            if ledger.enter_decided(exceeded) is None:
                ledger.leave(limiter.clock(), TOKENS, TOKENS)
            await asyncio.sleep(pause_s)

    await asyncio.gather(*(client() for _ in range(clients)))
    return latencies


async def run(folder: Path, seconds: float) -> None:
    """Print the percentiles."""
    redis = RedisServer(folder)
    try:
        settings = SharedConfig(url=redis.url)
        async with limiting(settings, Limits(concurrency=CONCURRENCY)) as (limiter, limits):
            for clients, pause_s in LOADS:
                latencies = await measure(limiter, limits, clients, pause_s, seconds)
                limits_ms = [limit * 1e3 for limit in quantiles(latencies, n=100)]
                p50, p99 = limits_ms[49], limits_ms[98]
                print(
                    f"{clients} clients with pauses of {pause_s * 1e3:g} ms: "
                    f"p50 {p50:.2f} ms, p99 {p99:.2f} ms of {len(latencies)} decisions"
                )
    finally:
        redis.close()


def main(folder: Path, seconds: float) -> None:
    uvloop.run(run(folder, seconds))

"""Measure the CPU cost of the router's core, per request and per decision.

    python -m benchmarks.router_decision

The first figure is the whole life of a request: a 1 KB chat body is parsed and sized, placed among
four workers by the adaptive rule with prefix affinity, gets its first token, and ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from proxy.core.fleet.charges import idle_fleet
from proxy.core.fleet.leases import Lease
from proxy.core.model.role import Role
from proxy.core.model.route_table import Route
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome, ReceivedRequest, RequestInfo, Usage
from proxy.core.request.route_lookup import find
from proxy.core.router import Router, RouterSettings
from proxy.core.tenants.limits import Limits
from proxy.core.tenants.tenants import Tenant, TenantSpec

MODEL = "tiny"
ROUNDS = 7


def make_router(workers: int) -> Router:
    """Return a router with short and long workers in equal numbers."""
    specs = []
    for i in range(workers):
        role, limit = (Role.LONG, 65_536) if i % 2 else (Role.SHORT, 8192)
        specs.append(WorkerSpec(f"w{i}", f"http://w{i}", role, MODEL, limit, max_requests=256))
    return Router(RouterSettings(), idle_fleet(specs))


def chat_body(number: int, size: int) -> bytes:
    """Return a chat body with a shared system prompt and a different question."""
    system = "You are a helpful assistant who answers briefly and in plain words. " * 5
    question = f"Question {number}: " + "why is the sky blue at noon? " * (size // 29)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 128, "stream": True}
    return json.dumps(body).encode()


def cpu_us(work: Callable[[], int]) -> float:
    """Return the median CPU microseconds of one unit of work."""
    figures = []
    for _ in range(ROUNDS):
        start = time.process_time()
        units = work()
        figures.append((time.process_time() - start) / units * 1e6)
    return statistics.median(figures)


def placed(router: Router, info: RequestInfo, now: float) -> Lease:
    lease = router.submit(info, now)
    assert isinstance(lease, Lease), lease
    return lease


def read(router: Router, route: Route, body: bytes, tenant: Tenant | None = None) -> RequestInfo:
    """Return the request of a valid body."""
    info = router.read(ReceivedRequest(route, body, b"application/json", "id", tenant))
    assert isinstance(info, RequestInfo), info
    return info


def request_us(requests: int, tenant: Tenant | None = None) -> float:
    """Measure whole requests among four workers, 32 in flight."""
    router, route = make_router(4), find("POST", "/v1/chat/completions")
    assert isinstance(route, Route)
    bodies = [chat_body(i, 640) for i in range(512)]
    usage = Usage(prompt_tokens=230, completion_tokens=128)
    now = 0.0

    def work() -> int:
        nonlocal now
        running: list[Lease] = []
        for i in range(requests):
            now += 0.001
            info = read(router, route, bodies[i % 512], tenant)
            running.append(placed(router, info, now))
            router.leases.record_first_token(running[-1], now + 0.02)
            if len(running) == 32:
                router.leases.finish(running.pop(0), now + 0.03, Outcome.DONE, usage)
        for lease in running:
            router.leases.finish(lease, now, Outcome.DONE, usage)
        return requests

    return cpu_us(work)


def read_us(size: int, requests: int) -> float:
    """Measure the parsing of a body."""
    router, route = make_router(4), find("POST", "/v1/chat/completions")
    assert isinstance(route, Route)
    body = chat_body(0, size)

    def work() -> int:
        for _ in range(requests):
            read(router, route, body)
        return requests

    return cpu_us(work)


def decision(workers: int, decisions: int) -> float:
    """Measure a placement and its release in a busy fleet."""
    router, route = make_router(workers), find("POST", "/v1/chat/completions")
    assert isinstance(route, Route)
    now = 0.0
    for i in range(workers * 8):
        now += 0.0001
        lease = placed(router, read(router, route, chat_body(i, 640)), now)
        router.leases.record_first_token(lease, now + 0.02)
    asks = [read(router, route, chat_body(i, 640)) for i in range(512)]

    def work() -> int:
        nonlocal now
        for i in range(decisions):
            now += 0.0001
            lease = placed(router, asks[i % 512], now)
            router.leases.finish(lease, now, Outcome.CLIENT_GONE)
        return decisions

    return cpu_us(work)


def dequeue_us(tenants: int, waiting: int, turns: int) -> float:
    """Measure how a free slot is given to one of many waiting requests."""
    spec = WorkerSpec("w", "http://w", Role.GENERAL, MODEL, 65_536, max_requests=1)
    fleet = idle_fleet([spec])
    router = Router(RouterSettings(queue_requests=waiting + 1), fleet)
    route = find("POST", "/v1/chat/completions")
    assert isinstance(route, Route)
    all_tenants = [Tenant(TenantSpec(f"t{i}")) for i in range(tenants)]
    body = chat_body(0, 640)
    lease = placed(router, read(router, route, body), 0.0)
    for i in range(waiting):
        router.submit(read(router, route, body, all_tenants[i % tenants]), 0.0)
    asks = [read(router, route, body, tenant) for tenant in all_tenants]
    now, number = 0.0, 0

    def work() -> int:
        nonlocal lease, now, number
        for _ in range(turns):
            now += 0.0001
            router.leases.finish(lease, now, Outcome.DONE)
            ((_, answer),) = router.pop_due(now)
            assert isinstance(answer, Lease)
            lease = answer
            number += 1
            router.submit(replace(asks[number % tenants]), now)
        return turns

    return cpu_us(work)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU cost of the router's core")
    parser.add_argument("--requests", type=int, default=5000)
    requests = parser.parse_args().requests
    print(f"whole life of a 1 KB chat request, 4 workers: {request_us(requests):6.1f} us")
    tenant = Tenant(TenantSpec("t", limits=Limits(10**9, 10**12, 10**6)))
    print(f"the same with a tenant's limits:              {request_us(requests, tenant):6.1f} us")
    dequeue = dequeue_us(50, 1000, requests // 5)
    print(f"a dequeue, 1000 waiting, 50 tenants:          {dequeue:6.1f} us")
    print(f"placement and release, 1000 workers:          {decision(1000, requests):6.1f} us")
    print(f"parsing a 1 KB body:                          {read_us(640, requests):6.1f} us")
    print(f"parsing a 100 KB body:                        {read_us(99_000, 500):6.1f} us")


if __name__ == "__main__":
    main()

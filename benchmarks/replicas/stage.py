"""Routers of one process each before the same workers, with a Redis server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.router.stage import router_process
from tests.redis_server import RedisServer
from vllm_sched.cli.fleet.key import hash_key
from vllm_sched.workers.launch import Worker


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}-0123456789"


def make_router(
    path: Path,
    workers: Mapping[str, str],
    redis: RedisServer | None,
    *,
    model: str,
    tenants: Mapping[str, dict[str, Any]],
    max_requests: int | None = None,
    fleet_name: str = "vllm-sched",
) -> Worker:
    """Return a router as users start it, alone without a server."""
    fleet: dict[str, Any] = {
        "model": model,
        "workers": [
            {"name": name, "url": url} | ({"max_requests": max_requests} if max_requests else {})
            for name, url in workers.items()
        ],
        "router": {"queue": {"max_requests": 4096}},
        "tenants": [
            {"name": name, "key_hashes": [hash_key(key_of(name))], **more}
            for name, more in tenants.items()
        ],
    }
    if redis is not None:
        fleet["router"]["shared"] = {"url": redis.url, "namespace": fleet_name}
    return router_process(path.stem, path, fleet)


@contextmanager
def started(routers: Sequence[Worker]) -> Iterator[None]:
    """Run routers."""
    with ExitStack() as stack:
        for router in routers:
            stack.callback(router.stop)
            router.start()
        for router in routers:
            router.wait_ready()
        yield

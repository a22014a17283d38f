"""Two routers that share their state through a real Redis server, before fake workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.proxy.processes.router_group import RouterGroup, leave, samples, until
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client, bearer
from tests.redis_server import RedisServer
from vllm_sched.cli.fleet.key import hash_key
from vllm_sched.workers.launch import free_port

NAMES = ("a", "b")
LIMITS = {
    "free": "{}",
    "again": "{requests_per_minute: 30}",
    "alone": "{requests_per_minute: 30}",
    "tokens": "{tokens_per_minute: 2000}",
    "parallel": "{concurrency: 5}",
} | {f"front-{number}": "{requests_per_minute: 30}" for number in (1, 2, 3)}
KEYS = {name: bearer(f"key-of-{name}-0123456789") for name in LIMITS}
FREE = KEYS["free"]


def start_host(
    redis: RedisServer,
    folder: str,
    make: pytest.TempPathFactory,
    ports: dict[str, int],
    port: int = 0,
) -> RouterGroup:
    """Start a router of one process before workers on these ports."""
    tenants = "".join(
        f"  - {{name: {name}, key_hashes: ['{hash_key(f'key-of-{name}-0123456789')}'], "
        f"limits: {limits}}}\n"
        for name, limits in LIMITS.items()
    )
    return RouterGroup(
        make.mktemp(folder),
        NAMES,
        1,
        listens=(port, 0),
        router=f", shared: {{url: '{redis.url}', timeout_s: 2}}",
        more=f"tenants:\n{tenants}",
        ports=ports,
    )


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def hosts(
    redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RouterGroup]]:
    ports = {name: free_port() for name in NAMES}
    with ThreadPoolExecutor() as pool:
        starts = [pool.submit(start_host, redis, name, tmp_path_factory, ports) for name in "ab"]
        found = [start.result() for start in starts]
    yield found
    for host in found:
        host.close()


@pytest.fixture
async def fakes(hosts: list[RouterGroup]) -> AsyncIterator[dict[str, FakeWorker]]:
    found = await hosts[0].start_workers()
    for host in hosts:
        await host.wait_until(lambda workers: {w["state"] for w in workers.values()} == {"up"})
    await wait_for_replicas(hosts, 2)
    yield found
    await leave(found, *hosts)


async def wait_for_sample(host: RouterGroup, name: str, value: float) -> None:
    client = await Client.connect(host.port)

    async def shows() -> bool:
        return (await samples(client))[name] == value

    await until(shows)
    client.close()


async def wait_for_replicas(hosts: list[RouterGroup], count: int) -> None:
    """Wait until each router hears from this number of replicas."""
    for host in hosts:
        await wait_for_sample(host, "proxy_replicas", count)

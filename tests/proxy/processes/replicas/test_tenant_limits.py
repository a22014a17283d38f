"""Limits of tenants over two routers and a real Redis server."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.proxy.processes.replicas.conftest import KEYS, wait_for_replicas
from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup, hold, samples
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Answer, Client, chat
from tests.redis_server import RedisServer


async def burst(hosts: list[RouterGroup], tenant: str, each: int) -> Counter[int]:
    """Send requests to all hosts at once; return the numbers of statuses."""
    clients = [await Client.connect(host.port) for _ in range(each) for host in hosts]
    answers = await asyncio.gather(*(client.ask(chat("hi", KEYS[tenant])) for client in clients))
    for client in clients:
        client.close()
    return Counter(answer.status for answer in answers)


@pytest.mark.usefixtures("fakes")
async def test_tenant_has_its_requests_per_minute_once(hosts: list[RouterGroup]) -> None:
    assert await burst(hosts, "minute", 40) == {200: 30, 429: 50}
    client = await Client.connect(hosts[1].port)
    refused = await client.ask(chat("hi", KEYS["minute"]))
    client.close()
    assert refused.status == 429
    assert b"requests per minute" in refused.body
    assert 1 <= int(dict(refused.headers)[b"retry-after"]) <= 2


async def test_tenant_has_its_tokens_per_minute_once(
    hosts: list[RouterGroup], fakes: dict[str, FakeWorker]
) -> None:
    """Estimates are corrected by usage, on whichever host a request was."""
    usage = b'"usage":{"prompt_tokens":150,"completion_tokens":50,"total_tokens":200}'
    for fake in fakes.values():
        fake.always(scripts.answer(200, b'{"choices":[],%b}' % usage))
    statuses: Counter[int] = Counter()
    clients = [await Client.connect(host.port) for host in hosts]
    for number in range(30):
        answer = await clients[number % 2].ask(chat("hi", KEYS["tokens"]))
        statuses[answer.status] += 1
    for client in clients:
        client.close()
    assert 10 <= statuses[200] <= 11  # of 200 tokens, with a little time


async def test_tenant_has_its_concurrency_once(
    hosts: list[RouterGroup], fakes: dict[str, FakeWorker]
) -> None:
    opening = hold(fakes)
    clients = [await Client.connect(host.port) for _ in range(6) for host in hosts]
    waiting = {asyncio.create_task(client.ask(chat("hi", KEYS["parallel"]))) for client in clients}
    refused: set[asyncio.Task[Answer]] = set()
    async with asyncio.timeout(DEADLINE_S):
        while len(refused) < 7:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            refused |= done
    assert {task.result().status for task in refused} == {429}
    # A client that leaves frees its place on the other host too.
    opening.set()
    assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}
    for client in clients:
        client.close()
    assert (await burst(hosts, "parallel", 2))[200] == 4


async def test_hosts_decide_with_a_part_of_each_limit_while_the_server_is_away(
    hosts: list[RouterGroup], fakes: dict[str, FakeWorker], redis: RedisServer
) -> None:
    """What they took in that time counts when the server is back, with or without its data."""
    assert len(fakes) == 2
    for tenant, stop, start in (
        ("again", redis.freeze, redis.thaw),
        ("alone", redis.kill, redis.start),
    ):
        assert await burst(hosts, tenant, 2) == {200: 4}
        stop()
        clients = [await Client.connect(host.port) for host in hosts]
        async with asyncio.timeout(DEADLINE_S):
            for client in clients:
                while (await samples(client))["proxy_shared_up"]:
                    await client.ask(chat("hi", KEYS["free"]))
        for client in clients:
            client.close()
        taken = (await burst(hosts, tenant, 20))[200]
        # Each host has 15 a minute, less a half of the four.
        assert 24 <= taken <= 28
        start()
        await wait_for_replicas(hosts, 2)
        await asyncio.sleep(1.5)  # charges are reported within a second
        left = (await burst(hosts, tenant, 20))[200]
        assert abs(4 + taken + left - 30) <= 4, (taken, left)

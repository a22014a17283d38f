"""Requests, limits of workers and stored responses of two routers that share their state."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.proxy.processes.replicas.conftest import FREE, NAMES, start_host, wait_for_replicas
from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup, hold, samples
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client, chat, request
from tests.proxy.wire.site import eventually
from tests.redis_server import RedisServer

LIMIT = 4  # of a worker, see RouterGroup


def served(fakes: dict[str, FakeWorker]) -> list[int]:
    return [len(fake.served) for fake in fakes.values()]


async def test_hosts_see_each_others_requests(
    hosts: list[RouterGroup], fakes: dict[str, FakeWorker]
) -> None:
    opening = hold(fakes)
    clients = [await Client.connect(host.port) for host in hosts]
    await clients[0].send(chat("hi", FREE))
    for host in hosts:
        await host.wait_until(lambda workers: sum(w["requests"] for w in workers.values()) == 1)
    await clients[1].send(chat("hi", FREE))  # goes to the other worker
    for host in hosts:
        await host.wait_until(lambda workers: {w["requests"] for w in workers.values()} == {1})
    opening.set()
    for client in clients:
        assert (await client.answer()).status == 200
        client.close()
    for host in hosts:
        await host.wait_until(lambda workers: {w["requests"] for w in workers.values()} == {0})


async def test_worker_limit_holds_in_a_burst_on_both_hosts(
    hosts: list[RouterGroup], fakes: dict[str, FakeWorker]
) -> None:
    """One request more per worker is possible: the other router may decide at the same moment."""
    opening = hold(fakes)
    clients = [await Client.connect(host.port) for _ in range(15) for host in hosts]
    for client in clients:
        await client.send(chat("hi", FREE))
    full = LIMIT * len(NAMES)
    await eventually(lambda: sum(served(fakes)) >= full, within=DEADLINE_S)
    await asyncio.sleep(0.5)  # more would come now
    at_once = served(fakes)
    opening.set()
    assert {(await client.answer()).status for client in clients} == {200}
    assert all(LIMIT <= count <= LIMIT + 1 for count in at_once), at_once
    for client in clients:
        client.close()


async def test_stored_response_is_found_from_any_host(
    hosts: list[RouterGroup], fakes: dict[str, FakeWorker]
) -> None:
    first, second = [await Client.connect(host.port) for host in hosts]
    for number in range(4):
        name = f"resp_{number}"
        body = json.dumps({"id": name, "object": "response", "status": "completed"}).encode()
        for fake in fakes.values():
            fake.always(scripts.answer(200, body))
        fields: dict[str, object] = {"model": "tiny", "input": "hi", "max_output_tokens": 5}
        before = served(fakes)
        answer = await first.ask(request(json.dumps(fields).encode(), FREE, path="/v1/responses"))
        assert answer.status == 200
        owner = [now - then for now, then in zip(served(fakes), before, strict=True)]
        await asyncio.sleep(0.2)
        fields["previous_response_id"] = name
        before = served(fakes)
        answer = await second.ask(request(json.dumps(fields).encode(), FREE, path="/v1/responses"))
        assert answer.status == 200
        assert [now - then for now, then in zip(served(fakes), before, strict=True)] == owner
    first.close()
    second.close()


async def test_drain_holds_on_all_hosts(
    hosts: list[RouterGroup], fakes: dict[str, FakeWorker]
) -> None:
    """A service address leads to any of the admin APIs; `now` moves requests on all hosts."""
    assert len(fakes) == 2
    first, second = hosts
    await first.admin_request("/workers/a/drain", "POST")
    await second.wait_until(lambda workers: workers["a"]["state"] == "drained")
    await second.admin_request("/workers/a/undrain", "POST")
    await first.wait_until(lambda workers: workers["a"]["state"] == "up")
    opening = fakes["a"].hold()
    client = await Client.connect(second.port)
    async with asyncio.timeout(DEADLINE_S):
        while not fakes["a"].served:  # until one is on this worker
            fakes["b"].always(scripts.answer())
            task = asyncio.create_task(client.ask(chat("hi", FREE)))
            await asyncio.wait([task], timeout=0.3)
    await first.admin_request("/workers/a/drain?now=true", "POST")
    assert (await task).status == 200
    assert fakes["b"].served
    opening.set()
    await first.admin_request("/workers/a/undrain", "POST")
    await second.wait_until(lambda workers: workers["a"]["state"] == "up")
    client.close()


async def test_hosts_go_on_without_the_server_and_meet_again(
    hosts: list[RouterGroup], fakes: dict[str, FakeWorker], redis: RedisServer
) -> None:
    for stop, start in ((redis.kill, redis.start), (redis.freeze, redis.thaw)):
        stop()
        clients = [await Client.connect(host.port) for host in hosts]
        async with asyncio.timeout(DEADLINE_S):
            for client in clients:
                while (page := await samples(client))["proxy_shared_up"]:
                    assert (await client.ask(chat("hi", FREE))).status == 200
                while page["proxy_replicas"] != 1:
                    page = await samples(client)
        for client in clients:
            assert (await client.ask(chat("hi", FREE))).status == 200
        start()
        await wait_for_replicas(hosts, 2)
        opening = hold(fakes)
        await clients[0].send(chat("hi", FREE))
        await hosts[1].wait_until(lambda workers: sum(w["requests"] for w in workers.values()) == 1)
        opening.set()
        assert (await clients[0].answer()).status == 200
        for client in clients:
            client.close()


async def test_host_that_starts_later_knows_drains_and_responses(
    redis: RedisServer,
    hosts: list[RouterGroup],
    fakes: dict[str, FakeWorker],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    client = await Client.connect(hosts[0].port)
    body = json.dumps({"id": "resp_early", "object": "response", "status": "completed"}).encode()
    for fake in fakes.values():
        fake.always(scripts.answer(200, body))
    fields = {"model": "tiny", "input": "hi", "max_output_tokens": 5}
    before = served(fakes)
    asked = request(json.dumps(fields).encode(), FREE, path="/v1/responses")
    assert (await client.ask(asked)).status == 200
    owner = [now - then for now, then in zip(served(fakes), before, strict=True)]
    other = NAMES[owner.index(0)]
    await hosts[0].admin_request(f"/workers/{other}/drain", "POST")
    third = start_host(redis, "later", tmp_path_factory, hosts[0].ports)
    try:
        await third.wait_until(lambda workers: workers[other]["state"] == "drained")
        await hosts[0].admin_request(f"/workers/{other}/undrain", "POST")
        await third.wait_until(lambda workers: workers[other]["state"] == "up")
        before = served(fakes)
        late = await Client.connect(third.port)
        fields["previous_response_id"] = "resp_early"
        asked = request(json.dumps(fields).encode(), FREE, path="/v1/responses")
        assert (await late.ask(asked)).status == 200
        assert [now - then for now, then in zip(served(fakes), before, strict=True)] == owner
        late.close()
    finally:
        third.close()
    client.close()
    await wait_for_replicas(hosts, 2)


async def test_killed_host_frees_what_it_held(
    redis: RedisServer,
    hosts: list[RouterGroup],
    fakes: dict[str, FakeWorker],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    third = start_host(redis, "third", tmp_path_factory, hosts[0].ports)
    try:
        await third.wait_until(lambda workers: {w["state"] for w in workers.values()} == {"up"})
        opening = hold(fakes)
        clients = [await Client.connect(third.port) for _ in range(3)]
        for client in clients:
            await client.send(chat("hi", FREE))
        for host in hosts:
            await host.wait_until(lambda workers: sum(w["requests"] for w in workers.values()) == 3)
    finally:
        third.close()
    for host in hosts:
        await host.wait_until(lambda workers: sum(w["requests"] for w in workers.values()) == 0)
    await wait_for_replicas(hosts, 2)
    opening.set()
    for client in clients:
        client.close()

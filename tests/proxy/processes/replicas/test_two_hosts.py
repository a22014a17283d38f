"""Routers that share their state: requests, limits, stored responses, and a HAProxy in front.

All tests are in one file, so that one process starts the routers once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from tests.haproxy import HAProxy
from tests.proxy.processes.replicas.conftest import (
    FREE,
    KEYS,
    NAMES,
    start_host,
    wait_for_replicas,
    wait_for_sample,
)
from tests.proxy.processes.router_group import (
    DEADLINE_S,
    POLL_S,
    RouterGroup,
    hold,
    id_prefix_of,
    leave,
    samples,
    stored_response,
    until,
    worker_of_response,
    worker_that_serves,
)
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Answer, BrokenError, Client, chat, get
from tests.proxy.wire.site import eventually
from tests.redis_server import RedisServer

Hosts = list[RouterGroup]
Fakes = dict[str, FakeWorker]
LIMIT = 4  # of a worker, see RouterGroup


async def connect_to(hosts: Hosts, each: int = 1) -> list[Client]:
    """Return some clients of each host, which take turns."""
    return [await host.connect() for _ in range(each) for host in hosts]


async def test_stored_response_is_found_from_any_host(hosts: Hosts, fakes: Fakes) -> None:
    first, second = await connect_to(hosts)
    for number in range(4):
        name = f"resp_{number}"
        for fake in fakes.values():
            fake.always(stored_response(name))
        owner = await worker_of_response(first, fakes, FREE)
        assert await worker_of_response(second, fakes, FREE, previous_response_id=name) == owner
        assert await worker_that_serves(second, fakes, get(f"/v1/responses/{name}", FREE)) == owner


async def test_drain_holds_on_all_hosts(hosts: Hosts, fakes: Fakes) -> None:
    """A service address leads to any of the admin APIs; `now` moves requests on all hosts."""
    first, second = hosts
    await first.admin_request("/workers/a/drain", "POST")
    await second.wait_until(lambda workers: workers["a"]["state"] == "drained")
    await second.admin_request("/workers/a/undrain", "POST")
    await first.wait_until(lambda workers: workers["a"]["state"] == "up")
    opening = fakes["a"].hold()
    client = await second.connect()
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


async def lose_server(hosts: Hosts) -> None:
    """Send requests to all hosts until they know that the server is away."""
    for host, client in zip(hosts, await connect_to(hosts), strict=True):
        async with asyncio.timeout(DEADLINE_S):
            while (await samples(client))["proxy_shared_up"]:
                assert (await client.ask(chat("hi", FREE))).status == 200
                await asyncio.sleep(POLL_S)
        await wait_for_sample(host, "proxy_replicas", 1)


async def test_hosts_go_on_without_the_server_and_meet_again(
    hosts: Hosts, fakes: Fakes, redis: RedisServer
) -> None:
    """Each host sees the requests of the others before and after."""
    clients = await connect_to(hosts)

    async def see_each_other() -> None:
        opening = hold(fakes)
        for number, client in enumerate(clients):
            await client.send(chat("hi", FREE))
            for host in hosts:
                await host.wait_for_requests(number + 1)
        opening.set()
        assert {(await client.answer()).status for client in clients} == {200}

    await see_each_other()
    for stop, start in ((redis.kill, redis.start), (redis.freeze, redis.thaw)):
        stop()
        await lose_server(hosts)
        for client in clients:
            assert (await client.ask(chat("hi", FREE))).status == 200
        start()
        await wait_for_replicas(hosts, 2)
        await see_each_other()


async def test_late_host_knows_drains_and_responses_and_frees_its_requests_when_killed(
    redis: RedisServer, hosts: Hosts, fakes: Fakes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for fake in fakes.values():
        fake.always(stored_response("resp_early"))
    owner = await worker_of_response(await hosts[0].connect(), fakes, FREE)
    [other] = set(NAMES) - {owner}
    await hosts[0].admin_request(f"/workers/{other}/drain", "POST")
    third = start_host(redis, "later", tmp_path_factory, hosts[0].ports)
    try:
        await third.wait_until(lambda workers: workers[other]["state"] == "drained")
        await hosts[0].admin_request(f"/workers/{other}/undrain", "POST")
        await third.wait_until(lambda workers: workers[other]["state"] == "up")
        late = await third.connect()
        found = await worker_of_response(late, fakes, FREE, previous_response_id="resp_early")
        assert found == owner
        opening = hold(fakes)
        for client in await connect_to([third], 3):
            await client.send(chat("hi", FREE))
        for host in hosts:
            await host.wait_for_requests(3)
    finally:
        third.close()
    for host in hosts:
        await host.wait_for_requests(0)
    await wait_for_replicas(hosts, 2)
    opening.set()
    await leave({}, third)


# Limits of tenants


async def burst(hosts: Hosts, tenant: str, each: int) -> Counter[int]:
    return await statuses(await connect_to(hosts, each), tenant)


async def statuses(clients: list[Client], tenant: str) -> Counter[int]:
    """Send a request of each client at once, close all, and return the numbers of statuses."""
    answers = await asyncio.gather(*(client.ask(chat("hi", KEYS[tenant])) for client in clients))
    for client in clients:
        client.close()
    return Counter(answer.status for answer in answers)


async def test_tenant_has_its_tokens_per_minute_once(hosts: Hosts, fakes: Fakes) -> None:
    """Estimates are corrected by usage, on whichever host a request was."""
    usage = b'"usage":{"prompt_tokens":150,"completion_tokens":50,"total_tokens":200}'
    for fake in fakes.values():
        fake.always(scripts.answer(200, b'{"choices":[],%b}' % usage))
    clients = await connect_to(hosts, 15)
    found = [(await client.ask(chat("hi", KEYS["tokens"]))).status for client in clients]
    assert 10 <= found.count(200) <= 11  # of 200 tokens, with a little time


async def test_tenant_has_its_concurrency_once(hosts: Hosts, fakes: Fakes) -> None:
    opening = hold(fakes)
    clients = await connect_to(hosts, 6)
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

    async def all_are_free() -> bool:
        return (await burst(hosts, "parallel", 2))[200] == 4

    await until(all_are_free)


@pytest.mark.usefixtures("fakes")
async def test_hosts_decide_with_a_part_of_each_limit_while_the_server_is_away(
    hosts: Hosts, redis: RedisServer
) -> None:
    """What they took in that time counts when the server is back, with or without its data."""
    for tenant, stop, start in (
        ("again", redis.freeze, redis.thaw),
        ("alone", redis.kill, redis.start),
    ):
        assert await burst(hosts, tenant, 2) == {200: 4}
        stop()
        await lose_server(hosts)
        taken = (await burst(hosts, tenant, 20))[200]
        # Each host has 15 a minute, less a half of the four.
        assert 24 <= taken <= 28
        start()
        await wait_for_replicas(hosts, 2)
        await asyncio.sleep(1.5)  # charges are reported within a second
        left = (await burst(hosts, tenant, 20))[200]
        assert abs(4 + taken + left - 30) <= 4, (taken, left)


# Three routers behind HAProxy; one of them is killed and started again


@pytest.fixture
async def three(
    redis: RedisServer, hosts: Hosts, fakes: Fakes, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Hosts]:
    """Return a list, in which a test may replace a router."""
    assert fakes
    # In a thread: the workers must answer probes.
    third = await asyncio.to_thread(start_host, redis, "third", tmp_path_factory, hosts[0].ports)
    found = [*hosts, third]
    await wait_for_replicas(found, 3)
    yield found
    found[2].close()


async def statuses_of(port: int, tenant: str, count: int) -> Counter[int]:
    return await statuses([await Client.connect(port) for _ in range(count)], tenant)


async def prefixes(port: int, count: int) -> Counter[bytes]:
    """Return how many of some connections each router serves, by the prefix of its IDs."""
    found: Counter[bytes] = Counter()
    for _ in range(count):
        client = await Client.connect(port)
        found[await id_prefix_of(client)] += 1
        client.close()
    return found


async def test_routers_serve_as_one_while_one_is_killed(
    three: Hosts, fakes: Fakes, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    front = HAProxy(tmp_path_factory.mktemp("haproxy"), [host.port for host in three])
    try:
        assert sorted((await prefixes(front.port, 12)).values()) == [4, 4, 4]
        await _has_thirty_requests(front.port, "front-1")
        client = await Client.connect(front.port)
        refused = await client.ask(chat("hi", KEYS["front-1"]))
        client.close()
        assert (refused.status, b"requests per minute" in refused.body) == (429, True)
        assert 1 <= int(refused.one(b"retry-after")) <= 2
        await _burst_keeps_worker_limits(front.port, fakes)

        for fake in fakes.values():
            fake.always(scripts.stream(50, gap_s=0.05))
        streams = [await Client.connect(front.port) for _ in three]
        for client in streams:
            await client.send(chat("hi", FREE, stream=True))
            await client.head()
        kept = [await Client.connect(front.port) for _ in three]  # of each router
        names = [await id_prefix_of(client) for client in kept]
        killed = three[2]
        killed.close()

        for fake in fakes.values():
            fake.always(scripts.answer())
        assert await statuses_of(front.port, "free", 30) == {200: 30}
        for client in kept:  # HAProxy connects them to another router
            assert (await client.ask(chat("hi", FREE))).status == 200
        assert [await _is_whole(client) for client in streams].count(True) == 2
        # Less than 30 would mean that the killed router's part is lost.
        await _has_thirty_requests(front.port, "front-2")

        three[2] = await asyncio.to_thread(
            start_host, redis, "restarted", tmp_path_factory, killed.ports, killed.port
        )
        await wait_for_replicas(three, 3)
        async with asyncio.timeout(DEADLINE_S):
            while len(found := await prefixes(front.port, 6)) < 3:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        assert len(found.keys() & set(names)) == 2  # the third is new
        await _has_thirty_requests(front.port, "front-3")
        await _burst_keeps_worker_limits(front.port, fakes)
        for client in (*streams, *kept):
            client.close()
    finally:
        front.close()


async def _has_thirty_requests(port: int, tenant: str) -> None:
    """Check that a tenant has 30 requests a minute, however long the requests take."""
    began = time.monotonic()
    found = await statuses_of(port, tenant, 60)
    assert 30 <= found[200] <= 30 + (time.monotonic() - began) // 2
    assert found == {200: found[200], 429: 60 - found[200]}


async def _burst_keeps_worker_limits(port: int, fakes: Fakes) -> None:
    """Each router may place one request more than the others know of."""
    opening = hold(fakes)
    before = {name: len(fake.served) for name, fake in fakes.items()}

    def at_once() -> list[int]:
        return [len(fake.served) - before[name] for name, fake in fakes.items()]

    burst = asyncio.create_task(statuses_of(port, "free", 30))
    await eventually(lambda: sum(at_once()) >= LIMIT * len(NAMES), within=DEADLINE_S)
    await asyncio.sleep(0.5)  # more would come now
    counts = at_once()
    opening.set()
    assert await burst == {200: 30}
    assert all(LIMIT <= count <= LIMIT + 3 for count in counts), counts  # three routers


async def _is_whole(client: Client) -> bool:
    pieces = b""
    try:
        while piece := await client.piece():
            pieces += piece
    except (BrokenError, ConnectionError):
        return False
    return pieces.endswith(scripts.DONE)

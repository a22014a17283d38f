"""Routers that share their state: requests, limits, stored responses, and a HAProxy in front.

All tests are in one file, so that one process starts the routers once.
"""

from __future__ import annotations

import asyncio
import json
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
)
from tests.proxy.processes.router_group import (
    DEADLINE_S,
    POLL_S,
    RouterGroup,
    hold,
    id_prefix_of,
    samples,
)
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Answer, BrokenError, Client, chat, request
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
                    await asyncio.sleep(POLL_S)
                while page["proxy_replicas"] != 1:
                    await asyncio.sleep(POLL_S)
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


async def test_late_host_knows_drains_and_responses_and_frees_its_requests_when_killed(
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
        opening = hold(fakes)
        clients = [late, *[await Client.connect(third.port) for _ in range(2)]]
        for each in clients:
            await each.send(chat("hi", FREE))
        for host in hosts:
            await host.wait_until(lambda workers: sum(w["requests"] for w in workers.values()) == 3)
    finally:
        third.close()
    for host in hosts:
        await host.wait_until(lambda workers: sum(w["requests"] for w in workers.values()) == 0)
    await wait_for_replicas(hosts, 2)
    opening.set()
    for each in (client, *clients):
        each.close()


# Limits of tenants


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
    async with asyncio.timeout(DEADLINE_S):
        while (await burst(hosts, "parallel", 2))[200] < 4:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


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
                    await asyncio.sleep(POLL_S)
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


# Three routers behind HAProxy; one of them is killed and started again


@pytest.fixture
async def three(
    redis: RedisServer,
    hosts: list[RouterGroup],
    fakes: dict[str, FakeWorker],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[list[RouterGroup]]:
    """Return a list, in which a test may replace a router."""
    assert fakes
    # In a thread: the workers must answer probes.
    third = await asyncio.to_thread(start_host, redis, "third", tmp_path_factory, hosts[0].ports)
    found = [*hosts, third]
    await wait_for_replicas(found, 3)
    yield found
    found[2].close()


async def statuses(port: int, tenant: str, count: int) -> Counter[int]:
    """Send requests at once, each on its own connection; return the numbers of statuses."""
    clients = [await Client.connect(port) for _ in range(count)]
    answers = await asyncio.gather(*(client.ask(chat("hi", KEYS[tenant])) for client in clients))
    for client in clients:
        client.close()
    return Counter(answer.status for answer in answers)


async def prefixes(port: int, count: int) -> Counter[bytes]:
    """Return how many of some connections each router serves, by the prefix of its IDs."""
    found: Counter[bytes] = Counter()
    for _ in range(count):
        client = await Client.connect(port)
        found[await id_prefix_of(client)] += 1
        client.close()
    return found


async def test_routers_serve_as_one_while_one_is_killed(
    three: list[RouterGroup],
    fakes: dict[str, FakeWorker],
    redis: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    front = HAProxy(tmp_path_factory.mktemp("haproxy"), [host.port for host in three])
    try:
        assert sorted((await prefixes(front.port, 12)).values()) == [4, 4, 4]
        assert await statuses(front.port, "front-1", 60) == {200: 30, 429: 30}
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
        assert await statuses(front.port, "free", 30) == {200: 30}
        for client in kept:  # HAProxy connects them to another router
            assert (await client.ask(chat("hi", FREE))).status == 200
        assert [await _is_whole(client) for client in streams].count(True) == 2
        # Less than 30 would mean that the killed router's part is lost.
        assert await statuses(front.port, "front-2", 60) == {200: 30, 429: 30}

        three[2] = await asyncio.to_thread(
            start_host, redis, "restarted", tmp_path_factory, killed.ports, killed.port
        )
        await wait_for_replicas(three, 3)
        async with asyncio.timeout(DEADLINE_S):
            while len(found := await prefixes(front.port, 6)) < 3:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        assert len(found.keys() & set(names)) == 2  # the third is new
        assert await statuses(front.port, "front-3", 60) == {200: 30, 429: 30}
        await _burst_keeps_worker_limits(front.port, fakes)
        for client in (*streams, *kept):
            client.close()
    finally:
        front.close()


async def _burst_keeps_worker_limits(port: int, fakes: dict[str, FakeWorker]) -> None:
    """Each router may place one request more than the others know of."""
    opening = hold(fakes)
    before = {name: len(fake.served) for name, fake in fakes.items()}

    def at_once() -> list[int]:
        return [len(fake.served) - before[name] for name, fake in fakes.items()]

    burst = asyncio.create_task(statuses(port, "free", 30))
    await eventually(lambda: sum(at_once()) >= LIMIT * len(NAMES), within=DEADLINE_S)
    await asyncio.sleep(0.5)  # more would come now
    counts = at_once()
    opening.set()
    assert await burst == {200: 30}
    assert all(LIMIT <= count <= LIMIT + 2 for count in counts), counts


async def _is_whole(client: Client) -> bool:
    pieces = b""
    try:
        while piece := await client.piece():
            pieces += piece
    except (BrokenError, ConnectionError):
        return False
    return pieces.endswith(scripts.DONE)

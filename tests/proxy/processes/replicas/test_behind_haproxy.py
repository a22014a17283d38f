"""Three routers behind a real HAProxy; one of them is killed and started again."""

from __future__ import annotations

import asyncio
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
from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup, hold, id_prefix_of
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import BrokenError, Client, chat
from tests.proxy.wire.site import eventually
from tests.redis_server import RedisServer

LIMIT = 4  # of a worker, see RouterGroup


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
        assert await statuses(front.port, "minute", 60) == {200: 30, 429: 30}
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
        assert await statuses(front.port, "again", 60) == {200: 30, 429: 30}

        three[2] = await asyncio.to_thread(
            start_host, redis, "restarted", tmp_path_factory, killed.ports, killed.port
        )
        await wait_for_replicas(three, 3)
        async with asyncio.timeout(DEADLINE_S):
            while len(served := await prefixes(front.port, 6)) < 3:
                pass
        assert len(served.keys() & set(names)) == 2  # the third is new
        assert await statuses(front.port, "alone", 60) == {200: 30, 429: 30}
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

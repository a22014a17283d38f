"""Limits of one tenant in two processes, which use what the server has charged in advance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
import redis as redis_library

from proxy.config.shared import SharedConfig
from proxy.core.tenants.limits import LimitExceeded, Limits
from proxy.processes.replicas.limit_advance import MOMENT_S, LimitAdvance
from proxy.processes.replicas.limits import SharedLimiter, TenantLimits
from tests.proxy.processes.replicas.limiting import limiting, per_minute
from tests.proxy.wire.site import eventually
from tests.redis_server import RedisServer

CLIENTS, TOKENS = 20, 10
MANY = 6400


class Process:
    """One process's requests, which stay in flight."""

    def __init__(self, limiter: SharedLimiter, limits: TenantLimits) -> None:
        self.limiter = limiter
        self.limits = limits
        self.ledger = limits.tenant.ledger
        self.admitted = 0

    async def send(self) -> bool:
        """Send a request; return whether it is admitted."""
        exceeded: LimitExceeded | None = None
        if not self.limits.take_from_advance(TOKENS):
            decided: asyncio.Future[LimitExceeded | None] = asyncio.Future()
            if self.limits.request_decision(TOKENS, decided.set_result) is None:
                exceeded = self.ledger.decide(self.limiter.clock(), TOKENS)
            else:
                exceeded = await decided
        if self.ledger.enter_decided(exceeded) is None:
            self.admitted += 1
            return True
        return False

    async def send_until_refused(self) -> None:
        async def client() -> None:
            admitted = True
            while admitted:
                admitted = await self.send()
                await asyncio.sleep(0)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def send_at_once(self, count: int) -> None:
        """Send requests, half of them after the others, so that they are charged in advance."""
        for part in (count // 2, count - count // 2):
            assert all(await asyncio.gather(*(self.send() for _ in range(part))))

    async def settle(self) -> None:
        """Wait until nothing is charged in advance or to be reported."""
        await eventually(lambda: not (self.limits.advance.requests or self.limits.has_unreported))


class Server:
    """The server and what it counts."""

    def __init__(self, redis: RedisServer) -> None:
        self._client = redis_library.Redis(port=redis.port)

    def clear(self) -> None:
        self._client.flushall()
        self._client.config_resetstat()

    @property
    def calls(self) -> int:
        return int(self._client.info("commandstats")["cmdstat_evalsha"]["calls"])

    def full_at(self, field: str) -> float:
        """Return when a bucket of the tenant will be full."""
        return float(self._client.hget("{vllm-sched}:tenant:t", field))

    def close(self) -> None:
        self._client.close()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def server(redis: RedisServer) -> Server:
    found = Server(redis)
    found.clear()
    return found


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Start a server for one test, which kills it."""
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    yield redis
    redis.close()


async def processes_of(
    stack: AsyncExitStack, redis: RedisServer, limits: Limits, count: int = 2
) -> list[Process]:
    # On a busy machine a reply may be late.
    settings = SharedConfig(url=redis.url).model_copy(update={"timeout_s": 60.0})
    return [
        Process(*await stack.enter_async_context(limiting(settings, limits))) for _ in range(count)
    ]


async def fill(processes: list[Process]) -> int:
    """Send requests until all are refused and nothing is left in advance; return the admitted."""
    for _ in range(3):
        await asyncio.gather(*(process.send_until_refused() for process in processes))
        await asyncio.gather(*(process.settle() for process in processes))
    return sum(process.admitted for process in processes)


@pytest.mark.parametrize("tokens", [None, 100 * MANY])
async def test_requests_per_minute_are_exact(
    stack: AsyncExitStack, redis: RedisServer, server: Server, tokens: int | None
) -> None:
    limits = Limits(requests_per_minute=MANY, tokens_per_minute=tokens)
    processes = await processes_of(stack, redis, limits)
    began = time.monotonic()
    admitted = await fill(processes)
    later = (time.monotonic() - began) * MANY / 60
    assert MANY <= admitted <= MANY + later + 1
    assert server.calls < admitted / 4


async def test_concurrency_is_exact(
    stack: AsyncExitStack, redis: RedisServer, server: Server
) -> None:
    processes = await processes_of(stack, redis, Limits(concurrency=1000))
    assert await fill(processes) == 1000
    assert server.calls < 500
    for process in processes:
        process.ledger.leave(process.limiter.clock(), TOKENS, TOKENS)
        process.admitted -= 1
    assert await fill(processes) == 1000


async def test_unused_advance_is_returned(
    stack: AsyncExitStack, redis: RedisServer, server: Server
) -> None:
    limits = Limits(requests_per_minute=640, tokens_per_minute=640 * TOKENS)
    [process] = await processes_of(stack, redis, limits, 1)
    began, each_s = time.time(), 60 / 640
    assert await process.send()
    first_s = time.time() - began
    await process.send_at_once(39)
    assert process.limits.advance.requests
    await process.settle()
    for field in ("r", "t"):
        assert 0.0 <= server.full_at(field) - began - 40 * each_s <= first_s + each_s


async def test_tokens_of_a_response_are_charged_at_its_end(
    stack: AsyncExitStack, redis: RedisServer, server: Server
) -> None:
    [process] = await processes_of(stack, redis, Limits(tokens_per_minute=60_000), 1)
    assert await process.send()
    await process.settle()
    began = time.time()
    process.ledger.leave(process.limiter.clock(), TOKENS, TOKENS + 30_000)
    await eventually(lambda: server.full_at("t") >= began + 29)
    process.ledger.leave(process.limiter.clock(), 20_000, 0)
    await eventually(lambda: server.full_at("t") <= began + 12)


async def test_advance_is_given_up_without_the_server(
    stack: AsyncExitStack, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    [process] = await processes_of(stack, own_redis, per_minute(MANY), 1)
    await process.send_at_once(40)
    assert process.limits.advance.requests
    own_redis.kill()
    await eventually(lambda: not process.limiter.is_up)
    assert not process.limits.take_from_advance(TOKENS)
    left, _ = process.ledger.remaining(process.limiter.clock())
    assert left is not None
    assert left[1] >= MANY - 41
    [record] = [r for r in caplog.records if "this router enforces 1/1" in r.getMessage()]
    assert "Error:" not in record.getMessage()  # the class of the exception


async def restart(redis: RedisServer, processes: list[Process]) -> None:
    """Restart the server without its data; return when all processes use it again."""
    redis.kill()
    redis.start()
    await eventually(lambda: not any(process.limiter.is_up for process in processes))
    await eventually(lambda: all(process.limiter.is_up for process in processes))


async def test_concurrency_holds_when_the_server_loses_its_data(
    stack: AsyncExitStack, own_redis: RedisServer
) -> None:
    """Only one of the processes gets new requests."""
    processes = await processes_of(stack, own_redis, Limits(concurrency=10), 3)
    for process in processes:
        process.limiter._table.hosts = 3
        assert await process.send()
        assert await process.send()
        assert await process.send()

    async def send() -> None:
        while True:
            await processes[0].send()
            await asyncio.sleep(0.01)

    sender = asyncio.create_task(send())
    await restart(own_redis, processes)
    await eventually(lambda: processes[0].ledger.running_elsewhere == 6)
    await asyncio.sleep(0.1)
    sender.cancel()
    assert sum(process.ledger.running for process in processes) == 10


async def test_spent_limits_hold_when_the_server_loses_its_data(
    stack: AsyncExitStack, own_redis: RedisServer
) -> None:
    """The process that has spent them has no requests any more."""
    one, other = processes = await processes_of(stack, own_redis, per_minute(60))
    began = time.monotonic()
    for process in processes:
        process.limiter._table.hosts = 2
    while await one.send():
        one.ledger.leave(one.limiter.clock(), TOKENS, TOKENS)
    await one.settle()
    await restart(own_redis, processes)
    while await other.send():
        other.ledger.leave(other.limiter.clock(), TOKENS, TOKENS)
    later = time.monotonic() - began  # one request a second
    assert 60 <= one.admitted + other.admitted <= 60 + later + 1


def test_advance_is_twice_what_comes_in_a_moment() -> None:
    advance = LimitAdvance(0.0)
    assert not advance.take(5)
    assert advance.change(0.001) == (0, 0)  # a single request
    assert not advance.take(5)
    assert advance.change(0.002) == (4, 20)
    advance.add(4, 20)
    assert advance.take(5)
    assert not advance.take(50)
    assert advance.take(5)
    assert advance.change(0.003) == (10 - 2, 140 - 10)
    advance.add(8, 130)
    assert advance.change(2 * MOMENT_S) == (4 - 10, 70 - 140)  # half of them in a moment
    assert (advance.requests, advance.tokens) == (4, 70)
    assert advance.take(70)
    assert advance.change(2.5 * MOMENT_S) == (4 - 3, 140)
    assert advance.change(4 * MOMENT_S) == (-3, 0)
    assert not advance.take(1)

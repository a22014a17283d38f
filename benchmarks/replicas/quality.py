"""How well several routers keep to shares and limits, against one router, on real sockets.

Fake workers compute one prompt at a time, as an engine without chunks does; a request's number of
tokens is in its text.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

from benchmarks.replicas.stage import key_of, make_router, started
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call, FakeWorker, PeerGoneError
from tests.proxy.wire.raw_client import Client, bearer, chat
from tests.redis_server import RedisServer
from vllm_sched.workers.launch import Worker

WORKERS, SLOTS = 4, 6
PREFILL_S, LONG_S, DECODE_S = 0.01, 0.6, 0.15
LONG_TEXT = "word " * 12_000
PER_MINUTE = 300
TENANTS = {
    "left": {}, "right": {}, "limited": {"limits": {"requests_per_minute": PER_MINUTE}},
}  # fmt: skip
CLIENTS, LIMITED_CLIENTS = 24, 6
SETTLE_S = 2.0


@dataclass
class Engine:
    """A fake worker and the requests on it."""

    fake: FakeWorker
    prefilling: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: int = 0
    most: int = 0

    async def serve(self, call: Call) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async with self.prefilling:
                await asyncio.sleep(LONG_S if len(call.body) > len(LONG_TEXT) else PREFILL_S)
            await call.send(scripts.STREAM_HEAD + scripts.chunk(scripts.token("a")))
            await asyncio.sleep(DECODE_S)
            await call.send(scripts.chunk(scripts.DONE) + scripts.LAST_CHUNK)
        except PeerGoneError:
            return
        finally:
            self.running -= 1


@dataclass
class Served:
    """The results of one side."""

    served: Counter[str] = field(default_factory=Counter)
    ttfts: list[float] = field(default_factory=list)  # of short requests
    most: int = 0  # requests at once on a worker

    def p(self, percent: int) -> float:
        return quantiles(self.ttfts, n=100)[percent - 1]


async def send(
    router: Worker, tenant: str, text: str, until: float, served: Served, pause_s: float = 0.0
) -> None:
    """Send one request after the other."""
    client = await Client.connect(router.port)
    request = chat(text, bearer(key_of(tenant)), stream=True)
    while time.monotonic() < until:
        began = time.monotonic()
        await client.send(request)
        head = await client.head()
        body = await client.body(head) if head.status != 200 else await client.piece()
        if head.status == 200:
            served.served[tenant] += 1
            if text != LONG_TEXT:
                served.ttfts.append(time.monotonic() - began)
            while body:
                body = await client.piece()
        await asyncio.sleep(pause_s)
    client.writer.close()


@asynccontextmanager
async def engines() -> AsyncIterator[list[Engine]]:
    started = [Engine(FakeWorker(f"w{number}", max_model_len=65_536)) for number in range(WORKERS)]
    for engine in started:
        engine.fake.always(engine.serve)
        await engine.fake.listen()
    try:
        yield started
    finally:
        for engine in started:
            await engine.fake.stop()


async def overload(routers: Sequence[Worker], served: Served, seconds: float) -> None:
    """Send more than the workers take: one tenant at the first router, the other at the last."""
    until = time.monotonic() + seconds
    await asyncio.gather(
        *(send(routers[0], "left", "hi", until, served) for _ in range(CLIENTS)),
        *(send(routers[-1], "right", "hi", until, served) for _ in range(CLIENTS)),
    )


async def limited(routers: Sequence[Worker], served: Served, seconds: float) -> None:
    """Send more than a tenant's limit, at all routers."""
    until = time.monotonic() + seconds
    await asyncio.gather(
        *(
            send(routers[number % len(routers)], "limited", "hi", until, served, pause_s=0.02)
            for number in range(LIMITED_CLIENTS)
        )
    )


async def mixed(routers: Sequence[Worker], served: Served, seconds: float) -> None:
    """Send a few long prompts, and shorts beside them."""

    def at(number: int) -> Worker:
        return routers[number % len(routers)]

    until = time.monotonic() + seconds
    await asyncio.gather(
        *(
            send(routers[n % len(routers)], "left", LONG_TEXT, until, Served(), 0.5)
            for n in range(2)
        ),
        *(send(routers[n % len(routers)], "right", "hi", until, served, 0.1) for n in range(6)),
    )


async def run(folder: Path, counts: Sequence[int], seconds: float) -> None:
    """Print a row for each number of routers, without shared state too."""
    print(
        f"{'routers':24}  {'shares':>8}  {'limit':>8}  {'over-placed':>11}  {'served/s':>8}  "
        f"{'shorts TTFT p50':>15}  {'p99':>8}"
    )
    for count in counts:
        for shares in (True, False) if count > 1 else (False,):
            with ExitStack() as stack:
                redis = RedisServer(folder)
                stack.callback(redis.close)
                async with engines() as workers:
                    urls = {engine.fake.name: engine.fake.url for engine in workers}
                    routers = [
                        make_router(
                            folder / f"{count}-{shares}-{number}.yaml",
                            urls,
                            redis if shares else None,
                            model="tiny",
                            tenants=TENANTS,
                            max_requests=SLOTS,
                        )
                        for number in range(count)
                    ]
                    await asyncio.to_thread(stack.enter_context, started(routers))
                    await asyncio.sleep(SETTLE_S)
                    await _row(
                        routers, workers, seconds, f"{count}, shared" if shares else str(count)
                    )


async def _row(
    routers: Sequence[Worker], workers: Sequence[Engine], seconds: float, name: str
) -> None:
    first, second, third = Served(), Served(), Served()
    await overload(routers, first, seconds)
    over = max(engine.most for engine in workers) - SLOTS
    await asyncio.sleep(1.0)
    await limited(routers, second, seconds)
    await asyncio.sleep(1.0)
    await mixed(routers, third, seconds)
    left, right = first.served["left"], first.served["right"]
    allowed = PER_MINUTE * (1 + seconds / 60)
    limit = second.served["limited"] / allowed - 1
    print(
        f"{name:24}  {abs(left - right) / (left + right):8.1%}  {limit:+8.1%}  {over:11d}  "
        f"{(left + right) / seconds:8.1f}  "
        f"{third.p(50) * 1000:12.0f} ms  {third.p(99) * 1000:5.0f} ms",
        flush=True,
    )


def main(folder: Path, counts: Sequence[int], seconds: float) -> None:
    asyncio.run(run(folder, counts, seconds))

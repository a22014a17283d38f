"""The router's estimate of a real worker's KV cache, with a shared prefix."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openai import AsyncOpenAI

from proxy.app import App
from proxy.config import parse
from proxy.core.fleet.worker import Worker as Known
from tests.fleet.test_worker import DEADLINE_S, complete, prompt
from vllm_sched.workers.launch import Worker

# Long answers, of which none is read to its end.
MANY, SHARED, OWN, OUTPUT = 12, 4000, 200, 2400
BLOCK = 128


@asynccontextmanager
async def routed(worker: Worker) -> AsyncIterator[tuple[AsyncOpenAI, Known]]:
    """Run a router with one worker, and wait until the cache size is known."""
    fleet = {
        "model": "tiny",
        "workers": [{"name": "w0", "url": worker.url}],
        "router": {"port": 0, "admin": {"port": 0}, "probe": {"interval_s": 0.1}},
    }
    app = App(parse(json.dumps(fleet), "fleet.yaml"))
    await app.start()
    try:
        [known] = app.fleet.roster
        async with asyncio.timeout(DEADLINE_S):
            while not known.up or not known.kv_capacity:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)
        async with AsyncOpenAI(
            base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        ) as client:
            yield client, known
    finally:
        await app.stop()


async def test_shared_prefix_is_charged_once_and_agrees_with_the_gauge(
    workers: dict[str, Worker],
) -> None:
    begun = [asyncio.Event() for _ in range(MANY)]

    async def read(client: AsyncOpenAI, number: int) -> None:
        tokens = prompt(70_000, SHARED) + prompt(70_001 + number, OWN)
        async for _ in await complete(client, tokens, OUTPUT, stream=True):
            begun[number].set()

    async with routed(workers["default"]) as (client, known):
        reading = [asyncio.create_task(read(client, number)) for number in range(MANY)]
        for event in begun:
            await event.wait()
        for _ in range(2):  # the next scrape may have started before the last request
            last = known.gauges
            async with asyncio.timeout(DEADLINE_S):
                while known.gauges is last:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        gauges = known.gauges
        assert gauges is not None
        assert (gauges.running, gauges.waiting, known.requests) == (MANY, 0, MANY)
        assert known.kv_tokens < MANY * (SHARED + OWN) / 3
        inside = gauges.kv_usage * known.kv_capacity
        # On a slow machine answers are longer by now than predicted.
        surely = min(inside - MANY * BLOCK, known.kv_tokens)
        assert SHARED < surely <= known.kv_held < inside + MANY * OUTPUT
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        async with asyncio.timeout(DEADLINE_S):
            while known.requests:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.005)
        assert (known.kv_tokens, known.kv_coming, known.running_prefixes.saved) == (0, 0, 0)

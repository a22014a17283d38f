"""Prefill here, decode there, where the decode worker has `long_prompt` and prompts of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI

from proxy.config import TransferConfig
from tests.fleet.conftest import ENDS, SETTINGS, both, started
from tests.fleet.test_connectors import Pair
from tests.fleet.test_handover import (
    ABOVE,
    DECODE,
    PREFILL,
    Said,
    connected,
    direct,
    freed,
    handed_over,
    listed,
    tokens,
)
from tests.fleet.test_router import routing
from tests.fleet.test_worker import complete, prompt, settled

FIRST, HELD, BROUGHT = "read there", "held there", "read elsewhere"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Start them as `vllm-sched up` would."""
    folder = tmp_path_factory.mktemp("held")
    fleet = both(TransferConfig(connector="nixl"), ENDS, policies={"decode": SETTINGS})
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    with (
        started(fleet, folder) as ends,
        routing(folder, listed(fleet), rules, transfer="nixl") as router,
    ):
        connected(router)
        yield Pair(router, ends)


async def test_who_brings_its_kv_cache_passes_the_long_prompts_that_are_held(pair: Pair) -> None:
    """By length all three are long."""
    worker, finished = pair.ends[DECODE], []

    async def run(client: AsyncOpenAI, name: str, seed: int, size: int) -> Said:
        said = await tokens(client, prompt(seed, size), 2)
        finished.append(name)
        return said

    async with pair.router.client() as client, direct(worker) as beside:
        async with asyncio.TaskGroup() as group:
            group.create_task(run(beside, FIRST, 48_000, 15_000))
            await settled(worker, running=1, waiting=0)
            group.create_task(run(beside, HELD, 48_001, 15_000))
            await settled(worker, running=1, waiting=1)
            brought = group.create_task(run(client, BROUGHT, 48_002, 3000))
        assert handed_over(pair.router) == [True]
    assert finished.index(BROUGHT) < finished.index(HELD)
    async with direct(pair.ends[PREFILL]) as client:
        assert brought.result() == await tokens(client, prompt(48_002, 3000), 2)
    for each in pair.ends.values():
        await freed(each)


async def test_who_leaves_when_it_has_passed_them_leaves_nothing(pair: Pair) -> None:
    worker = pair.ends[DECODE]
    async with pair.router.client() as client, direct(worker) as beside:
        longs = [asyncio.create_task(complete(beside, prompt(48_010, 15_000), 1))]
        await settled(worker, running=1, waiting=0)
        longs.append(asyncio.create_task(complete(beside, prompt(48_011, 15_000), 1)))
        await settled(worker, running=1, waiting=1)
        stream = await complete(client, prompt(48_012, 3000), 4000, stream=True)
        await anext(aiter(stream))
        await stream.close()
        assert handed_over(pair.router) == [True]
        await asyncio.gather(*longs)
    await settled(worker, running=0, waiting=0)
    for each in pair.ends.values():
        await freed(each)

"""Prefill here, decode there, where the decode worker has `long_prompt` and prompts of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from proxy.config import TransferConfig
from tests.fleet.conftest import ENDS, SETTINGS, both, started
from tests.fleet.test_connectors import Pair
from tests.fleet.test_handover import (
    ABOVE,
    DECODE,
    PREFILL,
    connected,
    direct,
    freed,
    handed_over,
    listed,
    tokens,
)
from tests.fleet.test_router import routing
from tests.fleet.test_worker import complete, one_behind_another, prompt, settled


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
    worker, some = pair.ends[DECODE], prompt(48_100, 3000)
    async with pair.router.client() as client, direct(worker) as beside:
        read, held = await one_behind_another(beside, worker, 48_000)
        brought = await tokens(client, some, 2)
        assert not held.done()
        assert handed_over(pair.router) == [True]
        await asyncio.gather(read, held)
    async with direct(pair.ends[PREFILL]) as client:
        assert brought == await tokens(client, some, 2)
    for each in pair.ends.values():
        await freed(each)


async def test_who_leaves_when_it_has_passed_them_leaves_nothing(pair: Pair) -> None:
    worker = pair.ends[DECODE]
    async with pair.router.client() as client, direct(worker) as beside:
        longs = await one_behind_another(beside, worker, 48_050)
        stream = await complete(client, prompt(48_101, 3000), 4000, stream=True)
        await anext(aiter(stream))
        await stream.close()
        assert handed_over(pair.router) == [True]
        await asyncio.gather(*longs)
    await settled(worker, running=0, waiting=0)
    for each in pair.ends.values():
        await freed(each)

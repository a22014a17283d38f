"""Prefill here, decode there, where the decode worker has `long_prompt` and prompts of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.conftest import PREFILL, THIRD
from tests.fleet.test_connectors import Pair
from tests.fleet.test_handover import ABOVE, Ends, connected, direct, freed, handed_over, tokens
from tests.fleet.test_router import routing
from tests.fleet.test_worker import complete, one_behind_another, prompt, settled
from vllm_sched.workers.launch import Worker


@pytest.fixture
def pair(ends: Ends, third: Worker, tmp_path: Path) -> Iterator[Pair]:
    """Run a router before the two that have the policy."""
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    some: list[dict[str, object]] = [
        {"name": PREFILL, "role": "prefill", "url": ends[PREFILL].url},
        {"name": THIRD, "role": "decode", "url": third.url},
    ]
    with routing(tmp_path, some, rules, transfer="nixl") as router:
        connected(router)
        yield Pair(router, {PREFILL: ends[PREFILL], THIRD: third})


async def test_who_brings_its_kv_cache_passes_the_long_prompts_that_are_held(pair: Pair) -> None:
    """By length all three are long."""
    worker, some = pair.ends[THIRD], prompt(48_100, 3000)
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
    worker = pair.ends[THIRD]
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

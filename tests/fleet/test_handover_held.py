"""Hand-overs to a decode worker with `long_prompt` and its own long prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.conftest import PREFILL, THIRD
from tests.fleet.test_connectors import Pair
from tests.fleet.test_handover import Ends, handed_over, handing_over, tokens, wait_freed
from tests.fleet.test_worker import client_of, complete, one_behind_another, prompt, settled
from vllm_sched.workers.launch import Worker


@pytest.fixture
def pair(ends: Ends, third: Worker, tmp_path: Path) -> Iterator[Pair]:
    """Run a router with the two workers that have the policy."""
    entries: list[dict[str, object]] = [
        {"name": PREFILL, "role": "prefill", "url": ends[PREFILL].url},
        {"name": THIRD, "role": "decode", "url": third.url},
    ]
    with handing_over(tmp_path, entries) as router:
        yield Pair(router, {PREFILL: ends[PREFILL], THIRD: third}, ends[PREFILL])


async def test_decode_leg_passes_held_long_prompts(pair: Pair) -> None:
    """All three prompts are long."""
    worker, prompt_ids = pair.ends[THIRD], prompt(48_100, 3000)
    async with pair.router.client() as client, client_of(worker) as beside:
        read, held = await one_behind_another(beside, worker, 48_000)
        brought = await tokens(client, prompt_ids, 2)
        assert not held.done()
        assert handed_over(pair.router) == [True]
        await asyncio.gather(read, held)
    async with client_of(pair.reference) as client:
        assert brought == await tokens(client, prompt_ids, 2)
    await wait_freed(*pair.ends.values())


async def test_client_disconnect_after_passing_long_prompts_frees_both_workers(pair: Pair) -> None:
    worker = pair.ends[THIRD]
    async with pair.router.client() as client, client_of(worker) as beside:
        longs = await one_behind_another(beside, worker, 48_050)
        stream = await complete(client, prompt(48_101, 3000), 4000, stream=True)
        await anext(aiter(stream))
        await stream.close()
        assert handed_over(pair.router) == [True]
        await asyncio.gather(*longs)
    await settled(worker, running=0, waiting=0)
    await wait_freed(*pair.ends.values())

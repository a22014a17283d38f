"""Prefill here, decode there, by what else than NIXL's reads moves KV caches between CPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from proxy.config import TransferConfig
from tests.fleet.conftest import both, started
from tests.fleet.test_handover import (
    ABOVE,
    DECODE,
    PREFILL,
    Ends,
    connected,
    direct,
    freed,
    handed_over,
    left,
    listed,
    tokens,
)
from tests.fleet.test_handover_kinds import TEXT
from tests.fleet.test_router import Router, routing
from tests.fleet.test_worker import complete, gauges, prompt, settled

# A prompt is one chunk: shared storage can't do with less.
ARGS = (
    "--max-model-len=4096",
    "--max-num-batched-tokens=4096",
    "--num-gpu-blocks-override=160",
    "--enable-prefix-caching",
)
FETCHED = "external_prefix_cache_hits_total"


@dataclass(frozen=True)
class Pair:
    """Two workers, and the router before them."""

    router: Router
    ends: Ends


@pytest.fixture(scope="module", params=["nixl", "shared-storage"], ids=["push", "shared-storage"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Start them as `vllm-sched up` would."""
    folder, connector = tmp_path_factory.mktemp("pair"), request.param
    more = {"mode": "push"} if connector == "nixl" else {"path": str(folder / "kv")}
    transfer = TransferConfig.model_validate({"connector": connector, **more})
    fleet = both(transfer, ARGS)
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    blocks = {"transfer": transfer.model_dump(exclude_unset=True)}
    with started(fleet, folder) as ends, routing(folder, listed(fleet), rules, **blocks) as router:
        if connector == "nixl":
            connected(router)
        yield Pair(router, ends)


async def test_greedy_output_is_that_of_one_worker(pair: Pair) -> None:
    sizes = [10, 300, 1500, 3000]
    prompts = [prompt(49_000 + size, size) for size in sizes]
    async with pair.router.client() as client:
        cold = [await tokens(client, each) for each in prompts]
        assert handed_over(pair.router, len(sizes))[::-1] == [size > ABOVE for size in sizes]
        # It was not computed twice, but for the blocks that no prompt fills.
        whole = sum(size // 128 * 128 for size in sizes if size > ABOVE)
        assert gauges(pair.ends[DECODE], FETCHED) >= (whole,)
        warm = [await tokens(client, each) for each in prompts]
    async with direct(pair.ends[PREFILL]) as client:
        assert cold == warm == [await tokens(client, each) for each in prompts]
    for worker in pair.ends.values():
        await freed(worker)


async def test_many_at_once_are_not_mixed_up(pair: Pair) -> None:
    prompts = [prompt(49_100 + number, 300 + 97 * number) for number in range(6)]
    async with pair.router.client() as client:
        routed = await asyncio.gather(*(tokens(client, each) for each in prompts))
    assert handed_over(pair.router, len(prompts)) == [True] * len(prompts)
    async with direct(pair.ends[PREFILL]) as client:
        assert routed == [await tokens(client, each) for each in prompts]
    for worker in pair.ends.values():
        await freed(worker)


async def test_responses_are_handed_over_though_their_workers_heed_no_header(pair: Pair) -> None:
    """They name a request themselves, so that pushed blocks were for somebody else on each side."""
    texts = [f"{number} {TEXT * 2}" for number in range(3)]
    async with pair.router.client() as client:
        routed = [
            await client.responses.create(**response(texts[0])),
            *await asyncio.gather(*(client.responses.create(**response(t)) for t in texts[1:])),
        ]
        assert handed_over(pair.router, len(texts)) == [True] * len(texts)
        named = await client.responses.create(
            **response(texts[0]), extra_body={"request_id": "resp_mine"}
        )
        assert named.id == "resp_mine"
        assert handed_over(pair.router) == [False]
    assert len({each.id for each in routed}) == len(texts)
    async with direct(pair.ends[PREFILL]) as client:
        alone = [await client.responses.create(**response(each)) for each in texts]
    assert [each.output_text for each in [*routed, named]] == [
        each.output_text for each in [*alone, alone[0]]
    ]
    for worker in pair.ends.values():
        await freed(worker)


def response(text: str) -> dict[str, Any]:
    """Write what to ask for."""
    return {"model": "tiny", "input": text, "max_output_tokens": 8, "temperature": 0}


async def test_a_client_that_leaves_in_the_decode_leg(pair: Pair) -> None:
    async with pair.router.client() as client:
        leaving = asyncio.create_task(complete(client, prompt(49_200, 1500), 2000))
        await settled(pair.ends[DECODE], running=1, waiting=0)
        await left(leaving)
    assert handed_over(pair.router) == [True]
    await settled(pair.ends[DECODE], running=0, waiting=0)
    for worker in pair.ends.values():
        await freed(worker)

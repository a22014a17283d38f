"""Hand-overs by NIXL push and by shared storage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from proxy.config import FleetConfig
from tests.fleet.conftest import DECODE, PREFILL
from tests.fleet.relay import relaying
from tests.fleet.test_handover import (
    ABOVE,
    Ends,
    handed_over,
    handing_over,
    listed,
    tokens,
    wait_freed,
)
from tests.fleet.test_handover_kinds import TEXT
from tests.fleet.test_router import Router, routing
from tests.fleet.test_worker import client_of, complete, gauges, prompt, settled
from vllm_sched.workers.launch import Worker

pytestmark = pytest.mark.engine("pushing")

FETCHED = "external_prefix_cache_hits_total"


@dataclass(frozen=True)
class Pair:
    """Two workers, or one in both roles, and their router."""

    router: Router
    ends: Ends
    reference: Worker  # computes whole prompts, for comparison


@pytest.fixture(scope="module")
def pushes(
    pushing: Ends,
    pushing_fleet: FleetConfig,
    storing: Worker,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Run a router with two workers, of which one pushes to the other."""
    transfer = {"connector": "nixl", "mode": "push"}
    folder = tmp_path_factory.mktemp("pushes")
    with handing_over(folder, listed(pushing_fleet), transfer=transfer) as router:
        yield Pair(router, pushing, storing)


@pytest.fixture(scope="module")
def stores(
    storing: Worker,
    storing_fleet: FleetConfig,
    pushing: Ends,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Run a router with one worker in both roles."""
    with relaying(storing.url) as relay:
        entries = [
            {"name": PREFILL, "role": "prefill", "url": storing.url},
            {"name": DECODE, "role": "decode", "url": relay.url},
        ]
        rules = {"disaggregate_above": ABOVE}
        block = storing_fleet.transfer.model_dump(exclude_unset=True)
        folder = tmp_path_factory.mktemp("stores")
        with routing(folder, entries, rules, transfer=block) as router:
            yield Pair(router, {PREFILL: storing, DECODE: storing}, pushing[PREFILL])


@pytest.fixture(params=["pushes", "stores"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(request.param)
    return found


async def test_greedy_output_matches_one_worker(pair: Pair) -> None:
    sizes = [10, 300, 1500, 3000]
    prompts = [prompt(49_000 + size, size) for size in sizes]
    [before] = gauges(pair.ends[DECODE], FETCHED)
    async with pair.router.client() as client:
        cold = [await tokens(client, each) for each in prompts]
        assert handed_over(pair.router, len(sizes))[::-1] == [size > ABOVE for size in sizes]
        # Only partial blocks are computed twice.
        whole = sum(size // 128 * 128 for size in sizes if size > ABOVE)
        assert gauges(pair.ends[DECODE], FETCHED) >= (before + whole,)
        warm = [await tokens(client, each) for each in prompts]
    async with client_of(pair.reference) as client:
        assert cold == warm == [await tokens(client, each) for each in prompts]
    await wait_freed(*pair.ends.values())


async def test_concurrent_hand_overs_are_not_mixed_up(pair: Pair) -> None:
    prompts = [prompt(49_100 + number, 300 + 97 * number) for number in range(6)]
    async with pair.router.client() as client:
        routed = await asyncio.gather(*(tokens(client, each) for each in prompts))
    assert handed_over(pair.router, len(prompts)) == [True] * len(prompts)
    async with client_of(pair.reference) as client:
        assert routed == [await tokens(client, each) for each in prompts]
    await wait_freed(*pair.ends.values())


async def test_responses_with_own_ids_are_handed_over(pair: Pair) -> None:
    """The Responses API generates its own request id, on each worker a different one."""
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
    async with client_of(pair.reference) as client:
        expected = [await client.responses.create(**response(each)) for each in texts]
    assert [each.output_text for each in [*routed, named]] == [
        each.output_text for each in [*expected, expected[0]]
    ]
    await wait_freed(*pair.ends.values())


def response(text: str) -> dict[str, Any]:
    return {"model": "tiny", "input": text, "max_output_tokens": 8, "temperature": 0}


async def test_client_disconnect_in_the_decode_leg_frees_both_workers(pair: Pair) -> None:
    async with pair.router.client() as client:
        stream = await complete(client, prompt(49_200, 1500), 2000, stream=True)
        await anext(aiter(stream))
        await settled(pair.ends[DECODE], running=1, waiting=0)
        await stream.close()
    await settled(pair.ends[DECODE], running=0, waiting=0)
    assert handed_over(pair.router) == [True]
    await wait_freed(*pair.ends.values())

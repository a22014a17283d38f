"""The router's predictions of cached tokens, from the journals of two real workers."""

from __future__ import annotations

import asyncio
import random
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from proxy.config import FleetConfig
from tests.fleet.conftest import FEW_BLOCKS
from tests.fleet.test_router import Router, routing
from tests.fleet.test_worker import Workers, client_of, complete, prompt
from vllm_sched.workers.launch import Worker

pytestmark = pytest.mark.engine("pushing")

BLOCK = 128  # tokens of an engine's block
WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "every",
    "scheduler", "waits", "for", "memory",
)  # fmt: skip
OUTPUT = 4


@dataclass(frozen=True)
class Prediction:
    """What a router expected of the cache, and what the engine found there."""

    worker: str
    expected: int
    found: int


@contextmanager
def reading(fleet: FleetConfig, folder: Path) -> Iterator[Router]:
    """Run a router that reads both workers' journals."""
    workers = [
        {"name": worker.name, "url": worker.url, "journal": [*worker.journal]}
        for worker in fleet.workers
    ]
    with routing(folder, workers, {}) as router:
        for worker in fleet.workers:
            router.wait_shown(f'proxy_journal_up{{worker="{worker.name}"}} 1')
        yield router


@pytest.fixture(scope="module")
def router(
    pushing: Workers,  # noqa: ARG001
    pushing_fleet: FleetConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Router]:
    with reading(pushing_fleet, tmp_path_factory.mktemp("reading")) as running:
        yield running


@pytest.fixture
def cold(router: Router, pushing: Workers) -> Router:
    """Return the router once both workers' caches are empty."""
    for name, worker in pushing.items():
        request = urllib.request.Request(f"{worker.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200
        router.wait_shown(f'proxy_journal_requests{{worker="{name}"}} 0')
    return router


def predicted(router: Router, answer: Any) -> Prediction:
    """Return the prediction of the last request, which has this answer."""
    [decision] = router.decisions(1)
    assert decision["cached_reported"]
    details = answer.usage.prompt_tokens_details
    return Prediction(
        decision["worker"],
        decision["cached_tokens"],
        details.cached_tokens or 0 if details else 0,
    )


async def completed(router: Router, client: AsyncOpenAI, tokens: list[int]) -> Prediction:
    """Send token ids; return the prediction."""
    return predicted(router, await complete(client, tokens, OUTPUT))


async def completed_twice(
    router: Router, client: AsyncOpenAI, prompts: list[list[int]]
) -> list[Prediction]:
    """Send all prompts, and then again; return the second predictions."""
    for each in prompts:
        await completed(router, client, each)
    return [await completed(router, client, each) for each in prompts]


async def chatted(
    router: Router, client: AsyncOpenAI, messages: list[dict[str, str]]
) -> Prediction:
    """Send messages; return the prediction."""
    body: Any = {"model": "tiny", "messages": messages, "max_tokens": OUTPUT, "temperature": 0}
    return predicted(router, await client.chat.completions.create(**body))


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


async def mixed_traffic(router: Router, client: AsyncOpenAI) -> list[Prediction]:
    """Send chats and completions of which many share a beginning."""
    rng, found = random.Random(7), []
    for words in (60, 300, 1000, 2500):
        system = {"role": "system", "content": text(rng, words)}
        for asked in (10, 200, 600, 10, 200):
            user = {"role": "user", "content": text(rng, asked)}
            found.append(await chatted(router, client, [system, user]))
        found.append(await chatted(router, client, [system, user]))
    ids = prompt(70_000, 4000)
    for shared in (4000, 2500, 900, 300, 3300, 1700):
        found += [
            await completed(router, client, ids[:shared] + prompt(70_000 + shared + n, 200))
            for n in range(3)
        ]
    messages: list[dict[str, str]] = []
    for _ in range(8):
        messages.append({"role": "user", "content": text(rng, 150)})
        found.append(await chatted(router, client, messages))
        messages.append({"role": "assistant", "content": text(rng, 40)})
    for words in (400, 900):
        plain = {"model": "tiny", "prompt": text(rng, words), "max_tokens": OUTPUT}
        for _ in range(5):
            answer = await client.completions.create(**plain)
            found.append(predicted(router, answer))
    return found


async def test_predictions_are_near_what_the_engine_finds(cold: Router) -> None:
    async with cold.client() as client:
        found = await mixed_traffic(cold, client)
    assert len(found) == 60
    assert sum(each.found > 0 for each in found) > 40
    off = [abs(each.expected - each.found) for each in found]
    assert sum(tokens <= BLOCK for tokens in off) >= 0.98 * len(found), found


async def test_no_prefix_is_expected_of_new_prompts(cold: Router) -> None:
    async with cold.client() as client:
        found = [await completed(cold, client, prompt(71_000 + n, 300 * n)) for n in range(1, 9)]
    assert [(each.expected, each.found) for each in found] == [(0, 0)] * 8


async def test_reset_cache_is_expected_empty(router: Router, request: Any) -> None:
    prompts = [prompt(72_000 + n, 4000) for n in range(4)]
    async with router.client() as client:
        warm = await completed_twice(router, client, prompts)
        assert all(each.expected > 3000 and each.found > 3000 for each in warm)
        request.getfixturevalue("cold")
        found = [await completed(router, client, each) for each in prompts]
    assert [(each.expected, each.found) for each in found] == [(0, 0)] * 4


async def test_late_router_makes_the_same_predictions(
    cold: Router, pushing_fleet: FleetConfig, tmp_path: Path
) -> None:
    prompts = [prompt(73_000 + n, 3000 + 300 * n) for n in range(6)]
    async with cold.client() as client:
        first = await completed_twice(cold, client, prompts)
    assert all(each.expected > 0 for each in first)
    with reading(pushing_fleet, tmp_path) as late:
        async with late.client() as client:
            assert [await completed(late, client, each) for each in prompts] == first


async def fill(worker: Worker, seed: int) -> None:
    """Fill the cache of a worker with prompts that no router sends."""
    size = 12_000
    async with client_of(worker) as client:
        for number in range(FEW_BLOCKS * BLOCK // size + 2):
            await complete(client, prompt(seed + number, size), 1)


async def test_evicted_prefixes_are_not_expected(cold: Router, pushing: Workers) -> None:
    prompts = [prompt(74_000 + n, 4000) for n in range(4)]
    async with cold.client() as client:
        warm = await completed_twice(cold, client, prompts)
        assert all(each.expected > 3000 for each in warm)
        await asyncio.gather(
            *(fill(each, 75_000 + 10 * n) for n, each in enumerate(pushing.values()))
        )
        found = [await completed(cold, client, each) for each in prompts]
    assert [(each.expected, each.found) for each in found] == [(0, 0)] * 4

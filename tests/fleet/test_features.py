"""`long_prompt` with vLLM's other features, all enabled in one real engine."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.conftest import ALONE, ARGS, SETTINGS
from tests.fleet.lora import make_adapter
from tests.fleet.test_worker import (
    LONG_TOKENS,
    client_of,
    complete,
    gauges,
    one_behind_another,
    prompt,
    settled,
)
from vllm_sched.workers.launch import Side, Worker, worker
from vllm_sched.workers.tiny_model import tiny_model

pytestmark = pytest.mark.engine("pushing")

SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
# Repetitive, so that drafts are found and accepted.
DRAFTED = [11, 12, 13, 14] * 800


@pytest.fixture(scope="module")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a worker with LoRA adapters (one slot), speculative decoding and priorities."""
    adapter: Path = make_adapter(tmp_path_factory.mktemp("adapter"))
    other: Path = make_adapter(tmp_path_factory.mktemp("other"), seed=1)
    with worker(
        Side("long_prompt", SETTINGS),
        model=str(tiny_model()),
        flags=(
            *ARGS, "--num-gpu-blocks-override", "4096", "--served-model-name", "tiny",
            "--enable-lora", "--max-lora-rank", "8", "--max-loras", "1",
            "--lora-modules", f"adapter={adapter}", f"other={other}",
            "--speculative-config", json.dumps(SPECULATION),
            "--scheduling-policy", "priority",
        ),
        name="featured",
        env={**ALONE, "VLLM_SERVER_DEV_MODE": "1"},  # for /pause and /resume
    ) as started:  # fmt: skip
        yield started


def post(worker: Worker, path: str) -> None:
    """Call one of the worker's development endpoints."""
    request = urllib.request.Request(f"{worker.url}{path}", data=b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


async def test_output_with_accepted_drafts_matches_plain_decoding(
    featured: Worker, storing: Worker
) -> None:
    prompts = [DRAFTED, prompt(7001, 2500), prompt(7002, 60), DRAFTED[:90]]
    answers = []
    for server in (featured, storing):
        async with client_of(server) as client:
            done = await asyncio.gather(*(complete(client, p, 40) for p in prompts))
        answers.append([d.choices[0].token_ids for d in done])
    assert answers[0] == answers[1]
    assert gauges(featured, "spec_decode_num_accepted_tokens_total") > (0,)


async def test_adapter_and_base_model_share_steps(featured: Worker) -> None:
    async with client_of(featured) as client:
        plain, adapted = await asyncio.gather(
            complete(client, prompt(7101, 3000), 12),
            complete(client, prompt(7101, 3000), 12, model="adapter"),
        )
    assert plain.choices[0].token_ids != adapted.choices[0].token_ids
    assert adapted.usage.prompt_tokens == 3000


async def test_more_adapters_than_slots_take_turns(featured: Worker) -> None:
    async with client_of(featured) as client, asyncio.TaskGroup() as group:

        async def run(number: int, model: str, tokens: int, output: int) -> None:
            done = await complete(client, prompt(7150 + number, tokens), output, model=model)
            assert done.usage.completion_tokens == output

        # The long prompt has no part of steps with shorts, and its adapter keeps the slot.
        group.create_task(run(0, "adapter", 6000, 4))
        for number in range(1, 11):
            await asyncio.sleep(0.05)
            group.create_task(run(number, ("other", "tiny")[number % 2], 60, 10))
    await settled(featured, running=0, waiting=0)


async def test_urgent_long_prompt_precedes_others(featured: Worker) -> None:
    finished: list[str] = []

    async with client_of(featured) as client, asyncio.TaskGroup() as group:

        async def run(name: str, seed: int, tokens: int, priority: int) -> None:
            await complete(client, prompt(seed, tokens), 2, priority=priority)
            finished.append(name)

        group.create_task(run("first", 7201, LONG_TOKENS, 0))
        await settled(featured, running=1, waiting=0)
        group.create_task(run("patient", 7202, 4000, 5))
        group.create_task(run("urgent", 7203, 4000, 1))
    assert finished == ["first", "urgent", "patient"]


async def test_pause_keeps_held_requests(featured: Worker) -> None:
    async with client_of(featured) as client:
        first, second = await one_behind_another(client, featured, 7301, 40)
        await asyncio.to_thread(post, featured, "/pause?mode=keep")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(first), 3)
        await asyncio.to_thread(post, featured, "/resume")
        done = await asyncio.gather(first, second)
    assert [d.usage.completion_tokens for d in done] == [40, 40]
    await settled(featured, running=0, waiting=0)

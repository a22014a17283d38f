"""`long_prompt` in a real vLLM over HTTP, with the openai client."""

from __future__ import annotations

import asyncio
import random
import re
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import pytest
from openai import AsyncOpenAI

from vllm_sched.workers.launch import Worker

Workers = dict[str, Worker]
DEADLINE_S = 120.0
# Attempts to get one long prompt to wait behind another.
MAX_ATTEMPTS = 5
# A prompt of this length is still in prefill, on any machine, when a scrape has seen it.
LONG_TOKENS = 10_000


class Server(Protocol):
    """A worker or a router."""

    @property
    def url(self) -> str: ...


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[AsyncOpenAI]:
    """Return a client without retries."""
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
    ) as client:
        yield client


def prompt(seed: int, tokens: int) -> list[int]:
    """Return a prompt of `tokens` tokens that depends only on the seed."""
    rng = random.Random(seed)
    return [rng.randrange(10, 400) for _ in range(tokens)]


async def complete(
    client: AsyncOpenAI,
    tokens: list[int],
    output: int = 8,
    *,
    model: str = "tiny",
    stream: bool = False,
    **more: Any,
) -> Any:
    """Request a greedy completion of exactly this length."""
    return await client.completions.create(
        model=model,
        prompt=tokens,
        stream=stream,
        max_tokens=output,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True, **more},
    )


def page(server: Server) -> str:
    """Return its /metrics."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def gauges(worker: Worker, *names: str) -> tuple[float, ...]:
    """Return vLLM's metrics from one scrape."""
    text = page(worker)
    return tuple(
        sum(float(v) for v in re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))
        for name in names
    )


def prefilled(worker: Worker) -> float:
    """Return the number of computed prompt tokens, from vllm_sched_step_tokens_total."""
    of_prompts = r'^vllm_sched_step_tokens_total\{[^}]*kind="prefill"[^}]*\} (\S+)$'
    return sum(map(float, re.findall(of_prompts, page(worker), re.MULTILINE)))


async def settled(
    worker: Worker, running: int, waiting: int, *, beside: asyncio.Task[Any] | None = None
) -> bool:
    """Wait for these counts; return whether they were seen before `beside` was done."""
    names = ("num_requests_running", "num_requests_waiting")
    async with asyncio.timeout(DEADLINE_S):
        while beside is None or not beside.done():
            if await asyncio.to_thread(gauges, worker, *names) == (running, waiting):
                return beside is None or not beside.done()
            await asyncio.sleep(0.02)
    return False


async def one_behind_another(
    client: AsyncOpenAI, worker: Worker, seed: int, output: int = 8
) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """Start a long prompt, and another that waits behind it.

    On a busy machine the first may be done too soon; then two new prompts are sent.
    """
    for first_seed in range(seed, seed + 2 * MAX_ATTEMPTS, 2):
        first = asyncio.create_task(complete(client, prompt(first_seed, LONG_TOKENS), output))
        # Otherwise the server may read the second first.
        if await settled(worker, running=1, waiting=0, beside=first):
            second = asyncio.create_task(
                complete(client, prompt(first_seed + 1, LONG_TOKENS), output)
            )
            if await settled(worker, running=1, waiting=1, beside=first):
                return first, second
            await second
        await first
        await settled(worker, running=0, waiting=0)
    raise AssertionError(f"none of {MAX_ATTEMPTS} was seen to wait behind another")


def test_engine_logs_its_policies(workers: Workers) -> None:
    log = workers["long_prompt"].log.read_text()
    lines = [line for line in log.splitlines() if "policies: " in line]
    assert len(lines) == 1
    assert "SyncPolicyScheduler" in lines[0]
    assert "long_prefill_token_threshold=1000" in lines[0]
    assert "policies: " not in workers["default"].log.read_text()


async def test_stream_is_complete(workers: Workers) -> None:
    async with client_of(workers["long_prompt"]) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


async def test_two_hundred_mixed_requests_match_the_default_scheduler(workers: Workers) -> None:
    rng = random.Random(7)
    sizes = [6000, 5000, 2500, *rng.choices([5, 30, 100, 100, 300, 1100, 1500], k=197)]

    async def answers(worker: Worker) -> list[list[int]]:
        async with client_of(worker) as client:
            # All at once, so that chunks differ on the two workers.
            done = await asyncio.gather(
                *(complete(client, prompt(1000 + i, n), 1 + i % 6) for i, n in enumerate(sizes))
            )
        assert [d.usage.prompt_tokens for d in done] == sizes
        assert [d.usage.completion_tokens for d in done] == [1 + i % 6 for i in range(200)]
        await settled(worker, running=0, waiting=0)
        return [d.choices[0].token_ids for d in done]

    default, with_policy = await asyncio.gather(*map(answers, workers.values()))
    assert with_policy == default


async def test_shorts_overtake_an_earlier_long_prompt(workers: Workers) -> None:
    finished: list[str] = []

    def on_done(name: str) -> Callable[[asyncio.Task[Any]], None]:
        return lambda _: finished.append(name)

    worker = workers["long_prompt"]
    async with client_of(worker) as client:
        longs = await one_behind_another(client, worker, 2001)
        shorts = [asyncio.create_task(complete(client, prompt(2100 + i, 100), 2)) for i in range(8)]
        for i, task in enumerate(longs, 1):
            task.add_done_callback(on_done(f"long {i}"))
        for i, task in enumerate(shorts):
            task.add_done_callback(on_done(f"short {i}"))
        await asyncio.gather(*longs, *shorts)
    assert sorted(finished[:8]) == [f"short {i}" for i in range(8)]
    assert finished[8:] == ["long 1", "long 2"]


@pytest.mark.parametrize("victim", ["in prefill", "held"])
async def test_client_disconnect_frees_its_blocks(workers: Workers, victim: str) -> None:
    worker = workers["long_prompt"]
    async with client_of(worker) as client:
        for attempt in range(MAX_ATTEMPTS):
            before = prefilled(worker)
            seed = 3000 + 100 * len(victim) + 2 * MAX_ATTEMPTS * attempt
            first, second = await one_behind_another(client, worker, seed)
            leaves, stays = (first, second) if victim == "in prefill" else (second, first)
            left = leaves.cancel() and await settled(worker, running=1, waiting=0, beside=stays)
            assert (await stays).usage.prompt_tokens == LONG_TOKENS
            with suppress(asyncio.CancelledError):
                await leaves
            await settled(worker, running=0, waiting=0)
            # Retry if either was done too soon. An abandoned prompt that continues is fully
            # computed in each attempt.
            if left and prefilled(worker) - before < 2 * LONG_TOKENS:
                break
        else:
            pytest.fail(f"not aborted before its end in {MAX_ATTEMPTS} attempts")
    await settled(worker, running=0, waiting=0)
    assert gauges(worker, "kv_cache_usage_perc") == (0,)


async def test_samples_of_a_long_prompt_complete(workers: Workers) -> None:
    async with client_of(workers["long_prompt"]) as client:
        done = await client.completions.create(
            model="tiny",
            prompt=prompt(4001, 3000),
            max_tokens=4,
            n=3,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    assert [len(choice.token_ids) for choice in done.choices] == [4, 4, 4]
    assert done.usage.prompt_tokens == 3000


async def test_structured_output_beside_a_long_prompt_is_valid(workers: Workers) -> None:
    async with client_of(workers["long_prompt"]) as client:
        long = asyncio.create_task(complete(client, prompt(5001, 9000)))
        done = await client.completions.create(
            model="tiny",
            prompt="yes or no?",
            max_tokens=8,
            temperature=0,
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
        )
        await long
    assert done.choices[0].text in ("yes", "no")


async def test_logprobs_of_a_long_prompt_are_complete(workers: Workers) -> None:
    async with client_of(workers["long_prompt"]) as client:
        done = await complete(client, prompt(6001, 2000), 2, logprobs=1, echo=True)
    assert len(done.choices[0].logprobs.token_logprobs) == 2002

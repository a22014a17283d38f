"""Prefill here, decode there: two real workers with NIXL between them, behind the real router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from proxy.config import FleetConfig
from tests.collector import Collector
from tests.fleet.conftest import DECODE, PREFILL
from tests.fleet.test_router import PORTS, VLLM_BENCH_SERVE, Router, routing, threads
from tests.fleet.test_worker import DEADLINE_S, LENGTHY, complete, gauges, prompt, settled
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import Worker
from vllm_sched.workers.tiny_model import tiny_model
from vllm_sched.workers.transfer import DEFAULT_LEASE_S

# The third one loads meanwhile, for the files that follow.
pytestmark = pytest.mark.usefixtures("third_or_dead")

Ends = dict[str, Worker]
# Prompts above it are handed over; a block is 128 tokens.
ABOVE = 256
HELD = "kv_cache_usage_perc"
# A lease of vLLM's ends after a minute: what is free sooner was freed, not left to it.
FREED_S = 20.0
# Chunks cut elsewhere round otherwise; another prompt's KV cache is 0.01 and more away.
NEAR = 1e-3


@pytest.fixture(scope="module")
def router(
    ends: Ends, fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Router]:
    """Run the router before both."""
    assert all(worker.healthy() for worker in ends.values())
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    folder = tmp_path_factory.mktemp("handover")
    with routing(folder, listed(fleet), rules, transfer="nixl") as running:
        connected(running)
        yield running


def listed(fleet: FleetConfig) -> list[dict[str, object]]:
    """List the workers for a router's own file."""
    return [{"name": each.name, "role": each.role, "url": each.url} for each in fleet.workers]


def connected(router: Router, links: int = 1) -> None:
    """Wait until the two ends know each other: nothing is handed over before."""
    give_up = time.monotonic() + DEADLINE_S
    while True:
        with urllib.request.urlopen(f"{router.url}/metrics", timeout=10) as answer:
            if b'proxy_handover_warmups_total{outcome="done"} %d\n' % links in answer.read():
                return
        assert time.monotonic() < give_up, "they were never connected"
        time.sleep(0.05)


async def freed(worker: Worker, within: float = FREED_S) -> None:
    """Wait until no block of a worker's is held, by a request or for a transfer."""
    async with asyncio.timeout(within):
        while True:
            if await asyncio.to_thread(gauges, worker, HELD) == (0,):
                return
            await asyncio.sleep(0.02)


def handed_over(router: Router, limit: int = 1) -> list[bool]:
    """Tell of the last requests, newest first, which were served in two legs."""
    return [each["prefill_worker"] is not None for each in router.decisions(limit)]


@dataclass(eq=False)
class Said:
    """Tokens, and how likely each was: what a wrong KV cache changes first."""

    ids: list[int]
    likely: list[float]

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Said)
        pairs = zip(self.likely, other.likely, strict=True)
        return self.ids == other.ids and all(abs(a - b) < NEAR for a, b in pairs)


async def tokens(client: AsyncOpenAI, some: list[int], output: int = 8, **more: Any) -> Said:
    """Have a prompt continued."""
    (choice,) = (await complete(client, some, output, logprobs=1, **more)).choices
    assert len(choice.token_ids) == output
    return Said(choice.token_ids, choice.logprobs.token_logprobs)


@contextlib.asynccontextmanager
async def direct(worker: Worker) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


SIZES = (10, 130, 256, 300, 1500, 5000, 12_000)


async def test_greedy_output_is_that_of_one_worker_cold_and_warm(
    router: Router, ends: Ends
) -> None:
    prompts = [prompt(40_000 + size, size) for size in SIZES]
    async with router.client() as client:
        cold = [await tokens(client, each) for each in prompts]
        assert handed_over(router, len(SIZES))[::-1] == [size > ABOVE for size in SIZES]
        warm = [await tokens(client, each) for each in prompts]
        # One token more on each: blocks of it are cached, here and there, and its end is not.
        longer = [await tokens(client, [*each, 17]) for each in prompts]
    async with direct(ends[PREFILL]) as client:
        assert cold == warm == [await tokens(client, each) for each in prompts]
        assert longer == [await tokens(client, [*each, 17]) for each in prompts]
    for worker in ends.values():
        await freed(worker)


async def test_many_at_once_are_not_mixed_up(router: Router, ends: Ends) -> None:
    sizes = [300 + 97 * number for number in range(12)]
    prompts = [prompt(41_000 + size, size) for size in sizes]
    async with router.client() as client:
        routed = await asyncio.gather(*(tokens(client, each) for each in prompts))
    async with direct(ends[PREFILL]) as client:
        assert routed == [await tokens(client, each) for each in prompts]
    await freed(ends[PREFILL])


@pytest.mark.parametrize("cached", [0, 1536])  # by the prefill worker alone, whole blocks
@pytest.mark.parametrize("stream", [True, False])
async def test_each_token_comes_once_and_usage_is_right(
    router: Router, ends: Ends, stream: bool, cached: int
) -> None:
    some = prompt(42_000 + cached + stream, 1600)
    async with direct(ends[PREFILL]) as client:
        if cached:
            await complete(client, some, 1)
    async with router.client() as client:
        if stream:
            ids, usage = await streamed(client, some, 9)
        else:
            whole = await complete(client, some, 9)
            [choice], usage = whole.choices, whole.usage
            ids = choice.token_ids
    assert handed_over(router) == [True]
    assert (usage.prompt_tokens, usage.completion_tokens) == (1600, 9)
    assert usage.prompt_tokens_details.cached_tokens == cached
    async with direct(ends[PREFILL]) as client:
        assert ids == (await tokens(client, some, 9)).ids


async def test_what_the_decode_worker_has_is_not_transferred_again(router: Router) -> None:
    some = prompt(42_002, 1600)
    async with router.client() as client:
        first, _ = await streamed(client, some, 9)
        assert handed_over(router) == [True]
        again, usage = await streamed(client, some, 9)
    assert handed_over(router) == [False]
    assert usage.prompt_tokens_details.cached_tokens == 1536
    assert first == again


async def streamed(client: AsyncOpenAI, some: list[int], output: int) -> tuple[list[int], Any]:
    """Have a prompt continued in a stream; return its tokens and what it says of them."""
    told = {"include_usage": True}
    stream = await complete(client, some, output, stream=True, stream_options=told)
    events = [event async for event in stream]
    ids = [one for event in events for choice in event.choices for one in choice.token_ids]
    return ids, events[-1].usage


async def test_chat_in_two_legs(router: Router, ends: Ends) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "please tell me more about that. " * 60}],
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    async with router.client() as client:
        routed = await client.chat.completions.create(**asked)
        assert handed_over(router) == [True]
    async with direct(ends[PREFILL]) as client:
        plain = await client.chat.completions.create(**asked)
    assert routed.choices[0].message.content == plain.choices[0].message.content
    assert routed.usage is not None
    assert plain.usage is not None
    assert routed.usage.prompt_tokens == plain.usage.prompt_tokens


async def test_a_client_that_leaves_in_the_prefill_leg(router: Router, ends: Ends) -> None:
    async with router.client() as client:
        leaving = asyncio.create_task(complete(client, prompt(43_000, LENGTHY), 64))
        await settled(ends[PREFILL], running=1, waiting=0)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
    await settled(ends[PREFILL], running=0, waiting=0)
    await freed(ends[PREFILL])


async def test_a_client_that_leaves_in_the_decode_leg(router: Router, ends: Ends) -> None:
    async with router.client() as client:
        stream = await complete(client, prompt(43_100, 3000), 4000, stream=True)
        async for _ in stream:
            break
        await settled(ends[DECODE], running=1, waiting=0)
        await stream.close()
    await settled(ends[DECODE], running=0, waiting=0)
    for worker in ends.values():
        await freed(worker)


async def left(asked: asyncio.Task[Any]) -> None:
    """Have a client leave."""
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError, openai.APIError):
        await asked


async def given_back(router: Router, ends: Ends) -> None:
    """Wait until nobody holds anything for one client that left between its legs."""
    for worker in ends.values():
        await settled(worker, running=0, waiting=0)
    for worker in ends.values():
        await freed(worker)
    await eventually(lambda: router.handovers()["released"], within=DEADLINE_S)


async def test_a_client_that_leaves_just_before_the_prefills_answer_comes(
    ends: Ends, fleet: FleetConfig, tmp_path: Path
) -> None:
    """The router is held up until the prefill is done, so that both come together."""
    # By a router that has seen no prefill, and so takes none to have long to go.
    with routing(tmp_path, listed(fleet), {"disaggregate_above": ABOVE}, transfer="nixl") as router:
        connected(router)
        async with router.client() as client:
            leaving = asyncio.create_task(complete(client, prompt(43_160, LENGTHY), 200))
            await settled(ends[PREFILL], running=1, waiting=0)
            with router.held_up():
                await left(leaving)
                await settled(ends[PREFILL], running=0, waiting=0)
                assert gauges(ends[PREFILL], HELD) > (0,)
        await given_back(router, ends)
        assert router.handovers() == {"client_left_prefill": 1, "released": 1}


async def test_a_client_that_leaves_just_after_the_prefills_answer_came(
    ends: Ends, fleet: FleetConfig, tmp_path: Path
) -> None:
    """The decode leg is not written yet: that is done when all that came has been read."""
    with routing(tmp_path, listed(fleet), {"disaggregate_above": ABOVE}, transfer="nixl") as router:
        connected(router)
        async with router.client() as client:
            leaving = asyncio.create_task(complete(client, prompt(43_161, LENGTHY), 200))
            await settled(ends[PREFILL], running=1, waiting=0)
            with router.held_up():
                await settled(ends[PREFILL], running=0, waiting=0)
                assert gauges(ends[PREFILL], HELD) > (0,)
                await left(leaving)
        await given_back(router, ends)
        assert router.handovers() == {"prefilled": 1, "client_left_decode": 1, "released": 1}


async def test_clients_that_leave_about_when_the_prefill_is_done(
    router: Router, ends: Ends
) -> None:
    async with router.client() as client:
        begun = time.monotonic()
        await complete(client, prompt(43_200, 1500), 1)
        await complete(client, prompt(43_201, 1500), 2)
        took = time.monotonic() - begun
        for step in range(24):
            leaving = asyncio.create_task(complete(client, prompt(43_210 + step, 1500), 200))
            await asyncio.sleep(took / 2 * (0.5 + step / 24))
            await left(leaving)
    for worker in ends.values():
        await settled(worker, running=0, waiting=0)
        # A prefill that should have long to go is not waited for. What it answers just then is
        # freed by the end of its lease.
        await freed(worker, within=DEFAULT_LEASE_S + FREED_S)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Listen where nobody has any business."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(1.0)
        yield listening


@pytest.mark.parametrize("size", [40, 1500])
async def test_a_client_can_not_point_a_worker_at_an_address(
    router: Router, ends: Ends, listener: socket.socket, size: int
) -> None:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[*range(1, 13)]],
        "remote_engine_id": "mine",
        "remote_request_id": "mine",
        "remote_host": "127.0.0.1",
        "remote_port": listener.getsockname()[1],
        "tp_size": 1,
    }
    some = prompt(44_000 + size, size)
    async with direct(ends[PREFILL]) as client:
        right = await tokens(client, some)
    async with router.client() as client:
        for body in (
            {"kv_transfer_params": params},
            {"kv_transfer_params": {"do_remote_prefill": True}},
            {"vllm_xargs": {"kv_transfer_params": params}},
        ):
            with contextlib.suppress(openai.BadRequestError):
                assert await tokens(client, some, **body) == right
        with pytest.raises(TimeoutError):
            listener.accept()
        assert await tokens(client, some) == right
    assert ends[DECODE].healthy()


async def test_a_client_can_not_read_anothers_blocks(router: Router, ends: Ends) -> None:
    async with direct(ends[PREFILL]) as client:
        # A hand-over whose decode leg never comes: its blocks lie there, and this is their address.
        held = await complete(
            client, prompt(45_000, 1500), 1, kv_transfer_params={"do_remote_decode": True}
        )
        theirs = held.kv_transfer_params
        assert theirs["do_remote_prefill"]
        some = prompt(45_001, 1500)
        right = await tokens(client, some)
    async with router.client() as client:
        with contextlib.suppress(openai.BadRequestError):
            assert await tokens(client, some, kv_transfer_params=theirs) == right
    # vLLM itself would have done it: this is what the router is there for.
    async with direct(ends[DECODE]) as client:
        assert await tokens(client, some, kv_transfer_params=theirs) != right
    await freed(ends[PREFILL])


async def test_a_hand_over_is_one_trace_in_router_and_engines(
    ends: Ends, fleet: FleetConfig, collector: Collector, tmp_path: Path
) -> None:
    """What each engine did is told of below the router's leg on it."""
    trace, own = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    blocks = {"router": {**PORTS, "tracing": {"endpoint": collector.url}}, "transfer": "nixl"}
    with routing(tmp_path, listed(fleet), {"disaggregate_above": ABOVE}, **blocks) as router:
        connected(router)
        async with router.client() as client:
            traced = client.with_options(default_headers={"traceparent": f"00-{trace}-{own}-01"})
            await complete(traced, prompt(47_000, 1000), 4)
        assert handed_over(router) == [True]
    await eventually(
        lambda: {*ends} <= {span.service for span in collector.of(trace)}, within=DEADLINE_S
    )
    name_of = {span.id: span.name for span in collector.of(trace)}
    assert {
        (span.service, name_of[span.parent]) for span in collector.of(trace) if span.service in ends
    } == {(PREFILL, "prefill leg"), (DECODE, "decode leg")}
    for worker in ends.values():
        await freed(worker)


def test_vllms_own_benchmark(router: Router, ends: Ends, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-c", VLLM_BENCH_SERVE, "--backend", "openai", "--base-url", router.url,
            "--model", "tiny", "--tokenizer", str(tiny_model()), "--dataset-name", "random",
            "--random-input-len", "600", "--random-output-len", "8", "--num-prompts", "12",
            "--max-concurrency", "4", "--save-result", "--result-dir", str(tmp_path),
            "--result-filename", "result.json",
        ],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (12, 0)
    # One more than twelve: it asks the first prompt once before, and then it is cached.
    assert sum(handed_over(router, 13)) >= 11
    assert gauges(ends[DECODE], "nixl_num_failed_transfers_total") == (0,)


def test_workers_compute_where_they_are_bound_and_rest_when_idle(ends: Ends) -> None:
    bound = {cpu for worker in ends.values() for cpu in worker.cpus}
    assert len(bound) == min(2, len(os.sched_getaffinity(0)))
    for worker in ends.values():
        of_all = {cpu for thread in threads(worker) for cpu in os.sched_getaffinity(thread)}
        assert of_all == set(worker.cpus)
        # vLLM's own queue between its processes spins for a second after work. A thread that polls
        # would use all that is left of its processor, for as long as we look.
        assert any(used(worker) < 1 / 3 for _ in range(4))


def used(worker: Worker) -> float:
    """Tell how much of a processor a worker uses for a second."""
    before, begun = ticks(worker), time.monotonic()
    time.sleep(1.0)
    seconds = (ticks(worker) - before) / os.sysconf("SC_CLK_TCK")
    return seconds / (time.monotonic() - begun)


def ticks(worker: Worker) -> int:
    """Add up the processor time of all threads of a worker."""
    total = 0
    for thread in threads(worker):
        with contextlib.suppress(OSError):
            numbers = Path(f"/proc/{thread}/task/{thread}/stat").read_text().rpartition(")")[2]
            user, system = numbers.split()[11:13]
            total += int(user) + int(system)
    return total

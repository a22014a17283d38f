"""Hand-overs between two real workers with NIXL, behind the real router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from proxy.config import FleetConfig
from tests.collector import Collector
from tests.fleet.conftest import DECODE, PREFILL
from tests.fleet.test_router import PORTS, Router, check_vllm_bench_serve, routing, threads
from tests.fleet.test_worker import (
    DEADLINE_S,
    LONG_TOKENS,
    client_of,
    complete,
    gauges,
    prompt,
    settled,
)
from tests.proxy.wire.site import eventually
from vllm_sched.workers.connectors import DEFAULT_LEASE_S
from vllm_sched.workers.launch import Worker
from vllm_sched.workers.tiny_model import tiny_model

# The third worker starts early, for later files.
pytestmark = pytest.mark.usefixtures("third_or_dead")

Ends = dict[str, Worker]
# Prompts above it are handed over; a block is 128 tokens.
ABOVE = 256
HELD = "kv_cache_usage_perc"
# vLLM's lease ends after a minute; blocks that are free sooner were released.
FREED_S = 20.0
# Different chunks change logprobs a little; a wrong KV cache changes them by 0.01 and more.
NEAR = 1e-3


@pytest.fixture(scope="module")
def router(
    ends: Ends, fleet: FleetConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Router]:
    assert all(worker.is_healthy() for worker in ends.values())
    with handing_over(tmp_path_factory.mktemp("handover"), listed(fleet)) as running:
        yield running


@contextlib.contextmanager
def handing_over(
    folder: Path,
    workers: Sequence[Mapping[str, object]],
    *,
    above: int = ABOVE,
    links: int = 1,
    **blocks: object,
) -> Iterator[Router]:
    """Run a router that hands prompts over, once its prefill and decode workers are connected."""
    blocks = {"transfer": "nixl"} | blocks
    with routing(folder, workers, {"disaggregate_above": above}, **blocks) as router:
        router.wait_shown(f'proxy_handover_warmups_total{{outcome="done"}} {links}')
        yield router


def listed(fleet: FleetConfig) -> list[dict[str, object]]:
    return [
        {"name": worker.name, "role": worker.role, "url": worker.url} for worker in fleet.workers
    ]


async def wait_freed(*workers: Worker, within: float = FREED_S) -> None:
    """Wait until the workers hold no KV block."""
    for worker in workers:
        async with asyncio.timeout(within):
            while await asyncio.to_thread(gauges, worker, HELD) != (0,):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def handed_over(router: Router, limit: int = 1) -> list[bool]:
    """Return whether the last requests were handed over, newest first."""
    return [decision["prefill_worker"] is not None for decision in router.decisions(limit)]


@dataclass(eq=False)
class Completion:
    """Tokens and their logprobs, which a wrong KV cache changes first."""

    ids: list[int]
    logprobs: list[float]

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Completion)
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.ids == other.ids and all(abs(a - b) < NEAR for a, b in pairs)


async def tokens(
    client: AsyncOpenAI, prompt_ids: list[int], output: int = 8, **more: Any
) -> Completion:
    """Return the greedy completion of a prompt."""
    (choice,) = (await complete(client, prompt_ids, output, logprobs=1, **more)).choices
    assert len(choice.token_ids) == output
    return Completion(choice.token_ids, choice.logprobs.token_logprobs)


SIZES = (10, 130, 256, 300, 1500, 5000, 12_000)


async def test_greedy_output_matches_one_worker_cold_and_warm(router: Router, ends: Ends) -> None:
    prompts = [prompt(40_000 + size, size) for size in SIZES]
    async with router.client() as client:
        cold = [await tokens(client, each) for each in prompts]
        assert handed_over(router, len(SIZES))[::-1] == [size > ABOVE for size in SIZES]
        warm = [await tokens(client, each) for each in prompts]
        # One more token: full blocks are cached on both workers, the end is not.
        longer = [await tokens(client, [*each, 17]) for each in prompts]
    async with client_of(ends[PREFILL]) as client:
        assert cold == warm == [await tokens(client, each) for each in prompts]
        assert longer == [await tokens(client, [*each, 17]) for each in prompts]
    await wait_freed(*ends.values())


async def test_concurrent_hand_overs_are_not_mixed_up(router: Router, ends: Ends) -> None:
    sizes = [300 + 97 * number for number in range(12)]
    prompts = [prompt(41_000 + size, size) for size in sizes]
    async with router.client() as client:
        routed = await asyncio.gather(*(tokens(client, each) for each in prompts))
    async with client_of(ends[PREFILL]) as client:
        assert routed == [await tokens(client, each) for each in prompts]
    await wait_freed(ends[PREFILL])


@pytest.mark.parametrize("cached", [0, 1536])  # tokens cached by the prefill worker only
@pytest.mark.parametrize("stream", [True, False])
async def test_each_token_arrives_once_and_usage_is_correct(
    router: Router, ends: Ends, stream: bool, cached: int
) -> None:
    prompt_ids = prompt(42_000 + cached + stream, 1600)
    async with client_of(ends[PREFILL]) as client:
        if cached:
            await complete(client, prompt_ids, 1)
    async with router.client() as client:
        if stream:
            ids, usage = await streamed(client, prompt_ids, 9)
        else:
            whole = await complete(client, prompt_ids, 9)
            [choice], usage = whole.choices, whole.usage
            ids = choice.token_ids
    assert handed_over(router) == [True]
    assert (usage.prompt_tokens, usage.completion_tokens) == (1600, 9)
    assert usage.prompt_tokens_details.cached_tokens == cached
    async with client_of(ends[PREFILL]) as client:
        assert ids == (await tokens(client, prompt_ids, 9)).ids


async def test_prompt_cached_by_the_decode_worker_is_not_handed_over(router: Router) -> None:
    prompt_ids = prompt(42_002, 1600)
    async with router.client() as client:
        first, _ = await streamed(client, prompt_ids, 9)
        assert handed_over(router) == [True]
        again, usage = await streamed(client, prompt_ids, 9)
    assert handed_over(router) == [False]
    assert usage.prompt_tokens_details.cached_tokens == 1536
    assert first == again


async def streamed(
    client: AsyncOpenAI, prompt_ids: list[int], output: int
) -> tuple[list[int], Any]:
    """Stream a completion; return its tokens and usage."""
    options = {"include_usage": True}
    stream = await complete(client, prompt_ids, output, stream=True, stream_options=options)
    events = [event async for event in stream]
    ids = [one for event in events for choice in event.choices for one in choice.token_ids]
    return ids, events[-1].usage


async def test_client_disconnect_in_the_prefill_leg_frees_the_worker(
    router: Router, ends: Ends
) -> None:
    async with router.client() as client:
        leaving = asyncio.create_task(complete(client, prompt(43_000, LONG_TOKENS), 64))
        await settled(ends[PREFILL], running=1, waiting=0)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
    await settled(ends[PREFILL], running=0, waiting=0)
    await wait_freed(ends[PREFILL])


async def test_client_disconnect_in_the_decode_leg_frees_both_workers(
    router: Router, ends: Ends
) -> None:
    async with router.client() as client:
        stream = await complete(client, prompt(43_100, 3000), 4000, stream=True)
        async for _ in stream:
            break
        await settled(ends[DECODE], running=1, waiting=0)
        await stream.close()
    await settled(ends[DECODE], running=0, waiting=0)
    await wait_freed(*ends.values())


async def cancel(task: asyncio.Task[Any]) -> None:
    """Disconnect a client."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, openai.APIError):
        await task


async def wait_released(router: Router, ends: Ends) -> None:
    """Wait until the workers have released the blocks of a disconnected client."""
    for worker in ends.values():
        await settled(worker, running=0, waiting=0)
    await wait_freed(*ends.values())
    await eventually(lambda: router.handovers()["released"], within=DEADLINE_S)


@pytest.mark.parametrize(
    ("before", "counts"),
    [(True, {"client_left_prefill": 1}), (False, {"prefilled": 1, "client_left_decode": 1})],
    ids=["before", "after"],
)
async def test_client_disconnect_around_the_prefill_answer_releases_blocks(
    ends: Ends, fleet: FleetConfig, tmp_path: Path, before: bool, counts: dict[str, int]
) -> None:
    """The router is stopped until the prefill is done, so that both events arrive together.

    If the client leaves after the answer, the decode leg is not sent yet.
    """
    # A router without measured prefills expects a short prefill.
    with handing_over(tmp_path, listed(fleet)) as router:
        async with router.client() as client:
            request = complete(client, prompt(43_160 + before, LONG_TOKENS), 200)
            leaving = asyncio.create_task(request)
            await settled(ends[PREFILL], running=1, waiting=0)
            with router.stopped():
                if before:
                    await cancel(leaving)
                await settled(ends[PREFILL], running=0, waiting=0)
                assert gauges(ends[PREFILL], HELD) > (0,)
                await cancel(leaving)  # has no effect on a cancelled request
        await wait_released(router, ends)
        assert router.handovers() == counts | {"released": 1}


async def test_client_disconnects_around_the_end_of_the_prefill(router: Router, ends: Ends) -> None:
    async with router.client() as client:
        begun = time.monotonic()
        await complete(client, prompt(43_200, 1500), 1)
        await complete(client, prompt(43_201, 1500), 2)
        took = time.monotonic() - begun
        for step in range(24):
            leaving = asyncio.create_task(complete(client, prompt(43_210 + step, 1500), 200))
            await asyncio.sleep(took / 2 * (0.5 + step / 24))
            await cancel(leaving)
    for worker in ends.values():
        await settled(worker, running=0, waiting=0)
        # The router does not wait for a long prefill, whose blocks are then freed by the lease.
        await wait_freed(worker, within=DEFAULT_LEASE_S + FREED_S)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Listen on a port to which no worker may connect."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.settimeout(1.0)
        yield listening


@pytest.mark.parametrize("size", [40, 1500])
async def test_client_cannot_make_a_worker_connect_to_an_address(
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
    prompt_ids = prompt(44_000 + size, size)
    async with client_of(ends[PREFILL]) as client:
        right = await tokens(client, prompt_ids)
    async with router.client() as client:
        for body in (
            {"kv_transfer_params": params},
            {"kv_transfer_params": {"do_remote_prefill": True}},
            {"vllm_xargs": {"kv_transfer_params": params}},
        ):
            with contextlib.suppress(openai.BadRequestError):
                assert await tokens(client, prompt_ids, **body) == right
        with pytest.raises(TimeoutError):
            listener.accept()
        assert await tokens(client, prompt_ids) == right
    assert ends[DECODE].is_healthy()


async def test_client_cannot_read_blocks_of_another_request(router: Router, ends: Ends) -> None:
    async with client_of(ends[PREFILL]) as client:
        # A hand-over without a decode leg: its blocks stay, and this is their address.
        held = await complete(
            client, prompt(45_000, 1500), 1, kv_transfer_params={"do_remote_decode": True}
        )
        params = held.kv_transfer_params
        assert params["do_remote_prefill"]
        prompt_ids = prompt(45_001, 1500)
        right = await tokens(client, prompt_ids)
    async with router.client() as client:
        with contextlib.suppress(openai.BadRequestError):
            assert await tokens(client, prompt_ids, kv_transfer_params=params) == right
    # vLLM itself allows it; the router prevents it.
    async with client_of(ends[DECODE]) as client:
        assert await tokens(client, prompt_ids, kv_transfer_params=params) != right
    await wait_freed(ends[PREFILL])


async def test_hand_over_is_one_trace_in_router_and_engines(
    ends: Ends, fleet: FleetConfig, collector: Collector, tmp_path: Path
) -> None:
    """The spans of each engine are below the router's leg."""
    trace, own = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    traces = {**PORTS, "tracing": {"endpoint": collector.url}}
    with handing_over(tmp_path, listed(fleet), router=traces) as router:
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
    await wait_freed(*ends.values())


def test_vllm_bench_serve_completes_with_hand_overs(
    router: Router, ends: Ends, tmp_path: Path
) -> None:
    check_vllm_bench_serve(
        router, tmp_path, 12, "--random-input-len", "600", "--max-concurrency", "4",
        "--model", "tiny", "--tokenizer", str(tiny_model()),
    )  # fmt: skip
    # The benchmark first sends a test prompt, which is cached afterwards.
    assert sum(handed_over(router, 13)) >= 11
    assert gauges(ends[DECODE], "nixl_num_failed_transfers_total") == (0,)


def test_workers_use_their_processors_and_are_idle_without_requests(ends: Ends) -> None:
    bound = {cpu for worker in ends.values() for cpu in worker.cpus}
    assert len(bound) == min(2, len(os.sched_getaffinity(0)))
    for worker in ends.values():
        of_all = {cpu for thread in threads(worker) for cpu in os.sched_getaffinity(thread)}
        assert of_all == set(worker.cpus)
        # vLLM's queue between processes spins for a second after work. A polling thread would use
        # its processor all the time.
        assert any(cpu_share(worker) < 1 / 3 for _ in range(4))


def cpu_share(worker: Worker) -> float:
    """Return the share of a processor that a worker uses for a second."""
    before, begun = cpu_ticks(worker), time.monotonic()
    time.sleep(1.0)
    seconds = (cpu_ticks(worker) - before) / os.sysconf("SC_CLK_TCK")
    return seconds / (time.monotonic() - begun)


def cpu_ticks(worker: Worker) -> int:
    """Return the processor time of all threads of a worker."""
    total = 0
    for thread in threads(worker):
        with contextlib.suppress(OSError):
            numbers = Path(f"/proc/{thread}/task/{thread}/stat").read_text().rpartition(")")[2]
            user, system = numbers.split()[11:13]
            total += int(user) + int(system)
    return total

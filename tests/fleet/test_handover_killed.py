"""A real worker that is killed in each phase of a hand-over, and restarted.

A restart takes most of a minute, so the worker is killed once. Four routers use it at the same
time: as a prefill and as a decode worker, each as the only one and as one of two.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.fleet.conftest import DECODE, PREFILL, restart
from tests.fleet.test_handover import (
    Completion,
    Ends,
    handed_over,
    handing_over,
    tokens,
    wait_freed,
)
from tests.fleet.test_router import PATIENT, Router, family
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

Entry = dict[str, object]
GENERAL, OTHER, SECOND = "general-0", "decode-1", "prefill-1"
FAILED = "nixl_num_failed_transfers_total"


def entry(name: str, worker: Worker) -> Entry:
    """Return a worker's entry for a router's file, with the role of its name."""
    return {"name": name, "role": name.partition("-")[0], "url": worker.url}


@contextmanager
def routing_pairs(folder: Path, links: int, *workers: Entry) -> Iterator[Router]:
    """Run a router with these workers, and wait until `links` pairs are connected."""
    folder.mkdir()
    with handing_over(folder, [*workers], links=links, router=PATIENT) as running:
        yield running


def post_action(router: Router, action: str, name: str = GENERAL) -> None:
    """Drain or undrain a worker."""
    router.api(f"workers/{name}/{action}", "POST")


def state_of(router: Router, name: str) -> object:
    """Return the router's state of a worker."""
    return {each["name"]: each["state"] for each in router.api("workers")}[name]


def last_placement(router: Router) -> tuple[object, object]:
    """Return the worker and the prefill worker of the last request."""
    [decision] = router.decisions(1)
    return decision["worker"], decision["prefill_worker"]


def signal_all(worker: Worker, number: signal.Signals) -> None:
    """Send a signal to all processes of a worker."""
    for pid in [*family(worker)]:
        os.kill(pid, number)


async def request_stopped_after_prefill(
    router: Router,
    client: AsyncOpenAI,
    prompt_ids: list[int],
    prefill_worker: Worker,
    moment: ExitStack,
) -> asyncio.Task[Completion]:
    """Send a request and return after its prefill; the router is stopped until `moment` closes."""
    task = asyncio.create_task(tokens(client, prompt_ids))
    await settled(prefill_worker, running=1, waiting=0)
    moment.enter_context(router.stopped())
    await settled(prefill_worker, running=0, waiting=0)
    return task


Scene = AsyncIterator[None]


async def only_decode_worker_killed(router: Router, ends: Ends, moment: ExitStack) -> Scene:
    """Kill before the first byte of one request, and in the middle of another."""
    prompts = [prompt(46_000 + number, size) for number, size in enumerate((LONG_TOKENS, 5000))]
    async with router.client() as client:
        post_action(router, "drain")
        stream = await complete(client, prompt(46_200, 40), 16_000, stream=True)
        await anext(aiter(stream))
        task = await request_stopped_after_prefill(
            router, client, prompts[0], ends[PREFILL], moment
        )
        yield
        await eventually(lambda: router.handovers()["prefilled"] == 1, within=DEADLINE_S)
        post_action(router, "undrain")
        yield
        # A request without output is served by another worker, from the start.
        completions = [await task]
        assert last_placement(router) == (GENERAL, None)
        # A request with partial output gets an error.
        with pytest.raises(openai.APIError):
            await drained(stream)
        # No other decode worker can release its blocks.
        await eventually(lambda: router.handovers()["left_to_expire"], within=DEADLINE_S)
        assert router.handovers()["decode_failed"] == 1
        post_action(router, "drain")
        yield
        await wait_handed_over(router, client)
        # The restarted worker is not asked for old blocks.
        completions.append(await tokens(client, prompts[1]))
        assert handed_over(router) == [True]
    await assert_same_as_one_worker(completions, prompts, ends)


async def one_of_two_decode_workers_killed(router: Router, ends: Ends, moment: ExitStack) -> Scene:
    """Kill before the first byte: the other worker serves and releases the blocks."""
    prompt_ids = prompt(46_020, LONG_TOKENS)
    async with router.client() as client:
        post_action(router, "drain", DECODE)
        task = await request_stopped_after_prefill(
            router, client, prompt_ids, ends[PREFILL], moment
        )
        yield
        await eventually(lambda: router.handovers()["prefilled"] == 1, within=DEADLINE_S)
        post_action(router, "undrain", DECODE)
        yield
        completion = await task
        assert last_placement(router) == (DECODE, PREFILL)
        await eventually(lambda: router.handovers()["released"], within=DEADLINE_S)
        # The blocks of the first prefill are released and not used by the second leg.
        assert router.handovers() == {
            "prefilled": 2, "decode_failed": 1, "released": 1, "transferred": 1,
        }  # fmt: skip
        await tokens(client, prompt(46_021, 3000))
        assert handed_over(router) == [True]
        yield
    await assert_same_as_one_worker([completion], [prompt_ids], ends)


async def only_prefill_worker_killed(
    router: Router, ends: Ends, third: Worker, moment: ExitStack
) -> Scene:
    """Kill after one prefill, before its fetch, and during another prefill."""
    prompts = [
        prompt(46_010 + number, size) for number, size in enumerate((LONG_TOKENS, 5000, 5000))
    ]
    async with router.client() as client:
        [failed] = gauges(ends[DECODE], FAILED)
        with ExitStack() as prefilled:
            first = await request_stopped_after_prefill(
                router, client, prompts[0], third, prefilled
            )
            signal_all(ends[DECODE], signal.SIGSTOP)
            moment.callback(signal_all, ends[DECODE], signal.SIGCONT)
        await eventually(lambda: router.handovers()["prefilled"] == 1, within=DEADLINE_S)
        yield
        second = asyncio.create_task(tokens(client, prompt(46_100, 15_000)))
        await settled(third, running=2, waiting=0)  # beside the stream
        yield
        # The decode worker computes both prompts.
        completions = [await first]
        await second
        assert {decision["worker"] for decision in router.decisions(2)} == {DECODE}
        assert gauges(ends[DECODE], FAILED) > (failed,)
        # Without it, the decode worker also serves new requests.
        completions.append(await tokens(client, prompts[1]))
        assert handed_over(router) == [False]
        yield
        await wait_handed_over(router, client)
        completions.append(await tokens(client, prompts[2]))
        assert handed_over(router) == [True]
    await assert_same_as_one_worker(completions, prompts, ends)


async def one_of_two_prefill_workers_killed(router: Router, ends: Ends, third: Worker) -> Scene:
    """Kill during the prefill: the other worker prefills.

    Later requests do not try the dead worker.
    """
    prompt_ids = prompt(46_030, LONG_TOKENS)
    async with router.client() as client:
        post_action(router, "drain", PREFILL)
        task = asyncio.create_task(tokens(client, prompt_ids))
        # Another long prompt is in prefill there.
        await settled(third, running=2, waiting=1)
        post_action(router, "undrain", PREFILL)
        yield
        completion = await task
        assert last_placement(router) == (DECODE, PREFILL)
        assert router.handovers() == {
            "prefill_failed": 1, "prefilled": 1, "transferred": 1,
        }  # fmt: skip
        # On a fast machine the answer precedes the failed probes.
        await eventually(lambda: state_of(router, SECOND) == "down", within=DEADLINE_S)
        await tokens(client, prompt(46_031, 3000))
        assert last_placement(router) == (DECODE, PREFILL)
        assert router.handovers()["prefill_failed"] == 1
        yield
    await assert_same_as_one_worker([completion], [prompt_ids], ends)


async def assert_same_as_one_worker(
    completions: list[Completion], prompts: list[list[int]], ends: Ends
) -> None:
    """Check that one worker alone returns the same tokens."""
    async with client_of(ends[PREFILL]) as client:
        assert completions == [await tokens(client, prompt_ids) for prompt_ids in prompts]


async def test_worker_killed_in_either_role_recovers(
    ends: Ends, third: Worker, tmp_path: Path
) -> None:
    prefill_entry, decode_entry = entry(PREFILL, ends[PREFILL]), entry(DECODE, ends[DECODE])
    second_prefill, second_decode = entry(SECOND, third), entry(OTHER, third)
    # Drained until it is needed.
    spare = entry(GENERAL, ends[DECODE])
    with ExitStack() as stack:
        decodes_alone, decodes_beside, prefills_alone, prefills_beside = (
            stack.enter_context(routing_pairs(tmp_path / str(number), links, *workers))
            for number, (links, workers) in enumerate(
                (
                    (1, (prefill_entry, second_decode, spare)),
                    (2, (prefill_entry, decode_entry, second_decode)),
                    (1, (second_prefill, decode_entry)),
                    (2, (prefill_entry, second_prefill, decode_entry)),
                )
            )
        )
        # Closed at the kill, or at an earlier error.
        paused, stopped = stack.enter_context(ExitStack()), stack.enter_context(ExitStack())
        decoding = only_decode_worker_killed(decodes_alone, ends, paused)
        decoding_too = one_of_two_decode_workers_killed(decodes_beside, ends, paused)
        prefilling = only_prefill_worker_killed(prefills_alone, ends, third, stopped)
        prefilling_too = one_of_two_prefill_workers_killed(prefills_beside, ends, third)
        every = (decoding, decoding_too, prefilling, prefilling_too)
        # Prompts are prefilled and not fetched.
        for scene in (prefilling, decoding, decoding_too):
            await anext(scene)
        # Prompts are in prefill.
        for scene in (prefilling, prefilling_too):
            await anext(scene)
        signal_all(third, signal.SIGSTOP)
        paused.close()
        # Decode legs are sent.
        for scene in (decoding, decoding_too):
            await anext(scene)
        signal_all(third, signal.SIGKILL)
        stopped.close()
        for scene in every:
            await anext(scene)
        await asyncio.to_thread(restart, third)
        for scene in every:
            with contextlib.suppress(StopAsyncIteration):
                await anext(scene)
    await wait_freed(third, ends[DECODE])
    # The lease of the router without another decode worker.
    await wait_freed(ends[PREFILL], within=DEFAULT_LEASE_S + DEADLINE_S)


async def drained(stream: Any) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


async def wait_handed_over(router: Router, client: AsyncOpenAI) -> None:
    """Send new prompts until one is handed over again."""
    async with asyncio.timeout(DEADLINE_S):
        for seed in itertools.count(46_300):
            with contextlib.suppress(openai.APIStatusError):
                await tokens(client, prompt(seed, 3000))
                if handed_over(router) == [True]:
                    return
            await asyncio.sleep(0.2)

"""A real worker that ends without a word, in each phase of a hand-over, and comes back.

It takes most of a minute to come back, so it is killed once: as a prefill worker and as a decode
worker, the only one of its kind and one of two, of four routers that have it at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.fleet.conftest import DECODE, PREFILL, revive
from tests.fleet.test_handover import (
    ABOVE,
    Ends,
    Said,
    connected,
    direct,
    freed,
    handed_over,
    tokens,
)
from tests.fleet.test_router import PATIENT, Router, family, routing
from tests.fleet.test_worker import DEADLINE_S, LENGTHY, complete, gauges, prompt, settled
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import Worker
from vllm_sched.workers.transfer import DEFAULT_LEASE_S

Entry = dict[str, object]
GENERAL, OTHER, SECOND = "general-0", "decode-1", "prefill-1"
FAILED = "nixl_num_failed_transfers_total"


def entry(name: str, worker: Worker) -> Entry:
    """List a worker for a router's own file, in the role that its name says."""
    return {"name": name, "role": name.partition("-")[0], "url": worker.url}


@contextmanager
def before(folder: Path, links: int, *workers: Entry) -> Iterator[Router]:
    """Run a router before these, that many pairs of which may hand over to each other."""
    folder.mkdir()
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    with routing(folder, [*workers], rules, transfer="nixl", router=PATIENT) as running:
        connected(running, links)
        yield running


def tell(router: Router, what: str, whom: str = GENERAL) -> None:
    """Have the general worker, or another, drain, or not."""
    url = f"{router.admin}/admin/workers/{whom}/{what}"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10) as answer:
        assert answer.status == 200


def state_of(router: Router, name: str) -> object:
    """Ask the router what it takes a worker for."""
    with urllib.request.urlopen(f"{router.admin}/admin/workers", timeout=10) as answer:
        return {each["name"]: each["state"] for each in json.load(answer)}[name]


def placed_last(router: Router) -> tuple[object, object]:
    """Name who served the last request, and who prefilled it."""
    [decision] = router.decisions(1)
    return decision["worker"], decision["prefill_worker"]


def tell_all(worker: Worker, which: signal.Signals) -> None:
    """Send a signal to a worker's whole family."""
    for pid in [*family(worker)]:
        os.kill(pid, which)


async def held_up_after_the_prefill(
    router: Router, client: AsyncOpenAI, some: list[int], prefills: Worker, moment: ExitStack
) -> asyncio.Task[Said]:
    """Ask, and return when the prefill is done: the router learns of it when the moment is over."""
    asked = asyncio.create_task(tokens(client, some))
    await settled(prefills, running=1, waiting=0)
    moment.enter_context(router.held_up())
    await settled(prefills, running=0, waiting=0)
    return asked


Scene = AsyncIterator[None]


async def the_only_one_that_decodes(router: Router, ends: Ends, moment: ExitStack) -> Scene:
    """Have it killed before its first byte of one request, and in the middle of another."""
    some = [prompt(46_000 + number, size) for number, size in enumerate((LENGTHY, 5000))]
    async with router.client() as client:
        tell(router, "drain")
        stream = await complete(client, prompt(46_200, 40), 16_000, stream=True)
        await anext(aiter(stream))
        asked = await held_up_after_the_prefill(router, client, some[0], ends[PREFILL], moment)
        yield
        await eventually(lambda: router.handovers()["prefilled"] == 1, within=DEADLINE_S)
        tell(router, "undrain")
        yield
        # Who has nothing yet is served by another, from the start.
        said = [await asked]
        assert placed_last(router) == (GENERAL, None)
        # Who has a part is told of an error, not of an end.
        with pytest.raises(openai.APIError):
            await drained(stream)
        # There is no other decode worker, through which its blocks could be freed.
        await eventually(lambda: router.handovers()["left_to_expire"], within=DEADLINE_S)
        assert router.handovers()["decode_failed"] == 1
        tell(router, "drain")
        yield
        await handed_over_again(router, client)
        # What the old one had promised is not asked of the new one.
        said.append(await tokens(client, some[1]))
        assert handed_over(router) == [True]
    await are_those_of_one(said, some, ends)


async def one_of_two_that_decode(router: Router, ends: Ends, moment: ExitStack) -> Scene:
    """Before its first byte: the other has it all, and has the blocks freed that nobody fetched."""
    some = prompt(46_020, LENGTHY)
    async with router.client() as client:
        tell(router, "drain", DECODE)
        asked = await held_up_after_the_prefill(router, client, some, ends[PREFILL], moment)
        yield
        await eventually(lambda: router.handovers()["prefilled"] == 1, within=DEADLINE_S)
        tell(router, "undrain", DECODE)
        yield
        said = await asked
        assert placed_last(router) == (DECODE, PREFILL)
        await eventually(lambda: router.handovers()["released"], within=DEADLINE_S)
        # What the first prefill left is nobody's any more, and was not given to the second leg.
        assert router.handovers() == {
            "prefilled": 2, "decode_failed": 1, "released": 1, "transferred": 1,
        }  # fmt: skip
        await tokens(client, prompt(46_021, 3000))
        assert handed_over(router) == [True]
        yield
    await are_those_of_one([said], [some], ends)


async def the_only_one_that_prefills(
    router: Router, ends: Ends, third: Worker, moment: ExitStack
) -> Scene:
    """When it has answered one request and nothing is fetched yet, and in another's prefill."""
    some = [prompt(46_010 + number, size) for number, size in enumerate((LENGTHY, 5000, 5000))]
    async with router.client() as client:
        [failed] = gauges(ends[DECODE], FAILED)
        with ExitStack() as prefilled:
            first = await held_up_after_the_prefill(router, client, some[0], third, prefilled)
            tell_all(ends[DECODE], signal.SIGSTOP)
            moment.callback(tell_all, ends[DECODE], signal.SIGCONT)
        await eventually(lambda: router.handovers()["prefilled"] == 1, within=DEADLINE_S)
        yield
        second = asyncio.create_task(tokens(client, prompt(46_100, 15_000)))
        await settled(third, running=2, waiting=0)  # beside the stream
        yield
        # The decode worker computes both prompts.
        said = [await first]
        await second
        assert {each["worker"] for each in router.decisions(2)} == {DECODE}
        assert gauges(ends[DECODE], FAILED) > (failed,)
        # And with it gone, all that comes.
        said.append(await tokens(client, some[1]))
        assert handed_over(router) == [False]
        yield
        await handed_over_again(router, client)
        said.append(await tokens(client, some[2]))
        assert handed_over(router) == [True]
    await are_those_of_one(said, some, ends)


async def one_of_two_that_prefill(router: Router, ends: Ends, third: Worker) -> Scene:
    """Before it has answered: the other prefills, and D decodes what that one has.

    So does what comes once the killed one is known to be down, without another try.
    """
    some = prompt(46_030, LENGTHY)
    async with router.client() as client:
        tell(router, "drain", PREFILL)
        asked = asyncio.create_task(tokens(client, some))
        # Another long one is being read there.
        await settled(third, running=2, waiting=1)
        tell(router, "undrain", PREFILL)
        yield
        said = await asked
        assert placed_last(router) == (DECODE, PREFILL)
        assert router.handovers() == {
            "prefill_failed": 1, "prefilled": 1, "transferred": 1,
        }  # fmt: skip
        # A fast machine has answered before enough probes have failed.
        await eventually(lambda: state_of(router, SECOND) == "down", within=DEADLINE_S)
        await tokens(client, prompt(46_031, 3000))
        assert placed_last(router) == (DECODE, PREFILL)
        assert router.handovers()["prefill_failed"] == 1
        yield
    await are_those_of_one([said], [some], ends)


async def are_those_of_one(said: list[Said], some: list[list[int]], ends: Ends) -> None:
    """Check that one worker alone has the same tokens."""
    async with direct(ends[PREFILL]) as client:
        assert said == [await tokens(client, each) for each in some]


async def test_a_worker_is_killed_in_either_role_and_comes_back(
    ends: Ends, third: Worker, tmp_path: Path
) -> None:
    prefills, decodes = entry(PREFILL, ends[PREFILL]), entry(DECODE, ends[DECODE])
    prefills_too, decodes_too = entry(SECOND, third), entry(OTHER, third)
    # Given nothing until it is needed.
    spare = entry(GENERAL, ends[DECODE])
    with ExitStack() as stack:
        decodes_alone, decodes_beside, prefills_alone, prefills_beside = (
            stack.enter_context(before(tmp_path / str(number), links, *workers))
            for number, (links, workers) in enumerate(
                (
                    (1, (prefills, decodes_too, spare)),
                    (2, (prefills, decodes, decodes_too)),
                    (1, (prefills_too, decodes)),
                    (2, (prefills, prefills_too, decodes)),
                )
            )
        )
        # Ends when it is killed, or when something went wrong before that.
        paused, stopped = stack.enter_context(ExitStack()), stack.enter_context(ExitStack())
        decoding = the_only_one_that_decodes(decodes_alone, ends, paused)
        decoding_too = one_of_two_that_decode(decodes_beside, ends, paused)
        prefilling = the_only_one_that_prefills(prefills_alone, ends, third, stopped)
        prefilling_too = one_of_two_that_prefill(prefills_beside, ends, third)
        every = (decoding, decoding_too, prefilling, prefilling_too)
        # Prompts are prefilled that nobody fetches.
        for each in (prefilling, decoding, decoding_too):
            await anext(each)
        # Prompts are being read.
        for each in (prefilling, prefilling_too):
            await anext(each)
        tell_all(third, signal.SIGSTOP)
        paused.close()
        # Decode legs are sent.
        for each in (decoding, decoding_too):
            await anext(each)
        tell_all(third, signal.SIGKILL)
        stopped.close()
        for each in every:
            await anext(each)
        await asyncio.to_thread(revive, third)
        for each in every:
            with contextlib.suppress(StopAsyncIteration):
                await anext(each)
    for worker in (third, ends[DECODE]):
        await freed(worker)
    # Where it was the only one that decodes.
    await freed(ends[PREFILL], within=DEFAULT_LEASE_S + DEADLINE_S)


async def drained(stream: Any) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


async def handed_over_again(router: Router, client: AsyncOpenAI) -> None:
    """Ask until both legs are served again; each time anew, since what D has cached is D's."""
    async with asyncio.timeout(DEADLINE_S):
        for seed in itertools.count(46_300):
            with contextlib.suppress(openai.APIStatusError):
                await tokens(client, prompt(seed, 3000))
                if handed_over(router) == [True]:
                    return
            await asyncio.sleep(0.2)

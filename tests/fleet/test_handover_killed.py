"""Real workers that end without a word, in each phase of a hand-over.

A worker takes most of a minute to come back, so each is killed once, with two requests upon it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from proxy.config import FleetConfig
from tests.fleet.conftest import started
from tests.fleet.test_handover import (
    ABOVE,
    DECODE,
    LENGTHY,
    PREFILL,
    Ends,
    Said,
    connected,
    direct,
    freed,
    handed_over,
    listed,
    tokens,
)
from tests.fleet.test_router import LONG, Router, Workers, routing
from tests.fleet.test_worker import DEADLINE_S, complete, gauges, prompt, settled
from tests.proxy.wire.site import eventually
from vllm_sched.cli.up import placed
from vllm_sched.workers.launch import Worker

GENERAL, OTHER, SECOND = "general-0", "decode-1", "prefill-1"
FAILED = "nixl_num_failed_transfers_total"


@pytest.fixture(scope="module")
def router(
    ends: Ends, fleet: FleetConfig, workers: Workers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Router]:
    """Run the router before both, and a general worker that is given nothing until it is needed."""
    assert all(worker.healthy() for worker in ends.values())
    spare: dict[str, object] = {"name": GENERAL, "role": "general", "url": workers[LONG].url}
    some = [*listed(fleet), spare]
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    with routing(tmp_path_factory.mktemp("killed"), some, rules, transfer="nixl") as running:
        connected(running)
        tell(running, "drain")
        yield running


@contextmanager
def one_more(ends: Ends, fleet: FleetConfig, like: str, name: str, logs: Path) -> Iterator[Worker]:
    """Start one more worker, like one that there is."""
    assert all(worker.healthy() for worker in ends.values())
    [first] = [each for each in fleet.workers if each.name == like]
    again = first.model_copy(update={"name": name, "url": None})
    with started(placed(fleet.model_copy(update={"workers": (again,)})), logs) as workers:
        yield workers[name]


@pytest.fixture
def other(ends: Ends, fleet: FleetConfig, tmp_path: Path) -> Iterator[Worker]:
    """Start one more decode worker."""
    with one_more(ends, fleet, DECODE, OTHER, tmp_path) as worker:
        yield worker


@pytest.fixture
def second(ends: Ends, fleet: FleetConfig, tmp_path: Path) -> Iterator[Worker]:
    """Start one more prefill worker."""
    with one_more(ends, fleet, PREFILL, SECOND, tmp_path) as worker:
        yield worker


def tell(router: Router, what: str, whom: str = GENERAL) -> None:
    """Have the general worker, or another, drain, or not."""
    url = f"{router.admin}/admin/workers/{whom}/{what}"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10) as answer:
        assert answer.status == 200


def state_of(router: Router, name: str) -> object:
    """Ask the router what it takes a worker for."""
    with urllib.request.urlopen(f"{router.admin}/admin/workers", timeout=10) as answer:
        return {each["name"]: each["state"] for each in json.load(answer)}[name]


def kill(worker: Worker) -> None:
    """End a worker's whole family without a word."""
    _signal(worker, signal.SIGKILL)


def _signal(worker: Worker, which: signal.Signals) -> None:
    assert worker.pid is not None
    os.killpg(worker.pid, which)


async def back(worker: Worker) -> None:
    """Start a worker that was killed again."""
    worker.stop()
    worker.start()
    await asyncio.to_thread(worker.wait_ready)


async def with_the_decode_worker(
    router: Router, ends: Ends, client: AsyncOpenAI, some: list[int], name: str = DECODE
) -> asyncio.Task[Said]:
    """Ask, and return when the decode leg is sent; the decode worker has stopped before that."""
    before = router.handovers()["prefilled"]
    asked = asyncio.create_task(tokens(client, some))
    await settled(ends[PREFILL], running=1, waiting=0)
    with router.held_up():
        await settled(ends[PREFILL], running=0, waiting=0)
        _signal(ends[name], signal.SIGSTOP)
    await eventually(lambda: router.handovers()["prefilled"] > before, within=DEADLINE_S)
    return asked


async def test_the_decode_worker_is_killed_and_comes_back(
    router: Router, ends: Ends, workers: Workers
) -> None:
    """Before its first byte of one request, and in the middle of another."""
    some = [prompt(46_000 + number, size) for number, size in enumerate((LENGTHY, 5000))]
    async with direct(workers[LONG]) as client:
        right = [await tokens(client, each) for each in some]
    async with router.client() as client:
        before = router.handovers()
        stream = await complete(client, prompt(46_200, 40), 16_000, stream=True)
        await anext(stream)
        asked = await with_the_decode_worker(router, ends, client, some[0])
        tell(router, "undrain")
        kill(ends[DECODE])
        # Who has nothing yet is served by another, from the start.
        assert await asked == right[0]
        assert [(each["worker"], each["prefill_worker"]) for each in router.decisions(1)] == [
            (GENERAL, None)
        ]
        # Who has a part is told of an error, not of an end.
        with pytest.raises(openai.APIError):
            await drained(stream)
        # There is no other decode worker, through which its blocks could be freed.
        await eventually(lambda: (router.handovers() - before)["left_to_expire"], within=DEADLINE_S)
        assert (router.handovers() - before)["decode_failed"] == 1
        tell(router, "drain")
        await back(ends[DECODE])
        await handed_over_again(router, client)
        # What the old one had promised is not asked of the new one.
        assert await tokens(client, some[1]) == right[1]
        assert handed_over(router) == [True]


async def test_a_decode_worker_is_killed_while_another_is_left(
    ends: Ends, fleet: FleetConfig, other: Worker, tmp_path: Path
) -> None:
    """Before its first byte: the other has it all, and has the blocks freed that nobody fetched."""
    some = prompt(46_020, LENGTHY)
    more: dict[str, object] = {"name": OTHER, "role": "decode", "url": other.url}
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    with routing(tmp_path, [*listed(fleet), more], rules, transfer="nixl") as router:
        connected(router, links=2)
        async with router.client() as client:
            tell(router, "drain", DECODE)
            asked = await with_the_decode_worker(
                router, {**ends, OTHER: other}, client, some, OTHER
            )
            tell(router, "undrain", DECODE)
            kill(other)
            said = await asked
            [decision] = router.decisions(1)
            assert (decision["worker"], decision["prefill_worker"]) == (DECODE, PREFILL)
            await eventually(lambda: router.handovers()["released"], within=DEADLINE_S)
            # What the first prefill left is nobody's any more, and was not given to the second leg.
            assert router.handovers() == {
                "prefilled": 2, "decode_failed": 1, "released": 1, "transferred": 1,
            }  # fmt: skip
            await tokens(client, prompt(46_021, 3000))
            assert handed_over(router) == [True]
    async with direct(ends[PREFILL]) as client:
        assert said == await tokens(client, some)
    for worker in ends.values():
        await freed(worker)


async def test_a_prefill_worker_is_killed_while_another_is_left(
    ends: Ends, fleet: FleetConfig, second: Worker, tmp_path: Path
) -> None:
    """In its prefill, before it has answered: the other prefills, and D decodes what that one has.

    So does what comes once the killed one is known to be down, without another try.
    """
    some = prompt(46_030, LENGTHY)
    more: dict[str, object] = {"name": SECOND, "role": "prefill", "url": second.url}
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    with routing(tmp_path, [*listed(fleet), more], rules, transfer="nixl") as router:
        connected(router, links=2)
        async with router.client() as client:
            tell(router, "drain", PREFILL)
            asked = asyncio.create_task(tokens(client, some))
            await settled(second, running=1, waiting=0)
            tell(router, "undrain", PREFILL)
            kill(second)
            said = await asked
            [decision] = router.decisions(1)
            assert (decision["worker"], decision["prefill_worker"]) == (DECODE, PREFILL)
            assert router.handovers() == {
                "prefill_failed": 1, "prefilled": 1, "transferred": 1,
            }  # fmt: skip
            # A fast machine has answered before enough probes have failed.
            await eventually(lambda: state_of(router, SECOND) == "down", within=DEADLINE_S)
            await tokens(client, prompt(46_031, 3000))
            [decision] = router.decisions(1)
            assert (decision["worker"], decision["prefill_worker"]) == (DECODE, PREFILL)
            assert router.handovers()["prefill_failed"] == 1
    async with direct(ends[PREFILL]) as client:
        assert said == await tokens(client, some)
    for worker in ends.values():
        await freed(worker)


async def test_the_prefill_worker_is_killed_and_comes_back(
    router: Router, ends: Ends, workers: Workers
) -> None:
    """When it has answered one request and nothing is fetched yet, and in another's prefill."""
    some = [prompt(46_010 + number, size) for number, size in enumerate((LENGTHY, 5000, 5000))]
    async with direct(workers[LONG]) as client:
        right = [await tokens(client, each) for each in some]
    async with router.client() as client:
        [before] = gauges(ends[DECODE], FAILED)
        first = await with_the_decode_worker(router, ends, client, some[0])
        second = asyncio.create_task(tokens(client, prompt(46_100, 15_000)))
        await settled(ends[PREFILL], running=1, waiting=0)
        kill(ends[PREFILL])
        _signal(ends[DECODE], signal.SIGCONT)
        # The decode worker computes both prompts.
        assert await first == right[0]
        await second
        assert {each["worker"] for each in router.decisions(2)} == {DECODE}
        assert gauges(ends[DECODE], FAILED) > (before,)
        # And with it gone, all that comes.
        assert await tokens(client, some[1]) == right[1]
        assert handed_over(router) == [False]
        await back(ends[PREFILL])
        await handed_over_again(router, client)
        assert await tokens(client, some[2]) == right[2]
        assert handed_over(router) == [True]
    for worker in ends.values():
        await freed(worker)


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

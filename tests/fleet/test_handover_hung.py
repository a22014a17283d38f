"""A real worker that stands still, and goes on when whoever waited was served elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from proxy.config import FleetConfig, ProbeConfig
from proxy.wire.exchange.failover import DOWN_GRACE_S
from proxy.wire.timeouts import LATE_FACTOR
from tests.fleet.conftest import DECODE, PREFILL
from tests.fleet.test_handover import (
    ABOVE,
    Ends,
    connected,
    direct,
    freed,
    handed_over,
    listed,
    tokens,
)
from tests.fleet.test_handover_killed import OTHER, handed_over_again, state_of, tell
from tests.fleet.test_router import PORTS, Router, family, routing
from tests.fleet.test_worker import DEADLINE_S, LENGTHY, complete, prompt, settled
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import Worker

ENGINE, ALL = "its engine", "all of it"
# A probe is under way when a worker stops.
PROBE = ProbeConfig()
DOWN_S = (PROBE.down_after + 1) * (PROBE.interval_s + PROBE.timeout_s)
# The router looks at its deadlines once a second, and the machine may be held up for some. Who has
# no deadline waits for a minute and more.
HELD_UP_S = 20.0
LEASE_S = 8.0  # the workers keep theirs for a minute, whatever this router is told


@contextmanager
def standing_still(worker: Worker, part: str = ALL) -> Iterator[None]:
    """Stop a worker's processes, or the one that computes under a server that answers probes."""
    pids = [*family(worker)]
    assert pids
    if part == ENGINE:
        [pids] = [[p] for p in pids if b"EngineCore" in Path(f"/proc/{p}/cmdline").read_bytes()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("part", [ENGINE, ALL])
async def test_a_prefill_worker_that_stands_still_in_a_prefill(
    ends: Ends, fleet: FleetConfig, tmp_path: Path, part: str
) -> None:
    """Where its server lives its time is up; else probes call it down. README says when."""
    prefill_s = 2.0 if part == ENGINE else 600.0
    router_block = {**PORTS, "timeouts": {"prefill_s": prefill_s}}
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    with routing(tmp_path, listed(fleet), rules, router=router_block, transfer="nixl") as router:
        connected(router)
        async with router.client() as client:
            begun = time.monotonic()
            await tokens(client, prompt(48_000 + len(part), LENGTHY))  # now its pace is known
            took_s = time.monotonic() - begun
            assert handed_over(router) == [True]
            some = prompt(48_100 + len(part), LENGTHY)
            asked = asyncio.create_task(tokens(client, some))
            await settled(ends[PREFILL], running=1, waiting=0)
            with standing_still(ends[PREFILL], part):
                begun = time.monotonic()
                said = await asked
                waited_s = time.monotonic() - begun
                [decision] = router.decisions(1)
                assert (decision["worker"], decision["prefill_worker"]) == (DECODE, None)
                assert ends[PREFILL].healthy() == (part == ENGINE)
            bound_s = prefill_s + LATE_FACTOR * took_s if part == ENGINE else DOWN_S + DOWN_GRACE_S
            assert waited_s < bound_s + 2 * took_s + HELD_UP_S
            assert router.handovers()["prefill_failed"] == 1
            # It hears that nobody wants it any more: nothing is left to the end of a lease.
            await settled(ends[PREFILL], running=0, waiting=0)
            await freed(ends[PREFILL])
            await handed_over_again(router, client)
    async with direct(ends[PREFILL]) as client:
        assert said == await tokens(client, some)
    for worker in ends.values():
        await freed(worker)


async def test_a_prefill_worker_that_stands_still_before_its_blocks_are_fetched(
    ends: Ends, fleet: FleetConfig, tmp_path: Path
) -> None:
    """The decode worker waits for no longer than the blocks are sure to be kept, and is well."""
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    transfer = {"connector": "nixl", "lease_s": LEASE_S}
    with routing(tmp_path, listed(fleet), rules, transfer=transfer) as router:
        connected(router)
        async with router.client() as client:
            begun = time.monotonic()
            await tokens(client, prompt(48_200, LENGTHY))
            took_s = time.monotonic() - begun
            some = prompt(48_201, LENGTHY)
            asked = asyncio.create_task(tokens(client, some))
            await settled(ends[PREFILL], running=1, waiting=0)
            with ExitStack() as still:
                with router.held_up():
                    await settled(ends[PREFILL], running=0, waiting=0)
                    still.enter_context(standing_still(ends[PREFILL]))
                begun = time.monotonic()
                await eventually(lambda: router.handovers()["prefilled"] == 2, within=DEADLINE_S)
                # Who comes meanwhile, and needs nothing of it, does not wait for it.
                await tokens(client, prompt(48_202, 40))
                assert not asked.done()
                said = await asked
                assert time.monotonic() - begun < LEASE_S + 2 * took_s + HELD_UP_S
            await handed_over_again(router, client)
    async with direct(ends[PREFILL]) as client:
        assert said == await tokens(client, some)
    for worker in ends.values():
        await freed(worker)


@contextmanager
def with_another(
    fleet: FleetConfig, third: Worker, folder: Path, **blocks: object
) -> Iterator[Router]:
    """Run a router that gives what it hands over to that one, for now."""
    more: dict[str, object] = {"name": OTHER, "role": "decode", "url": third.url}
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    with routing(folder, [*listed(fleet), more], rules, **blocks) as router:
        connected(router, links=2)
        tell(router, "drain", DECODE)
        yield router


@pytest.mark.parametrize("part", [ENGINE, ALL])
async def test_a_decode_worker_that_stands_still_before_its_first_byte(
    ends: Ends, fleet: FleetConfig, third: Worker, tmp_path: Path, part: str
) -> None:
    """Nobody waits for longer than the blocks are sure to be kept; the other has it all.

    Whether nothing of it lives, or a server that has taken the leg.
    """
    transfer = {"connector": "nixl", "lease_s": LEASE_S}
    some = prompt(48_300 + len(part), LENGTHY)
    with with_another(fleet, third, tmp_path, transfer=transfer) as router:
        async with router.client() as client:
            begun = time.monotonic()
            await tokens(client, prompt(48_320 + len(part), LENGTHY))
            took_s = time.monotonic() - begun
            assert handed_over(router) == [True]
            asked = asyncio.create_task(tokens(client, some))
            await settled(ends[PREFILL], running=1, waiting=0)
            with ExitStack() as still:
                with router.held_up():
                    await settled(ends[PREFILL], running=0, waiting=0)
                    still.enter_context(standing_still(third, part))
                begun = time.monotonic()
                await eventually(lambda: router.handovers()["prefilled"] == 2, within=DEADLINE_S)
                tell(router, "undrain", DECODE)
                # Who comes meanwhile does not wait for it.
                await tokens(client, prompt(48_340 + len(part), 40))
                assert not asked.done()
                said = await asked
                assert time.monotonic() - begun < LEASE_S + 2 * took_s + HELD_UP_S
                [decision] = router.decisions(1)
                assert (decision["worker"], decision["prefill_worker"]) == (DECODE, None)
                # The one that lives has the prefill worker free what nobody fetches.
                await eventually(lambda: router.handovers()["released"] == 1, within=DEADLINE_S)
                await freed(ends[PREFILL])
            assert router.handovers()["late_failed"] == 1
            # It hears, once it can, that nobody wants it any more.
            await settled(third, running=0, waiting=0)
            await freed(third)
            await handed_over_again(router, client)
    async with direct(ends[PREFILL]) as client:
        assert said == await tokens(client, some)
    for worker in (*ends.values(), third):
        await freed(worker)


async def test_a_decode_worker_that_stands_still_in_a_stream(
    ends: Ends, fleet: FleetConfig, third: Worker, tmp_path: Path
) -> None:
    """Who has part of an answer goes on with it, and has each token once.

    Who comes meanwhile is served by the other, once probes have called this one down.
    """
    some = prompt(48_400, 1500)
    with with_another(fleet, third, tmp_path, transfer="nixl") as router:
        async with router.client() as client:
            stream = await complete(client, some, 2000, stream=True)
            ids = [*(await anext(stream)).choices[0].token_ids]
            assert router.handovers() == {"prefilled": 1, "transferred": 1}
            tell(router, "undrain", DECODE)
            with standing_still(third):
                await eventually(lambda: state_of(router, OTHER) != "up", within=2 * DOWN_S)
                await tokens(client, prompt(48_401, 1500))
                [decision] = router.decisions(1)
                assert (decision["worker"], decision["prefill_worker"]) == (DECODE, PREFILL)
            async for event in stream:
                ids += [one for choice in event.choices for one in choice.token_ids]
        assert router.handovers() == {"prefilled": 2, "transferred": 2}
    async with direct(ends[PREFILL]) as client:
        assert ids == (await tokens(client, some, 2000)).ids
    for worker in (*ends.values(), third):
        await settled(worker, running=0, waiting=0)
        await freed(worker)

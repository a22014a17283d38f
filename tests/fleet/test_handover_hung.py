"""A real worker that hangs during hand-overs, and continues later."""

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
    Ends,
    handed_over,
    handing_over,
    listed,
    tokens,
    wait_freed,
)
from tests.fleet.test_handover_killed import OTHER, post_action, state_of, wait_handed_over
from tests.fleet.test_router import PORTS, Router, family
from tests.fleet.test_worker import DEADLINE_S, LONG_TOKENS, client_of, complete, prompt, settled
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import Worker

ENGINE, ALL = "its engine", "all of it"
# A probe is in flight when a worker stops.
PROBE = ProbeConfig()
DOWN_S = (PROBE.down_after + 1) * (PROBE.interval_s + PROBE.timeout_s)
# The router checks deadlines once a second, and the machine may stall for a few seconds. Without
# a deadline a request waits for more than a minute.
HELD_UP_S = 20.0
LEASE_S = 8.0  # the workers' own leases last a minute


@contextmanager
def hanging(worker: Worker, part: str = ALL) -> Iterator[None]:
    """Stop a worker's processes, or only its engine while the server answers probes."""
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
async def test_prefill_worker_that_hangs_during_a_prefill(
    ends: Ends, fleet: FleetConfig, tmp_path: Path, part: str
) -> None:
    """A live server times out; otherwise probes mark the worker as down."""
    prefill_s = 2.0 if part == ENGINE else 600.0
    router_block = {**PORTS, "timeouts": {"prefill_s": prefill_s}}
    with handing_over(tmp_path, listed(fleet), router=router_block) as router:
        async with router.client() as client:
            begun = time.monotonic()
            await tokens(
                client, prompt(48_000 + len(part), LONG_TOKENS)
            )  # the router learns its pace
            took_s = time.monotonic() - begun
            assert handed_over(router) == [True]
            prompt_ids = prompt(48_100 + len(part), LONG_TOKENS)
            task = asyncio.create_task(tokens(client, prompt_ids))
            await settled(ends[PREFILL], running=1, waiting=0)
            with hanging(ends[PREFILL], part):
                begun = time.monotonic()
                completion = await task
                waited_s = time.monotonic() - begun
                [decision] = router.decisions(1)
                assert (decision["worker"], decision["prefill_worker"]) == (DECODE, None)
                assert ends[PREFILL].is_healthy() == (part == ENGINE)
            bound_s = prefill_s + LATE_FACTOR * took_s if part == ENGINE else DOWN_S + DOWN_GRACE_S
            assert waited_s < bound_s + 2 * took_s + HELD_UP_S
            assert router.handovers()["prefill_failed"] == 1
            # The worker aborts the prefill, so no block waits for the end of a lease.
            await settled(ends[PREFILL], running=0, waiting=0)
            await wait_freed(ends[PREFILL])
            await wait_handed_over(router, client)
    async with client_of(ends[PREFILL]) as client:
        assert completion == await tokens(client, prompt_ids)
    await wait_freed(*ends.values())


async def test_prefill_worker_that_hangs_before_its_blocks_are_fetched(
    ends: Ends, fleet: FleetConfig, tmp_path: Path
) -> None:
    """The decode worker waits at most for the lease, and keeps working."""
    transfer = {"connector": "nixl", "lease_s": LEASE_S}
    with handing_over(tmp_path, listed(fleet), transfer=transfer) as router:
        async with router.client() as client:
            begun = time.monotonic()
            await tokens(client, prompt(48_200, LONG_TOKENS))
            took_s = time.monotonic() - begun
            prompt_ids = prompt(48_201, LONG_TOKENS)
            task = asyncio.create_task(tokens(client, prompt_ids))
            await settled(ends[PREFILL], running=1, waiting=0)
            with ExitStack() as still:
                with router.stopped():
                    await settled(ends[PREFILL], running=0, waiting=0)
                    still.enter_context(hanging(ends[PREFILL]))
                begun = time.monotonic()
                await eventually(lambda: router.handovers()["prefilled"] == 2, within=DEADLINE_S)
                # Other requests do not wait for the hanging worker.
                await tokens(client, prompt(48_202, 40))
                assert not task.done()
                completion = await task
                assert time.monotonic() - begun < LEASE_S + 2 * took_s + HELD_UP_S
            await wait_handed_over(router, client)
    async with client_of(ends[PREFILL]) as client:
        assert completion == await tokens(client, prompt_ids)
    await wait_freed(*ends.values())


@contextmanager
def with_another(
    fleet: FleetConfig, third: Worker, folder: Path, **blocks: object
) -> Iterator[Router]:
    """Run a router with an additional decode worker, which gets all hand-overs."""
    more: dict[str, object] = {"name": OTHER, "role": "decode", "url": third.url}
    with handing_over(folder, [*listed(fleet), more], links=2, **blocks) as router:
        post_action(router, "drain", DECODE)
        yield router


@pytest.mark.parametrize("part", [ENGINE, ALL])
async def test_decode_worker_that_hangs_before_its_first_byte(
    ends: Ends, fleet: FleetConfig, third: Worker, tmp_path: Path, part: str
) -> None:
    """The request waits at most for the lease; then the other worker serves it."""
    transfer = {"connector": "nixl", "lease_s": LEASE_S}
    prompt_ids = prompt(48_300 + len(part), LONG_TOKENS)
    with with_another(fleet, third, tmp_path, transfer=transfer) as router:
        async with router.client() as client:
            begun = time.monotonic()
            await tokens(client, prompt(48_320 + len(part), LONG_TOKENS))
            took_s = time.monotonic() - begun
            assert handed_over(router) == [True]
            task = asyncio.create_task(tokens(client, prompt_ids))
            await settled(ends[PREFILL], running=1, waiting=0)
            with ExitStack() as still:
                with router.stopped():
                    await settled(ends[PREFILL], running=0, waiting=0)
                    still.enter_context(hanging(third, part))
                begun = time.monotonic()
                await eventually(lambda: router.handovers()["prefilled"] == 2, within=DEADLINE_S)
                post_action(router, "undrain", DECODE)
                # Other requests do not wait for it.
                await tokens(client, prompt(48_340 + len(part), 40))
                assert not task.done()
                completion = await task
                assert time.monotonic() - begun < LEASE_S + 2 * took_s + HELD_UP_S
                [decision] = router.decisions(1)
                assert (decision["worker"], decision["prefill_worker"]) == (DECODE, None)
                # The live decode worker releases the blocks on the prefill worker.
                await eventually(lambda: router.handovers()["released"] == 1, within=DEADLINE_S)
                await wait_freed(ends[PREFILL])
            assert router.handovers()["late_failed"] == 1
            # The worker aborts the request when it continues.
            await settled(third, running=0, waiting=0)
            await wait_freed(third)
            await wait_handed_over(router, client)
    async with client_of(ends[PREFILL]) as client:
        assert completion == await tokens(client, prompt_ids)
    await wait_freed(*ends.values(), third)


async def test_decode_worker_that_hangs_during_a_stream(
    ends: Ends, fleet: FleetConfig, third: Worker, tmp_path: Path
) -> None:
    """The stream continues later with each token once.

    New requests go to the other worker after probes mark this one as down.
    """
    prompt_ids = prompt(48_400, 1500)
    with with_another(fleet, third, tmp_path) as router:
        async with router.client() as client:
            stream = await complete(client, prompt_ids, 500, stream=True)
            ids = [*(await anext(stream)).choices[0].token_ids]
            assert router.handovers() == {"prefilled": 1, "transferred": 1}
            post_action(router, "undrain", DECODE)
            with hanging(third):
                await eventually(lambda: state_of(router, OTHER) != "up", within=2 * DOWN_S)
                await tokens(client, prompt(48_401, 1500))
                [decision] = router.decisions(1)
                assert (decision["worker"], decision["prefill_worker"]) == (DECODE, PREFILL)
            async for event in stream:
                ids += [one for choice in event.choices for one in choice.token_ids]
        assert router.handovers() == {"prefilled": 2, "transferred": 2}
    async with client_of(ends[PREFILL]) as client:
        assert ids == (await tokens(client, prompt_ids, 500)).ids
    for worker in (*ends.values(), third):
        await settled(worker, running=0, waiting=0)
        await wait_freed(worker)

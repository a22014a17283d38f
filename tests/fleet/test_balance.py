"""`explain --live` of a router with real workers names the role that is short."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from proxy.config import FleetConfig
from tests.fleet.test_handover import FREED_S, Ends, handing_over, listed, wait_freed
from tests.fleet.test_router import PATIENT
from tests.fleet.test_worker import complete, prompt
from vllm_sched.workers.connectors import DEFAULT_LEASE_S

NEITHER = "neither"
FOR_S, WITHIN_S = 5.0, 60.0
# Concurrent requests, prompt tokens and output tokens. The decode worker prefills prompts below
# `ABOVE`, and it has fewer slots than concurrent requests.
LOADS = {
    NEITHER: (1, 40, 2),
    "prefill": (6, 3000, 2),
    "decode": (40, 100, 1500),
}


@asynccontextmanager
async def under_load(client: AsyncOpenAI, name: str) -> AsyncIterator[None]:
    at_once, size, output = LOADS[name]

    async def one_after_the_other(number: int) -> None:
        for turn in range(1000):
            await complete(client, prompt(50_000 + 1000 * number + turn, size + turn), output)
            if name == NEITHER:
                await asyncio.sleep(0.5)

    tasks = [asyncio.create_task(one_after_the_other(number)) for number in range(at_once)]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError, openai.APIError):
            await asyncio.gather(*tasks)


async def explained(fleet: Path, admin: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vllm_sched.cli.main", "explain", str(fleet), "--live", admin,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


@pytest.mark.parametrize("short", LOADS)
async def test_explain_live_names_the_role_that_is_short(
    ends: Ends, fleet: FleetConfig, tmp_path: Path, short: str
) -> None:
    with handing_over(tmp_path, listed(fleet), router=PATIENT) as router:
        async with router.client() as client, under_load(client, short):
            await asyncio.sleep(FOR_S)
            async with asyncio.timeout(WITHIN_S):
                while True:
                    lines = (await explained(tmp_path / "fleet.yaml", router.admin)).splitlines()
                    named = {line.split()[1] for line in lines if line.endswith(" short")}
                    assert named <= {short}, lines
                    if named or short == NEITHER:
                        break
        side = "neither side" if short == NEITHER else short
        assert lines[-1].startswith(f"tiny: {side} is short: "), lines
        # The lease frees the blocks of prefills that the router did not wait for.
        await wait_freed(*ends.values(), within=DEFAULT_LEASE_S + FREED_S)

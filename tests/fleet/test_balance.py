"""`explain --live` of a router before real workers names the side that its load is short of."""

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
from tests.fleet.test_handover import ABOVE, Ends, connected, freed, listed
from tests.fleet.test_router import PATIENT, routing
from tests.fleet.test_worker import complete, prompt

NEITHER = "neither"
FOR_S, WITHIN_S = 5.0, 60.0
# So many at a time, tokens of each prompt and of each answer. Prompts shorter than `ABOVE` are the
# decode worker's own, and it has fewer seats than that.
LOADS = {
    NEITHER: (1, 40, 2),
    "prefill": (6, 3000, 2),
    "decode": (40, 100, 1500),
}


@asynccontextmanager
async def under(client: AsyncOpenAI, name: str) -> AsyncIterator[None]:
    """Keep so many requests going."""
    at_once, size, output = LOADS[name]

    async def one_after_the_other(number: int) -> None:
        for turn in range(1000):
            await complete(client, prompt(50_000 + 1000 * number + turn, size + turn), output)
            if name == NEITHER:
                await asyncio.sleep(0.5)

    asked = [asyncio.create_task(one_after_the_other(number)) for number in range(at_once)]
    try:
        yield
        assert not any(each.done() for each in asked)
    finally:
        for each in asked:
            each.cancel()
        with suppress(asyncio.CancelledError, openai.APIError):
            await asyncio.gather(*asked)


async def explained(fleet: Path, admin: str) -> str:
    """Ask as people do."""
    asked = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vllm_sched.cli.main", "explain", str(fleet), "--live", admin,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, _ = await asked.communicate()
    assert asked.returncode == 0
    return said.decode()


@pytest.mark.parametrize("short", LOADS)
async def test_the_side_that_is_short_is_named(
    ends: Ends, fleet: FleetConfig, tmp_path: Path, short: str
) -> None:
    rules: dict[str, object] = {"disaggregate_above": ABOVE}
    with routing(tmp_path, listed(fleet), rules, transfer="nixl", router=PATIENT) as router:
        connected(router)
        async with router.client() as client, under(client, short):
            await asyncio.sleep(FOR_S)
            async with asyncio.timeout(WITHIN_S):
                while True:
                    told = (await explained(tmp_path / "fleet.yaml", router.admin)).splitlines()
                    named = {line.split()[1] for line in told if line.endswith(" short")}
                    assert named <= {short}, told
                    if named or short == NEITHER:
                        break
    side = "neither side" if short == NEITHER else short
    assert told[-1].startswith(f"tiny: {side} is short: "), told
    for worker in ends.values():
        await freed(worker)

"""A model whose workers take one request each and never answer, so that short-lived states last.

These are tokens charged before their prefill, a pool with unequal workers, and a request that
spilled to another pool.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp

from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client, chat

MODEL = "mute"
START_TIMEOUT_S = 120.0
LEAVE_AFTER_S = 0.1


class SilentWorkers:
    """A worker for short requests, two for long ones, and clients that wait.

    With one long worker, a spilled request would have no choice.
    """

    def __init__(self) -> None:
        roles = {"mute-short": "short", "mute-long-0": "long", "mute-long-1": "long"}
        self._fakes = {name: (role, FakeWorker(name, model=MODEL)) for name, role in roles.items()}

    async def listen(self, stack: AsyncExitStack) -> str:
        """Start the workers; return their lines for a fleet file."""
        lines = []
        for name, (role, fake) in self._fakes.items():
            fake.always(scripts.stall)
            await fake.listen()
            stack.push_async_callback(fake.stop)
            lines.append(
                f'{{name: {name}, role: {role}, model: {MODEL}, url: "{fake.url}", '
                "max_requests: 1}"
            )
        return "\n".join(f"  - {line}" for line in lines)

    async def occupy(
        self, stack: AsyncExitStack, session: aiohttp.ClientSession, port: int, admin: int
    ) -> None:
        """Send three short requests; the second spills to one of two workers."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await self._are_up(session, admin):  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.1)
        for _ in self._fakes:
            client = await Client.connect(port)
            stack.callback(client.close)
            await client.send(chat(model=MODEL, stream=True))
        for _, fake in self._fakes.values():
            await fake.got(within=START_TIMEOUT_S)

    async def leave(self, port: int) -> None:
        """Send a request that waits in the queue, and leave."""
        client = await Client.connect(port)
        try:
            await client.send(chat(model=MODEL, stream=True))
            await asyncio.sleep(LEAVE_AFTER_S)
        finally:
            client.close()

    async def _are_up(self, session: aiohttp.ClientSession, admin: int) -> bool:
        async with session.get(f"http://127.0.0.1:{admin}/admin/workers") as answer:
            workers = await answer.json()
        states = [worker["state"] for worker in workers if worker["model"] == MODEL]
        return states == ["up"] * len(self._fakes)

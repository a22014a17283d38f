"""A model whose workers take a request each and never answer: moments that last.

What a fast machine is over with before anybody looks is there for as long as a test takes: tokens
charged to a worker that has yet to prefill them, a pool whose workers differ, a request that went
to another pool because its own was full.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import aiohttp

from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client, chat

MODEL = "mute"
STARTS_S = 120.0
LEAVES_S = 0.1


class Mutes:
    """One for shorts and two for longs, and who waits for them.

    Two, since who finds room on one worker alone has not spilled: that was its only choice.
    """

    def __init__(self) -> None:
        roles = {"mute-short": "short", "mute-long-0": "long", "mute-long-1": "long"}
        self._fakes = {name: (role, FakeWorker(name, model=MODEL)) for name, role in roles.items()}

    async def listen(self, stack: AsyncExitStack) -> str:
        """Be there; return the lines of a fleet file's `workers`."""
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
        """Ask for three shorts: the second finds no room where it belongs, and a choice of two."""
        async with asyncio.timeout(STARTS_S):
            while not await self._are_up(session, admin):  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.1)
        for _ in self._fakes:
            client = await Client.connect(port)
            stack.callback(client.close)
            await client.send(chat(model=MODEL, stream=True))
        for _, fake in self._fakes.values():
            await fake.got(within=STARTS_S)

    async def leave(self, port: int) -> None:
        """Ask, and leave with nothing: all have what they may, so it waits in the router."""
        client = await Client.connect(port)
        try:
            await client.send(chat(model=MODEL, stream=True))
            await asyncio.sleep(LEAVES_S)
        finally:
            client.close()

    async def _are_up(self, session: aiohttp.ClientSession, admin: int) -> bool:
        async with session.get(f"http://127.0.0.1:{admin}/admin/workers") as answer:
            workers = await answer.json()
        states = [each["state"] for each in workers if each["model"] == MODEL]
        return states == ["up"] * len(self._fakes)

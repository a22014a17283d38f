"""Routers and Prometheus beside them, and load until all questions are answered."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import aiohttp

from tests.prometheus.corners import Corners
from tests.prometheus.mute import Mutes
from tests.prometheus.server import Prometheus, process, reached
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client
from vllm_sched.workers.launch import free_port

ANSWERS_S = 120.0
PAUSE_S = 1.0  # in which Prometheus and whoever asks it have their turn


class Scene(ABC):
    """One router for shorts and longs, `split`, one for prefill and decode, `pairs`.

    Where there is to be what happens seldom, a third one, `rules`: see `corners`.
    """

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.mutes = Mutes()
        self._ports = {name: free_port() for name in ("split", "pairs", "rules")}
        self.split, self.pairs = self._ports["split"], self._ports["pairs"]
        self._corners = Corners(self._ports, folder / "rules.yaml")
        self.prometheus = Prometheus(folder, session)
        self._session = session
        self._enough = False

    async def begin(
        self,
        stack: AsyncExitStack,
        fleets: dict[str, str],
        given: Mapping[str, object],
        workers: Iterable[int],
        **environment: str,
    ) -> None:
        """Start everything but workers, which have these ports, and drain the one called `idle`.

        What is given is put into both fleet files, as are their ports, their folder, and the
        workers that are there for moments that last and for what happens seldom.
        """
        ports = {name: self._ports[name] for name in fleets}
        admins = {name: free_port() for name in ports}
        mutes, corners = await self.mutes.listen(stack), await self._corners.listen(stack)
        for name, port in ports.items():
            source, log = self.folder / f"{name}.yaml", self.folder / f"{name}.log"
            more = {"folder": self.folder, "mutes": mutes, "corners": corners[name]}
            source.write_text(fleets[name].format(**given, **more, port=port, admin=admins[name]))
            command = (sys.executable, "-m", "vllm_sched.cli.main", "router", str(source))
            await stack.enter_async_context(process(*command, log=log, **environment))
        for name, port in ports.items():
            log = self.folder / f"{name}.log"
            await reached(self._session, f"http://127.0.0.1:{port}/ready", log)
        urls = {name: f"http://127.0.0.1:{port}/admin" for name, port in admins.items()}
        if "rules" in fleets:
            await self._corners.visit(stack, self._session, urls)
        async with self._session.post(f"{urls['split']}/workers/idle/drain") as answer:
            assert answer.status == 200
        await self.mutes.occupy(stack, self._session, self.split, admins["split"])
        targets = {"router": [*ports.values()], "worker": [*workers]}
        await self.prometheus.begin(stack, targets)

    async def send(self, port: int, data: bytes, *, leave_after_s: float | None = None) -> None:
        """Ask a router once; leave early if so told."""
        client = await Client.connect(port)
        try:
            if leave_after_s is None:
                await client.ask(data, within=ANSWERS_S)
            else:
                await client.send(data)
                await asyncio.sleep(leave_after_s)
        finally:
            client.close()

    @abstractmethod
    async def once(self, number: int) -> None:
        """Ask for everything; `number` is another each time."""

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[Self]:
        """Ask again and again."""
        loading = asyncio.create_task(self._load())
        try:
            yield self
        finally:
            self._enough = True
            await loading

    async def _load(self) -> None:
        number = 0
        while not self._enough:
            await self.once(number)
            number += 1
            await asyncio.sleep(PAUSE_S)


async def fake(stack: AsyncExitStack, name: str) -> FakeWorker:
    """Start a fake worker."""
    made = FakeWorker(name)
    await made.listen()
    stack.push_async_callback(made.stop)
    return made

"""Routers and Prometheus, with load until all queries have data."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Self

import aiohttp

from tests.prometheus.rare_cases import FOR_SILENT, RareCases
from tests.prometheus.server import Prometheus, process, wait_until_ready
from tests.proxy.running import answer_of
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client
from vllm_sched.workers.launch import free_port

ANSWER_TIMEOUT_S = 120.0
PAUSE_S = 1.0  # time for Prometheus and its queries


class Scene(ABC):
    """A router for short and long requests (`split`) and one for prefill and decode (`pairs`).

    A third router, `rules`, serves rare cases: see `rare_cases`.
    """

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self.folder = folder
        self._ports = {name: free_port() for name in ("split", "pairs", "rules")}
        self.split, self.pairs = self._ports["split"], self._ports["pairs"]
        self._cases = RareCases(self._ports, folder / "rules.yaml")
        self.prometheus = Prometheus(folder, session)
        self._session = session
        self._stopping = False

    async def begin(
        self,
        stack: AsyncExitStack,
        fleets: dict[str, str],
        values: Mapping[str, object],
        workers: Iterable[int],
        **environment: str,
    ) -> None:
        """Start everything except the workers with these ports, and drain the worker `idle`.

        The fleet files are formatted with `values`, ports, folder, silent workers and rare cases.
        """
        ports = {name: self._ports[name] for name in fleets}
        admins = {name: free_port() for name in ports}
        cases = await self._cases.listen(stack)
        for name, port in ports.items():
            source, log = self.folder / f"{name}.yaml", self.folder / f"{name}.log"
            extra = {"folder": self.folder, "silent": cases["silent"], "cases": cases[name]}
            source.write_text(fleets[name].format(**values, **extra, port=port, admin=admins[name]))
            command = (sys.executable, "-m", "vllm_sched.cli.main", "router", str(source))
            await stack.enter_async_context(process(*command, log=log, **environment))
        for name, port in ports.items():
            log = self.folder / f"{name}.log"
            await wait_until_ready(self._session, f"http://127.0.0.1:{port}/ready", log)
        urls = {name: f"http://127.0.0.1:{port}/admin" for name, port in admins.items()}
        await self._cases.occupy_silent(stack, self._session, urls["split"])
        if "rules" in fleets:
            await self._cases.run(stack, self._session, urls)
        async with self._session.post(f"{urls['split']}/workers/idle/drain") as answer:
            assert answer.status == 200
        targets = {"router": [*ports.values()], "worker": [*workers]}
        await self.prometheus.begin(stack, targets)

    async def send(self, port: int, data: bytes, *, leave_after_s: float | None = None) -> None:
        if leave_after_s is None:
            await answer_of(port, data, ANSWER_TIMEOUT_S)
            return
        with closing(await Client.connect(port)) as client:
            await client.send(data)
            await asyncio.sleep(leave_after_s)

    async def leave_queue(self) -> None:
        """Send a request that waits in the queue, and leave."""
        await self.send(self.split, FOR_SILENT, leave_after_s=0.1)

    @abstractmethod
    async def send_all(self, number: int) -> None:
        """Send every kind of request; `number` differs in each call."""

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[Self]:
        loading = asyncio.create_task(self._load())
        try:
            yield self
        finally:
            self._stopping = True
            await loading

    async def _load(self) -> None:
        number = 0
        while not self._stopping:
            await self.send_all(number)
            number += 1
            await asyncio.sleep(PAUSE_S)


async def fake(stack: AsyncExitStack, name: str) -> FakeWorker:
    worker = FakeWorker(name)
    await worker.listen()
    stack.push_async_callback(worker.stop)
    return worker

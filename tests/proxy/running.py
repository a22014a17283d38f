"""Routers as started from a fleet file, before fake workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import yaml

from proxy.config import load
from proxy.setup.app import App
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Answer, Client
from tests.proxy.wire.site import eventually

DEADLINE_S = 60.0
Json = dict[str, Any]


@asynccontextmanager
async def serving(*fakes: FakeWorker) -> AsyncIterator[None]:
    """Let workers serve within the block, on free ports."""
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await fake.listen()
            stack.push_async_callback(fake.stop)
        yield


def entry(fake: FakeWorker, **fields: Any) -> Json:
    """Return a worker's entry in a fleet file."""
    return {"name": fake.name, "url": fake.url, **fields}


def write_fleet(
    folder: Path, *workers: FakeWorker | Json, router: Json | None = None, **blocks: Any
) -> Path:
    """Write a fleet file; by default the router listens on free ports and probes often."""
    listed = [entry(each) if isinstance(each, FakeWorker) else each for each in workers]
    settings = {"port": 0, "admin": {"port": 0}, "probe": {"interval_s": 0.05}} | (router or {})
    path = folder / "fleet.yaml"
    fleet = {"model": "tiny", "workers": listed, "router": settings, **blocks}
    path.write_text(yaml.safe_dump(fleet))
    return path


@asynccontextmanager
async def running(source: Path) -> AsyncIterator[App]:
    app = App(load(source), source)
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


async def wait_until_up(app: App, *names: str) -> None:
    """Wait until exactly the workers of these names are up."""

    def up() -> set[str]:
        return {worker.name for worker in app.fleet.roster if worker.up}

    await eventually(lambda: up() == set(names), up, within=DEADLINE_S)


async def answer_of(port: int, data: bytes, within: float = DEADLINE_S) -> Answer:
    """Send a request on a new connection; return the response."""
    with closing(await Client.connect(port)) as client:
        return await client.ask(data, within=within)


async def ask(app: App, data: bytes) -> int:
    """Send a request on a new connection; return its status."""
    return (await answer_of(app.wire.port, data)).status

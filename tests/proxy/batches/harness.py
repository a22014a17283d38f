"""The harness of tests of batches."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types import Batch

from proxy.batches.service import Batches
from proxy.batches.storage.store_thread import StoreThread
from proxy.config.batches import BatchesConfig
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import Call
from tests.proxy.wire.site import Site

DEADLINE_S = 30.0
CHAT = "/v1/chat/completions"
OPEN = {"idle_s": 1e9, "client_idle_s": 1e9}  # connections stay open when tests skip days
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the system's certificates take 30 ms to load
NOW, KEEP_S = 1_000_000.0, 1000.0  # of tests of the store alone
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")


class BatchHarness:
    """A router's batches and a client. Closing and opening it again restarts the router."""

    def __init__(
        self, site: Site, path: Path, database: str | None = None, **settings: Any
    ) -> None:
        self.site = site
        self.path = path
        place = {"database": database} if database else {"path": path}
        self.settings = BatchesConfig(**place, **settings)
        self.ahead = 0.0
        self.batches: Batches
        self.client: AsyncOpenAI

    def wall(self) -> float:
        """Return the time of day as batches see it."""
        return time.time() + self.ahead

    async def open(self) -> None:
        self.batches = Batches(self.site.wire, self.settings, self.wall)
        await self.batches.start()
        url = f"http://127.0.0.1:{self.site.port}/v1"
        http = DefaultAsyncHttpxClient(base_url=url, timeout=DEADLINE_S, verify=NO_TLS)
        self.client = AsyncOpenAI(
            base_url=url, api_key="theirs", max_retries=0, timeout=DEADLINE_S, http_client=http
        )

    async def close(self) -> None:
        """Stop as a router does on a signal."""
        await self.client.close()
        await self.batches.stop()

    async def reopen(self) -> None:
        await self.close()
        await self.open()

    def skip(self, seconds: float) -> None:
        """Move the clocks of batches and of the router."""
        self.ahead += seconds
        self.site.skip(seconds)
        self.batches.scheduler.wake()

    async def upload(self, lines: Iterable[object]) -> str:
        """Upload lines (text or objects); return the file's ID."""
        file = await self.client.files.create(file=("in.jsonl", content_of(lines)), purpose="batch")
        return file.id

    async def begin(self, lines: Iterable[object], **more: Any) -> Batch:
        file = await self.upload(lines)
        window: Any = more.pop("window", "24h")
        return await self.client.batches.create(
            input_file_id=file, endpoint=CHAT, completion_window=window, **more
        )

    async def begin_held(self, count: int) -> tuple[Batch, asyncio.Event]:
        """Begin a batch whose lines are at the worker until the returned event is set."""
        opening = self.site.fake.hold(scripts.answer(200, b'"well"'))
        batch = await self.begin(lines(count))
        await self.site.fake.got(count)
        return batch, opening

    async def until(self, batch: Batch, *statuses: str) -> Batch:
        """Wait until a batch has ended, or has one of these statuses."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                batch = await self.client.batches.retrieve(batch.id)
                if batch.status in statuses or (not statuses and batch.status not in ACTIVE):
                    return batch
                await asyncio.sleep(0.05)

    async def lines_of(self, file_id: str | None) -> list[Any]:
        """Return the lines of a result file; empty without a file."""
        if file_id is None:
            return []
        content = await self.client.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]


def line(custom_id: str, text: str = "hi", **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | fields


def lines(count: int, prefix: str = "r") -> list[dict[str, Any]]:
    """Return input lines whose text is their custom ID."""
    return [line(f"{prefix}{n}", f"{prefix}{n}") for n in range(count)]


def content_of(lines: Iterable[object]) -> bytes:
    """Return the content of an input file with these lines (text or objects)."""
    return "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines).encode()


def texts(calls: Sequence[Call]) -> list[str]:
    return [call.json()["messages"][0]["content"] for call in calls]


@contextmanager
def busy(store_thread: StoreThread) -> Iterator[None]:
    over = threading.Event()
    store_thread._thread.submit(over.wait, 60)
    try:
        yield
    finally:
        over.set()

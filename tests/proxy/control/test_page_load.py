"""5,000 requests a minute of 20 tokens each, through the wire, with as many pages as may be open.

Nothing is timed: whatever the machine, streams are whole and each page is told of each request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.assembly import App
from proxy.config import load
from proxy.control.live import MOST_VIEWERS
from tests.proxy.wire import scripts
from tests.proxy.wire.client import Client, chat
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.site import eventually

DEADLINE_S = 60.0
A_SECOND = 5000 / 60
SECONDS = 3
TOKENS, GAP_S = 20, 0.03


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    """Run a router before some workers."""
    async with AsyncExitStack() as stack:
        lines = []
        for name in ("a", "b", "c", "d"):
            fake = FakeWorker(name)
            await fake.listen()
            stack.push_async_callback(fake.stop)
            fake.always(scripts.stream(TOKENS, gap_s=GAP_S, with_usage=True))
            lines.append(f"  - {{name: {name}, url: '{fake.url}'}}\n")
        source = tmp_path / "fleet.yaml"
        source.write_text(
            f"model: tiny\nworkers:\n{''.join(lines)}router: {{port: 0, admin: {{port: 0}}}}\n"
        )
        running = App(load(source), source)
        await running.start()
        stack.push_async_callback(running.stop)
        await eventually(lambda: all(w.up for w in running.fleet), within=DEADLINE_S)
        yield running


class Page:
    """What one that is open has been told."""

    def __init__(self) -> None:
        self.messages = 0
        self.dropped = 0
        self.written: dict[str, int] = {}  # tokens of requests that are over

    async def follow(self, answer: aiohttp.ClientResponse) -> None:
        """Read on until nobody wants it any more."""
        fields: list[str] = []
        text = b""
        async for piece in answer.content.iter_any():
            *lines, text = (text + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: "):
                    fields = self.take(json.loads(line[6:]), fields)

    def take(self, told: dict[str, Any], fields: list[str]) -> list[str]:
        """Read an event; return what its rows are made of."""
        fields = told.get("fields", fields)
        self.messages += 1
        self.dropped += told.get("dropped", 0)
        for row in (dict(zip(fields, each, strict=True)) for each in told["rows"]):
            if row["ended"] is not None:
                self.written[row["id"]] = row["tokens"]
        return fields


async def ask(app: App, name: str) -> tuple[int, int, bool]:
    """Ask for a stream; return its status, its tokens, and whether it had an end."""
    client = await Client.connect(app.wire.port)
    try:
        asked = chat("hi", b"X-Request-Id: " + name.encode(), stream=True, max_tokens=TOKENS)
        answer = await client.ask(asked, within=DEADLINE_S)
    finally:
        client.close()
    tokens = answer.body.count(b'"content"')
    return answer.status, tokens, answer.body.endswith(b"data: [DONE]\n\n")


async def test_streams_are_whole_and_every_page_is_told_of_all(app: App) -> None:
    pages, names = [Page() for _ in range(MOST_VIEWERS)], []
    endless = aiohttp.ClientTimeout(total=None)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=endless))
        readers = []
        for page in pages:
            url = app.admin_url + "/admin/live"
            answer = await stack.enter_async_context(session.get(url))
            readers.append(asyncio.create_task(page.follow(answer)))
        await eventually(lambda: all(page.messages for page in pages), within=DEADLINE_S)

        clock = asyncio.get_running_loop().time
        began, asked = clock(), []
        while len(asked) < SECONDS * A_SECOND:
            names.append(f"r{len(asked)}")
            asked.append(asyncio.create_task(ask(app, names[-1])))
            await asyncio.sleep(max(began + len(asked) / A_SECOND - clock(), 0))
        assert set(await asyncio.gather(*asked)) == {(200, TOKENS, True)}

        want = dict.fromkeys(names, TOKENS)
        await eventually(lambda: all(page.written == want for page in pages), within=DEADLINE_S)
        assert [page.dropped for page in pages] == [0] * MOST_VIEWERS
        assert not any(reader.done() for reader in readers)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

"""Real routers of two processes, killed during a batch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
from openai import AsyncOpenAI

from tests.present import present
from tests.proxy.batches.harness import ACTIVE, CHAT, content_of, lines, texts
from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup, serving
from tests.proxy.wire import scripts

COUNT = 24


def client_of(group: RouterGroup) -> AsyncOpenAI:
    """Return the official client; each request uses a new connection, so any process."""
    http = httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0))
    url = f"http://127.0.0.1:{group.port}/v1"
    return AsyncOpenAI(base_url=url, api_key="x", max_retries=5, http_client=http)


async def wait_for_lines(client: AsyncOpenAI, batch_id: str, at_least: int) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                batch = await client.batches.retrieve(batch_id)
            except openai.APIConnectionError:
                continue  # the process was just killed
            if batch.status not in ACTIVE or present(batch.request_counts).completed >= at_least:
                return batch
            await asyncio.sleep(0.05)


async def test_each_line_has_one_result_after_kills(tmp_path: Path) -> None:
    batches = f", batches: {{path: {tmp_path / 'kept'}, concurrency: 2}}"
    async with (
        serving(tmp_path, ["a"], router=batches) as (group, fakes),
        client_of(group) as client,
    ):
        fake = fakes["a"]
        fake.then(*[scripts.obey("a")] * 5)
        fake.hold(scripts.obey("a"))
        file = await client.files.create(file=("in", content_of(lines(COUNT))), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        await wait_for_lines(client, batch.id, 5)
        await fake.got(7, within=DEADLINE_S)
        for pid in group.pids.values():  # new processes replace them
            os.kill(pid, signal.SIGKILL)
        await fake.got(9, within=DEADLINE_S)  # interrupted lines are repeated
    # The end of the block has killed all processes.
    async with (
        serving(tmp_path, ["a"], router=batches) as (group, fakes),
        client_of(group) as client,
    ):
        done = await wait_for_lines(client, batch.id, COUNT + 1)
        assert done.status == "completed"
        counts = {"total": COUNT, "completed": COUNT, "failed": 0}
        assert done.request_counts.model_dump() == counts
        results = (await client.files.content(done.output_file_id)).text.splitlines()
    assert [json.loads(text)["custom_id"] for text in results] == [f"r{n}" for n in range(COUNT)]
    assert len(texts(fakes["a"].served)) == COUNT - 5

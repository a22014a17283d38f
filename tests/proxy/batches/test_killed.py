"""Real routers of two processes, with TLS, killed in the middle of a batch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.present import present
from tests.proxy.batches.office import ACTIVE, CHAT, lines, texts
from tests.proxy.certificates import Authority
from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker

COUNT = 24
KEY = "an-admin-key-of-many-letters"


class BatchGroup(RouterGroup):
    """Keeps batches, and speaks TLS."""

    def write(self, *workers: str, routing: str = "{}") -> None:
        """Write the fleet file."""
        folder = self.file.parent
        self.authority = Authority(folder)
        port = self.authority.port("router")
        tls = f"{{cert_file: {port.cert_file}, key_file: {port.key_file}}}"
        key = folder / "admin.key"
        key.write_text(KEY)
        [worker] = workers
        self.file.write_text(
            f"model: tiny\nworkers: [{{name: a, url: 'http://127.0.0.1:{self.ports[worker]}'}}]\n"
            f"routing: {routing}\nrouter:\n  port: 0\n"
            f"  admin: {{port: 0, key_file: {key}, tls: {tls}}}\n"
            f"  processes: {self.count}\n  probe: {{interval_s: 0.05}}\n"
            f"  batches: {{path: {folder / 'kept'}, concurrency: 4}}\n"
            f"  tls: {tls}\n"
        )

    async def worker(self) -> FakeWorker:
        """Start its worker."""
        fake = FakeWorker("a")
        [fake.port] = self.ports.values()
        await fake.listen()
        return fake

    def client(self) -> AsyncOpenAI:
        """Make the official client, with a connection for each question: any process may answer."""
        limits = httpx.Limits(max_keepalive_connections=0)
        http = httpx.AsyncClient(verify=self.authority.client(), limits=limits)
        url = f"https://127.0.0.1:{self.port}/v1"
        return AsyncOpenAI(base_url=url, api_key="x", max_retries=5, http_client=http)


@pytest.fixture
async def groups(tmp_path: Path) -> AsyncIterator[list[BatchGroup]]:
    """Start one, and have room for more."""
    made = [await asyncio.to_thread(BatchGroup, tmp_path, ["a"])]
    yield made
    for group in made:
        await asyncio.to_thread(group.close)


async def seen(client: AsyncOpenAI, batch_id: str, at_least: int) -> Any:
    """Wait until a batch is over, or so many of its lines are done."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                batch = await client.batches.retrieve(batch_id)
            except openai.APIConnectionError:
                continue  # it went to a process that was just killed
            if batch.status not in ACTIVE or present(batch.request_counts).completed >= at_least:
                return batch
            await asyncio.sleep(0.05)


async def admin_statuses(group: BatchGroup) -> list[int]:
    """Ask the admin API with its key and without."""
    async with httpx.AsyncClient(verify=group.authority.client()) as client:
        url = f"{group.admin}/admin/workers"
        answers = [
            await client.get(url, headers=headers)
            for headers in ({"Authorization": f"Bearer {KEY}"}, {})
        ]
    return [answer.status_code for answer in answers]


async def serial(group: BatchGroup) -> str:
    """Return the number of the certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", group.port, ssl=group.authority.client())
    shown = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.close()
    await writer.wait_closed()
    return str(shown)


async def renewed(group: BatchGroup) -> None:
    """Have the certificate renewed, and wait until every process shows the new one."""
    before = await serial(group)
    group.authority.issue("router")
    group.send_signal(signal.SIGHUP)
    news = 0
    async with asyncio.timeout(DEADLINE_S):
        while news < 12:  # in a row: the kernel says which process gets a connection
            news = news + 1 if await serial(group) != before else 0


async def test_each_line_has_one_result_whoever_is_killed(
    groups: list[BatchGroup], tmp_path: Path
) -> None:
    [first] = groups
    fake = await first.worker()
    opening = asyncio.Event()
    fake.then(*[scripts.obey("a")] * 5)
    fake.always(scripts.gated(opening, scripts.obey("a")))
    window: Any = "1h"
    async with first.client() as client:
        content = "\n".join(map(json.dumps, lines(COUNT))).encode()
        file = await client.files.create(file=("in", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window=window
        )
        await seen(client, batch.id, 5)
        await fake.got(9, within=DEADLINE_S)
        for pid in first.pids.values():  # those that serve: others take their place
            os.kill(pid, signal.SIGKILL)
        await fake.got(13, within=DEADLINE_S)  # the lines that were cut are asked again
    assert await admin_statuses(first) == [200, 401]
    await renewed(first)
    await asyncio.to_thread(first.close)  # all of it, and nobody is told
    await fake.stop()
    second = await asyncio.to_thread(BatchGroup, tmp_path, ["a"])
    groups.append(second)
    after = await second.worker()
    async with second.client() as client:
        done = await seen(client, batch.id, COUNT + 1)
        assert done.status == "completed"
        assert done.request_counts.model_dump() == {"total": COUNT, "completed": COUNT, "failed": 0}
        results = (await client.files.content(done.output_file_id)).text.splitlines()
    assert [json.loads(each)["custom_id"] for each in results] == [f"r{n}" for n in range(COUNT)]
    assert len(texts(after.served)) == COUNT - 5
    await after.stop()

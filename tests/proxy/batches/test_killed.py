"""Real routers of two processes, with TLS, killed during a batch."""

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
from tests.proxy.batches.harness import ACTIVE, CHAT, lines, texts
from tests.proxy.certificates import Authority
from tests.proxy.processes.router_group import DEADLINE_S, RouterGroup
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker

COUNT = 24
KEY = "an-admin-key-of-many-letters"


class BatchGroup(RouterGroup):
    """A group with batches and TLS."""

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
        """Start the worker."""
        fake = FakeWorker("a")
        [fake.port] = self.ports.values()
        await fake.listen()
        return fake

    def client(self) -> AsyncOpenAI:
        """Return the official client; each request uses a new connection, so any process."""
        limits = httpx.Limits(max_keepalive_connections=0)
        http = httpx.AsyncClient(verify=self.authority.client(), limits=limits)
        url = f"https://127.0.0.1:{self.port}/v1"
        return AsyncOpenAI(base_url=url, api_key="x", max_retries=5, http_client=http)


@pytest.fixture
async def groups(tmp_path: Path) -> AsyncIterator[list[BatchGroup]]:
    """Return a list with one started group; tests may add more."""
    groups = [await asyncio.to_thread(BatchGroup, tmp_path, ["a"])]
    yield groups
    for group in groups:
        await asyncio.to_thread(group.close)


async def wait_for_lines(client: AsyncOpenAI, batch_id: str, at_least: int) -> Any:
    """Wait until a batch has ended or has this number of completed lines."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                batch = await client.batches.retrieve(batch_id)
            except openai.APIConnectionError:
                continue  # the process was just killed
            if batch.status not in ACTIVE or present(batch.request_counts).completed >= at_least:
                return batch
            await asyncio.sleep(0.05)


async def admin_statuses(group: BatchGroup) -> list[int]:
    """Return the statuses of the admin API with and without its key."""
    async with httpx.AsyncClient(verify=group.authority.client()) as client:
        url = f"{group.admin}/admin/workers"
        answers = [
            await client.get(url, headers=headers)
            for headers in ({"Authorization": f"Bearer {KEY}"}, {})
        ]
    return [answer.status_code for answer in answers]


async def certificate_serial(group: BatchGroup) -> str:
    """Return the serial number of the certificate on a new connection."""
    _, writer = await asyncio.open_connection("127.0.0.1", group.port, ssl=group.authority.client())
    number = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.close()
    await writer.wait_closed()
    return str(number)


async def renew_certificate(group: BatchGroup) -> None:
    """Renew the certificate, and wait until every process uses it."""
    before = await certificate_serial(group)
    group.authority.issue("router")
    group.send_signal(signal.SIGHUP)
    renewed = 0
    async with asyncio.timeout(DEADLINE_S):
        while renewed < 12:  # in a row, since the kernel chooses the process
            renewed = renewed + 1 if await certificate_serial(group) != before else 0


async def test_each_line_has_one_result_after_kills(
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
        await wait_for_lines(client, batch.id, 5)
        await fake.got(9, within=DEADLINE_S)
        for pid in first.pids.values():  # new processes replace them
            os.kill(pid, signal.SIGKILL)
        await fake.got(13, within=DEADLINE_S)  # interrupted lines are repeated
    assert await admin_statuses(first) == [200, 401]
    await renew_certificate(first)
    await asyncio.to_thread(first.close)  # kills all processes
    await fake.stop()
    second = await asyncio.to_thread(BatchGroup, tmp_path, ["a"])
    groups.append(second)
    after = await second.worker()
    async with second.client() as client:
        done = await wait_for_lines(client, batch.id, COUNT + 1)
        assert done.status == "completed"
        assert done.request_counts.model_dump() == {"total": COUNT, "completed": COUNT, "failed": 0}
        results = (await client.files.content(done.output_file_id)).text.splitlines()
    assert [json.loads(text)["custom_id"] for text in results] == [f"r{n}" for n in range(COUNT)]
    assert len(texts(after.served)) == COUNT - 5
    await after.stop()

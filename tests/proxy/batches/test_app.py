"""Batches in a whole router, from a fleet file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from proxy.app import App
from proxy.config import load, parse
from proxy.errors import ConfigError, ProxyError
from tests.present import present
from tests.proxy.batches.harness import ACTIVE, CHAT, content_of, lines
from tests.proxy.test_app import wait_until_up
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker

DEADLINE_S = 60.0


def write_fleet(path: Path, url: str, batches: str) -> str:
    """Write a fleet file; return its text."""
    text = (
        f"model: tiny\nworkers: [{{name: a, url: '{url}'}}]\n"
        "router: {port: 0, admin: {port: 0}, drain_s: 0.0, probe: {interval_s: 0.05}, "
        f"batches: {batches}}}\n"
    )
    path.write_text(text)
    return text


async def test_new_router_continues_batches(tmp_path: Path) -> None:
    fake = FakeWorker("a")
    await fake.listen()
    source = tmp_path / "fleet.yaml"
    write_fleet(source, fake.url, f"{{path: {tmp_path / 'kept'}, concurrency: 4}}")
    first = App(load(source), source)
    await first.start()
    await wait_until_up(first, "a")
    fake.then(scripts.obey("a"))
    fake.always(scripts.stall)
    async with AsyncOpenAI(base_url=f"{first.url}/v1", api_key="x", max_retries=0) as client:
        file = await client.files.create(file=("in", content_of(lines(10))), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        await fake.got(5, within=DEADLINE_S)
    await first.drain()
    fake.always(scripts.obey("a"))
    second = App(load(source), source)
    await second.start()
    async with AsyncOpenAI(base_url=f"{second.url}/v1", api_key="x", max_retries=0) as client:
        async with asyncio.timeout(DEADLINE_S):
            while (  # noqa: ASYNC110 - the API has no event
                done := await client.batches.retrieve(batch.id)
            ).status in ACTIVE:
                await asyncio.sleep(0.02)
        assert done.status == "completed"
        results = (await client.files.content(done.output_file_id or "")).text.splitlines()
    assert [json.loads(text)["custom_id"] for text in results] == [f"r{n}" for n in range(10)]
    write_fleet(source, fake.url, f"{{path: {tmp_path / 'elsewhere'}, max_lines: 7}}")
    assert await second.reload() == ["router.batches.path"]
    assert present(second.batches).scheduler.settings.max_lines == 7
    await second.stop()
    await fake.stop()


async def test_unusable_folder_fails_the_start(tmp_path: Path) -> None:
    source = tmp_path / "fleet.yaml"
    write_fleet(source, "http://127.0.0.1:9", f"{{path: {source}}}")
    app = App(load(source), source)
    with pytest.raises(ProxyError, match=r"router\.batches\.path"):
        await app.start()
    await app.stop()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ("{path: x, database: 'postgresql://h/d'}", ": path is given too"),
        ("{path: x, database_password_file: x}", "_password_file: has no effect without database"),
        ("{database: 'mysql://u:secret@h/d'}", r": 'mysql://\*\*\*@h/d': write it as"),
    ],
)
def test_store_is_a_folder_or_a_database(tmp_path: Path, batches: str, message: str) -> None:
    text = write_fleet(tmp_path / "x", "http://127.0.0.1:9", batches)
    with pytest.raises(ConfigError, match=rf"router\.batches\.database{message}") as caught:
        parse(text, "x")
    assert "secret" not in str(caught.value)


def test_max_file_bytes_must_fit_into_max_body_bytes(tmp_path: Path) -> None:
    text = write_fleet(tmp_path / "x", "http://127.0.0.1:9", "{path: x, max_file_bytes: 67108864}")
    with pytest.raises(ConfigError, match=r"router\.batches\.max_file_bytes: 67108864: a file"):
        parse(text, "x")
    parse(text.replace("path: x, ", ""), "x")  # without a path, batches are off

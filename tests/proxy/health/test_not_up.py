"""Workers that are not up, and the reasons shown to operators."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from proxy.config import load
from proxy.setup.app import App
from tests.proxy.metrics.scraped import scraped
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Client, chat
from tests.proxy.wire.site import eventually
from vllm_sched.workers.launch import free_port

DEADLINE_S = 60.0
NO_RESPONSE = "GET /health: no response in time"
WRONG_MODEL = "serves llama, not tiny"


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    """Run a router with a worker that refuses, one that hangs, and one with another model."""
    async with AsyncExitStack() as stack:
        hung, other = FakeWorker("hung"), FakeWorker("other", model="llama")
        for fake in (hung, other):
            await fake.listen()
            stack.push_async_callback(fake.stop)
        hung.always(scripts.stall, "/health")
        urls = {"refused": f"http://127.0.0.1:{free_port()}", "hung": hung.url, "other": other.url}
        source = tmp_path / "fleet.yaml"
        source.write_text(
            "model: tiny\nworkers:\n"
            + "".join(f"  - {{name: {name}, url: '{url}'}}\n" for name, url in urls.items())
            + "router: {port: 0, admin: {port: 0}, probe: {interval_s: 0.05, timeout_s: 0.5}}\n"
        )
        running = App(load(source), source)
        await running.start()
        stack.push_async_callback(running.stop)
        await eventually(
            lambda: all(worker.not_served_because for worker in running.fleet.roster),
            within=DEADLINE_S,
        )
        yield running


@pytest.fixture
async def web(app: App) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session to the admin port."""
    timeout = aiohttp.ClientTimeout(DEADLINE_S)
    async with aiohttp.ClientSession(app.admin_url, timeout=timeout) as session:
        yield session


def up(app: App) -> dict[str, str]:
    """Return the `proxy_worker_up` of each worker."""
    lines = scraped(app.metrics).splitlines()
    found = [line for line in lines if line.startswith("proxy_worker_up{")]
    return {line.split('worker="')[1].split('"')[0]: line[-1] for line in found}


async def test_admin_shows_why_workers_are_not_up(app: App, web: aiohttp.ClientSession) -> None:
    async with web.get("/admin/workers") as answer:
        workers = {worker["name"]: worker for worker in await answer.json()}
    assert {name: worker["state"] for name, worker in workers.items()} == {
        "refused": "down", "hung": "down", "other": "wrong_model",
    }  # fmt: skip
    assert "GET /health" in workers["refused"]["why"]
    assert workers["refused"]["why"] != NO_RESPONSE
    assert workers["hung"]["why"] == NO_RESPONSE
    assert workers["other"]["why"] == WRONG_MODEL
    assert up(app) == dict.fromkeys(workers, "0")
    async with web.post("/admin/explain", json={"prompt_tokens": 10}) as answer:
        explained = await answer.json()
    notes = {score["worker"]: score["note"] for score in explained["scores"]}
    assert explained["status"] == 503
    assert notes["refused"].startswith("down: GET /health")
    assert notes["hung"] == f"down: {NO_RESPONSE}"
    assert notes["other"] == WRONG_MODEL
    assert len(notes) == len(app.fleet.roster)
    async with web.get("/admin/live") as events:
        async for line in events.content:
            if not line.startswith(b"data: "):
                continue
            if (state := json.loads(line[6:]).get("state")) is not None:
                break
    shown = {w["name"]: (w["state"], w["why"]) for w in state["workers"]}
    assert shown["other"] == ("wrong_model", WRONG_MODEL)
    assert shown["hung"] == ("down", NO_RESPONSE)
    client = await Client.connect(app.wire.port)
    try:  # the worker serves the model that it lists
        assert (await client.ask(chat(model="llama"), within=DEADLINE_S)).status == 200
        assert (await client.ask(chat(), within=DEADLINE_S)).status == 503
    finally:
        client.close()

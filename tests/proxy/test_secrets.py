"""No key is in anything that a router says: answers, pages, metrics, events, its log."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.app import App
from proxy.config import load
from proxy.telemetry.log_writer import LogWriter
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.site import eventually

WORKERS, TENANTS, ADMINS, STRANGERS, ADDED = KEYS = tuple(
    f"sk-{whose}-0123456789abcdef" for whose in ("worker", "tenant", "admin", "stranger", "added")
)
FLEET = """
model: tiny
workers: [{{name: a, url: "{url}", api_key: {workers}}}]
tenants: [{{name: them, keys_file: {folder}/tenant.key, explain: true}}]
router:
  port: 0
  admin: {{port: 0, key_file: {folder}/admin.key}}
  probe: {{interval_s: 0.05}}
  logs: {{requests: true, level: debug, format: json}}
  batches: {{path: {folder}/batches}}
"""
CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ODD = (
    {**HI, "model": "huge"},
    {**HI, "kv_transfer_params": {}},
    {**HI, "max_tokens": 1 << 40},
    {"messages": 1},
)
SHOWN = ("/v1/models", "/metrics", "/health", "/ready", "/v1/files", "/v1/batches", "/nothing")
ADMIN = (
    "/", "/openapi.json", "/admin/workers", "/admin/decisions", "/admin/config", "/admin/balance",
    "/admin/logs", "/admin/nothing",
)  # fmt: skip


class Ear:
    """Hears all that a router says."""

    def __init__(self, app: App, session: aiohttp.ClientSession) -> None:
        self.app, self.session = app, session
        self.said: dict[str, str] = {}
        self.statuses: set[int] = set()

    async def ask(self, method: str, url: str, key: str, **given: Any) -> str:
        """Ask, and keep what was said to it."""
        headers = {"Authorization": f"Bearer {key}", "X-Explain": "1"}
        async with self.session.request(method, url, headers=headers, **given) as answer:
            try:
                text = await answer.text()
            except aiohttp.ClientPayloadError:
                text = ""
        self.statuses.add(answer.status)
        self.said[f"{method} {url} {len(self.said)}"] = f"{answer.raw_headers!r}\n{text}"
        return text

    async def follow(self, url: str, key: str, until: bytes) -> None:
        """Listen to events until something was said."""
        heard = b""
        headers = {"Authorization": f"Bearer {key}"}
        async with self.session.get(url, headers=headers) as answer:
            while until not in heard:
                heard += await answer.content.readany()
        self.said[f"GET {url}"] = heard.decode()


@pytest.fixture
async def fake() -> AsyncIterator[FakeWorker]:
    """Start a worker."""
    fake = FakeWorker("a", model="tiny")
    await fake.listen()
    yield fake
    await fake.stop()


async def test_no_key_is_in_anything_that_a_router_says(fake: FakeWorker, tmp_path: Path) -> None:
    (tmp_path / "tenant.key").write_text(TENANTS)
    (tmp_path / "admin.key").write_text(ADMINS)
    source = tmp_path / "fleet.yaml"
    source.write_text(FLEET.format(url=fake.url, workers=WORKERS, folder=tmp_path))
    level = logging.getLogger().level
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    app = App(load(source), source)
    app.logs.writer = LogWriter(log)
    app.logs.take_over()
    await app.start()
    try:
        await eventually(lambda: all(worker.up for worker in app.fleet.roster), within=60.0)
        async with aiohttp.ClientSession() as session:
            ear = Ear(app, session)
            await clients(ear, fake)
            await operators(ear, fake.url)
    finally:
        await app.stop()
        os.close(log)
        logging.getLogger().setLevel(level)
    assert {200, 400, 401, 404, 409, 422, 502} <= ear.statuses
    ear.said["the log"] = (tmp_path / "log").read_text()
    assert ear.said["the log"].count('"status":') > 10
    told = {(what, key) for what, text in ear.said.items() for key in KEYS if key in text}
    assert not told


async def clients(ear: Ear, fake: FakeWorker) -> None:
    """Ask as clients do, rightly and wrongly, of a worker that is well or not."""
    chat = ear.app.url + CHAT
    answered = await ear.ask("POST", chat, TENANTS, json=HI)
    assert "choices" in answered
    assert fake.served[-1].all(b"authorization") == [f"Bearer {WORKERS}".encode()]
    for script in (scripts.error(401), scripts.error(500), scripts.reset, scripts.raw(b"what?")):
        fake.then(script)
        await ear.ask("POST", chat, TENANTS, json=HI)
    for body in ODD:
        await ear.ask("POST", chat, TENANTS, json=body)
    await ear.ask("POST", chat, TENANTS, data=b"{")
    for key in (STRANGERS, ADMINS, WORKERS):
        await ear.ask("POST", chat, key, json=HI)
    for path in SHOWN:
        await ear.ask("GET", ear.app.url + path, TENANTS)


async def operators(ear: Ear, url: str) -> None:
    """Ask as operators do."""
    at = ear.app.admin_url
    for path in ADMIN:
        await ear.ask("GET", at + path, ADMINS)
        await ear.ask("GET", at + path, STRANGERS)
    await ear.follow(f"{at}/admin/live", ADMINS, b"\n\n")
    for more in ({}, {"key": STRANGERS}, {"model": STRANGERS[:2]}):
        await ear.ask("POST", f"{at}/admin/explain", ADMINS, json={"prompt_tokens": 10, **more})
    worker = {"name": "b", "url": "http://127.0.0.1:9", "api_key": ADDED}
    wrong = ({"api_key": [ADDED]}, {"apikey": ADDED}, {"url": url}, {"role": "none"}, {})
    for more in ({}, *wrong):
        await ear.ask("POST", f"{at}/admin/workers", ADMINS, json={**worker, **more})
    await ear.ask("POST", f"{at}/admin/workers", ADMINS, data=f'{{"api_key": "{ADDED}"')
    await ear.ask("GET", f"{at}/admin/workers", ADMINS)
    await ear.ask("GET", f"{at}/admin/config", ADMINS)
    await ear.ask("POST", f"{at}/admin/reload", ADMINS)

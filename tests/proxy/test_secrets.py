"""No key appears in responses, pages, metrics, events or logs of a router."""

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
    f"sk-{owner}-0123456789abcdef" for owner in ("worker", "tenant", "admin", "stranger", "added")
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
INVALID_BODIES = (
    {**HI, "model": "huge"},
    {**HI, "kv_transfer_params": {}},
    {**HI, "max_tokens": 1 << 40},
    {"messages": 1},
)
CLIENT_PATHS = (
    "/v1/models",
    "/metrics",
    "/health",
    "/ready",
    "/v1/files",
    "/v1/batches",
    "/nothing",
)
ADMIN_PATHS = (
    "/", "/openapi.json", "/admin/workers", "/admin/decisions", "/admin/config", "/admin/balance",
    "/admin/logs", "/admin/nothing",
)  # fmt: skip


class Recorder:
    """Records everything that a router returns."""

    def __init__(self, app: App, session: aiohttp.ClientSession) -> None:
        self.app, self.session = app, session
        self.outputs: dict[str, str] = {}
        self.statuses: set[int] = set()

    async def ask(self, method: str, url: str, key: str, **options: Any) -> str:
        """Send a request; record its response."""
        headers = {"Authorization": f"Bearer {key}", "X-Explain": "1"}
        async with self.session.request(method, url, headers=headers, **options) as answer:
            try:
                text = await answer.text()
            except aiohttp.ClientPayloadError:
                text = ""
        self.statuses.add(answer.status)
        self.outputs[f"{method} {url} {len(self.outputs)}"] = f"{answer.raw_headers!r}\n{text}"
        return text

    async def follow(self, url: str, key: str, until: bytes) -> None:
        """Record events until some bytes were received."""
        received = b""
        headers = {"Authorization": f"Bearer {key}"}
        async with self.session.get(url, headers=headers) as answer:
            while until not in received:
                received += await answer.content.readany()
        self.outputs[f"GET {url}"] = received.decode()


@pytest.fixture
async def fake() -> AsyncIterator[FakeWorker]:
    """Start a worker."""
    fake = FakeWorker("a", model="tiny")
    await fake.listen()
    yield fake
    await fake.stop()


async def test_no_output_contains_a_key(fake: FakeWorker, tmp_path: Path) -> None:
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
        await eventually(lambda: all(worker.up for worker in app.fleet), within=60.0)
        async with aiohttp.ClientSession() as session:
            recorder = Recorder(app, session)
            await send_client_requests(recorder, fake)
            await send_admin_requests(recorder, fake.url)
    finally:
        await app.stop()
        os.close(log)
        logging.getLogger().setLevel(level)
    assert {200, 400, 401, 404, 409, 422, 502} <= recorder.statuses
    recorder.outputs["the log"] = (tmp_path / "log").read_text()
    assert recorder.outputs["the log"].count('"status":') > 10
    leaks = {
        (output, key) for output, text in recorder.outputs.items() for key in KEYS if key in text
    }
    assert not leaks


async def send_client_requests(recorder: Recorder, fake: FakeWorker) -> None:
    """Send valid and invalid client requests, to healthy and failing workers."""
    chat = recorder.app.url + CHAT
    answered = await recorder.ask("POST", chat, TENANTS, json=HI)
    assert "choices" in answered
    assert fake.served[-1].all(b"authorization") == [f"Bearer {WORKERS}".encode()]
    for script in (scripts.error(401), scripts.error(500), scripts.reset, scripts.raw(b"what?")):
        fake.then(script)
        await recorder.ask("POST", chat, TENANTS, json=HI)
    for body in INVALID_BODIES:
        await recorder.ask("POST", chat, TENANTS, json=body)
    await recorder.ask("POST", chat, TENANTS, data=b"{")
    for key in (STRANGERS, ADMINS, WORKERS):
        await recorder.ask("POST", chat, key, json=HI)
    for path in CLIENT_PATHS:
        await recorder.ask("GET", recorder.app.url + path, TENANTS)


async def send_admin_requests(recorder: Recorder, url: str) -> None:
    """Send requests to the admin API."""
    admin = recorder.app.admin_url
    for path in ADMIN_PATHS:
        await recorder.ask("GET", admin + path, ADMINS)
        await recorder.ask("GET", admin + path, STRANGERS)
    await recorder.follow(f"{admin}/admin/live", ADMINS, b"\n\n")
    for more in ({}, {"key": STRANGERS}, {"model": STRANGERS[:2]}):
        await recorder.ask(
            "POST", f"{admin}/admin/explain", ADMINS, json={"prompt_tokens": 10, **more}
        )
    worker = {"name": "b", "url": "http://127.0.0.1:9", "api_key": ADDED}
    wrong = ({"api_key": [ADDED]}, {"apikey": ADDED}, {"url": url}, {"role": "none"}, {})
    for more in ({}, *wrong):
        await recorder.ask("POST", f"{admin}/admin/workers", ADMINS, json={**worker, **more})
    await recorder.ask("POST", f"{admin}/admin/workers", ADMINS, data=f'{{"api_key": "{ADDED}"')
    await recorder.ask("GET", f"{admin}/admin/workers", ADMINS)
    await recorder.ask("GET", f"{admin}/admin/config", ADMINS)
    await recorder.ask("POST", f"{admin}/admin/reload", ADMINS)

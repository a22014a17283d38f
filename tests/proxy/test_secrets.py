"""No key is in any output of the router: responses, pages, metrics, events, the log."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import aiohttp

from proxy.app import App
from proxy.config import load
from proxy.telemetry.log_writer import LogWriter
from tests.proxy.running import entry, serving, wait_until_up, write_fleet
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker

WORKER_KEY, TENANT_KEY, ADMIN_KEY, STRANGER_KEY, ADDED_KEY = KEYS = tuple(
    f"sk-{owner}-0123456789abcdef" for owner in ("worker", "tenant", "admin", "stranger", "added")
)
CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
INVALID = (
    {**HI, "model": "huge"},
    {**HI, "kv_transfer_params": {}},
    {**HI, "max_tokens": 1 << 40},
    {"messages": 1},
)
CLIENT_PATHS = (
    "/v1/models", "/metrics", "/health", "/ready", "/v1/files", "/v1/batches", "/nothing",
)  # fmt: skip
ADMIN_PATHS = (
    "/", "/openapi.json", "/admin/workers", "/admin/decisions", "/admin/config", "/admin/balance",
    "/admin/logs", "/admin/nothing",
)  # fmt: skip


class Recorder:
    """Sends requests and records all output of a router."""

    def __init__(self, app: App, session: aiohttp.ClientSession) -> None:
        self.app, self.session = app, session
        self.output: dict[str, str] = {}
        self.statuses: set[int] = set()

    async def send(self, method: str, url: str, key: str, **options: Any) -> str:
        headers = {"Authorization": f"Bearer {key}", "X-Explain": "1"}
        async with self.session.request(method, url, headers=headers, **options) as answer:
            try:
                text = await answer.text()
            except aiohttp.ClientPayloadError:
                text = ""
        self.statuses.add(answer.status)
        self.output[f"{method} {url} {len(self.output)}"] = f"{answer.raw_headers!r}\n{text}"
        return text

    async def follow(self, url: str, key: str, until: bytes) -> None:
        """Record events until one contains `until`."""
        received = b""
        headers = {"Authorization": f"Bearer {key}"}
        async with self.session.get(url, headers=headers) as answer:
            while until not in received:
                received += await answer.content.readany()
        self.output[f"GET {url}"] = received.decode()


async def test_no_key_is_in_any_output_of_the_router(tmp_path: Path) -> None:
    fake = FakeWorker("a")
    (tmp_path / "tenant.key").write_text(TENANT_KEY)
    (tmp_path / "admin.key").write_text(ADMIN_KEY)
    level = logging.getLogger().level
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    async with serving(fake):
        source = write_fleet(
            tmp_path,
            entry(fake, api_key=WORKER_KEY),
            tenants=[{"name": "them", "keys_file": str(tmp_path / "tenant.key"), "explain": True}],
            router={
                "admin": {"port": 0, "key_file": str(tmp_path / "admin.key")},
                "logs": {"requests": True, "level": "debug", "format": "json"},
                "batches": {"path": str(tmp_path / "batches")},
            },
        )
        app = App(load(source), source)
        app.logs.writer = LogWriter(log)
        app.logs.take_over()
        await app.start()
        try:
            await wait_until_up(app, "a")
            async with aiohttp.ClientSession() as session:
                recorder = Recorder(app, session)
                await send_as_client(recorder, fake)
                await send_as_operator(recorder, fake.url)
        finally:
            await app.stop()
            os.close(log)
            logging.getLogger().setLevel(level)
    assert {200, 400, 401, 404, 409, 422, 502} <= recorder.statuses
    recorder.output["the log"] = (tmp_path / "log").read_text()
    assert recorder.output["the log"].count('"status":') > 10
    leaks = {(name, key) for name, text in recorder.output.items() for key in KEYS if key in text}
    assert not leaks


async def send_as_client(recorder: Recorder, fake: FakeWorker) -> None:
    """Send valid and invalid client requests to a working and a failing worker."""
    chat = recorder.app.url + CHAT
    text = await recorder.send("POST", chat, TENANT_KEY, json=HI)
    assert "choices" in text
    assert fake.served[-1].all(b"authorization") == [f"Bearer {WORKER_KEY}".encode()]
    for script in (scripts.error(401), scripts.error(500), scripts.reset, scripts.raw(b"what?")):
        fake.then(script)
        await recorder.send("POST", chat, TENANT_KEY, json=HI)
    for body in INVALID:
        await recorder.send("POST", chat, TENANT_KEY, json=body)
    await recorder.send("POST", chat, TENANT_KEY, data=b"{")
    for key in (STRANGER_KEY, ADMIN_KEY, WORKER_KEY):
        await recorder.send("POST", chat, key, json=HI)
    for path in CLIENT_PATHS:
        await recorder.send("GET", recorder.app.url + path, TENANT_KEY)


async def send_as_operator(recorder: Recorder, url: str) -> None:
    """Send valid and invalid admin requests."""
    admin = f"{recorder.app.admin_url}/admin"
    for path in ADMIN_PATHS:
        await recorder.send("GET", recorder.app.admin_url + path, ADMIN_KEY)
        await recorder.send("GET", recorder.app.admin_url + path, STRANGER_KEY)
    await recorder.follow(f"{admin}/live", ADMIN_KEY, b"\n\n")
    for fields in ({}, {"key": STRANGER_KEY}, {"model": STRANGER_KEY[:2]}):
        question = {"prompt_tokens": 10, **fields}
        await recorder.send("POST", f"{admin}/explain", ADMIN_KEY, json=question)
    worker = {"name": "b", "url": "http://127.0.0.1:9", "api_key": ADDED_KEY}
    invalid = ({"api_key": [ADDED_KEY]}, {"apikey": ADDED_KEY}, {"url": url}, {"role": "none"}, {})
    for fields in ({}, *invalid):
        await recorder.send("POST", f"{admin}/workers", ADMIN_KEY, json={**worker, **fields})
    no_json = f'{{"api_key": "{ADDED_KEY}"'
    await recorder.send("POST", f"{admin}/workers", ADMIN_KEY, data=no_json)
    for path in ("workers", "config"):
        await recorder.send("GET", f"{admin}/{path}", ADMIN_KEY)
    await recorder.send("POST", f"{admin}/reload", ADMIN_KEY)

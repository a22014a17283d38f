"""The status page and its events."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.admin.status_routes import page_file
from proxy.setup.app import App
from proxy.status_page.live import MAX_VIEWERS
from proxy.wire.exchange.request_record import RequestRecord
from tests.proxy.running import answer_of, ask, running, serving, wait_until_up, write_fleet
from tests.proxy.wire import scripts
from tests.proxy.wire.fake_worker import FakeWorker
from tests.proxy.wire.raw_client import Answer, Client, chat, get
from tests.proxy.wire.site import eventually

DEADLINE_S = 30.0


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    fake = FakeWorker("w0")
    fake.always(scripts.stream(5, gap_s=0.03))
    async with serving(fake), running(write_fleet(tmp_path, fake)) as app:
        await wait_until_up(app, "w0")
        yield app


@pytest.fixture
async def web() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as session:
        yield session


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in answer.content:
        if line.startswith(b"event: "):
            name = line[7:].decode().strip()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])


async def test_page_has_a_strict_content_security_policy(
    app: App, web: aiohttp.ClientSession
) -> None:
    for path in ("/", "/status"):
        async with web.get(app.admin_url + path) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/html"
            policy = answer.headers["Content-Security-Policy"]
            text = await answer.text()
        assert "unsafe" not in policy
        parts = {"default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"}
        assert parts < set(policy.split("; "))
        for kind in ("script", "style"):
            [inner] = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy


def test_page_fetches_nothing_and_builds_no_html() -> None:
    text, _ = page_file()
    assert not re.findall(r"https?:|src=|@import|url\(", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
    assert 'style="' not in text  # the policy would refuse it
    assert not re.findall(r"\son\w+=", text)


async def test_events_show_a_request(app: App, web: aiohttp.ClientSession) -> None:
    async with web.get(app.admin_url + "/admin/live") as answer:
        assert answer.content_type == "text/event-stream"
        stream_of_events = events(answer)
        name, first = await anext(stream_of_events)
        assert name == "all"
        assert [w["name"] for w in first["state"]["workers"]] == ["w0"]
        assert app.metrics.live is app.live.recorder
        assert await ask(app, chat(stream=True)) == 200
        fields, ticks = first["fields"], []
        async for _, data in stream_of_events:
            ticks += [at for tick in data["ticks"] for at in tick[1:]]
            rows = [dict(zip(fields, row, strict=True)) for row in data["rows"]]
            if rows and rows[-1]["ended"] is not None:
                break
    assert (rows[-1]["worker"], rows[-1]["status"], rows[-1]["pool"]) == ("w0", 200, "general")
    assert ticks == sorted(ticks)
    assert 2 <= len(ticks) <= 6
    await eventually(lambda: app.metrics.live is None, within=DEADLINE_S)


async def test_events_are_refused_to_other_sites_and_too_many_viewers(
    app: App, web: aiohttp.ClientSession
) -> None:
    url = app.admin_url + "/admin/live"
    for name, value in (
        ("Host", "evil.example"),
        ("Origin", "http://evil.example"),
        ("Sec-Fetch-Site", "cross-site"),
    ):
        async with web.get(url, headers={name: value}) as answer:
            assert answer.status == 403
    viewers = [await web.get(url) for _ in range(MAX_VIEWERS)]
    async with web.get(url) as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "too_many_viewers"
    for viewer in viewers:
        viewer.close()
    await eventually(lambda: not app.live._viewers, within=DEADLINE_S)


def record_requests(app: App, requests: int) -> None:
    for _ in range(requests):
        record = RequestRecord()
        record.started = app.wire.clock()
        record.close(record.started, app.metrics, "completions", 200, None)


async def test_viewer_that_does_not_read_is_dropped(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.admin.connection.TIMEOUT_S", 0.3)
    client = await Client.connect(
        int(app.admin_url.rsplit(":", 1)[1]), limit=1 << 12, rcvbuf=1 << 12
    )
    await client.send(get("/admin/live"))
    await eventually(lambda: app.live._viewers, within=DEADLINE_S)
    give_up = app.wire.clock() + DEADLINE_S
    while app.live._viewers:  # until all buffers are full
        assert app.wire.clock() < give_up
        record_requests(app, 2000)
        await app.live.send_updates()
        await asyncio.sleep(0.01)
    await eventually(lambda: app.metrics.live is None, within=DEADLINE_S)
    client.close()


async def follow(answer: aiohttp.ClientResponse, ended: set[str], dropped: list[int]) -> None:
    """Collect the finished requests and dropped counts of a page."""
    fields: list[str] = []
    text = b""
    async for piece in answer.content.iter_any():
        *events, text = (text + piece).split(b"\n\n")
        for event in events:
            data = json.loads(event.partition(b"data: ")[2])
            fields = data.get("fields", fields)
            dropped.append(data.get("dropped", 0))
            rows = (dict(zip(fields, row, strict=True)) for row in data["rows"])
            ended |= {row["id"] for row in rows if row["ended"] is not None}


async def stream(app: App, name: str, at_once: asyncio.Semaphore) -> Answer:
    async with at_once:
        data = chat("hi", b"X-Request-Id: " + name.encode(), stream=True)
        return await answer_of(app.wire.port, data, 2 * DEADLINE_S)


async def test_stuck_viewers_delay_no_one_and_buffer_nothing(
    app: App, web: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Slow viewers are not dropped.
    monkeypatch.setattr("proxy.status_page.live.READ_TIMEOUT_S", 600.0)
    monkeypatch.setattr("proxy.admin.connection.TIMEOUT_S", 600.0)
    admin = int(app.admin_url.rsplit(":", 1)[1])
    stuck_clients = [await Client.connect(admin, limit=1 << 12, rcvbuf=1 << 12) for _ in range(2)]
    for client in stuck_clients:
        await client.send(get("/admin/live"))
    viewers = app.live._viewers
    await eventually(lambda: len(viewers) == len(stuck_clients), within=DEADLINE_S)
    stuck = set(viewers)
    no_end = aiohttp.ClientTimeout(total=None)
    async with web.get(app.admin_url + "/admin/live", timeout=no_end) as answer:
        ended: set[str] = set()
        dropped: list[int] = []
        reader = asyncio.create_task(follow(answer, ended, dropped))
        await eventually(lambda: dropped, within=DEADLINE_S)
        give_up = app.wire.clock() + 4 * DEADLINE_S
        while not all(viewer.busy and viewer.behind for viewer in stuck):
            assert app.wire.clock() < give_up  # all buffers must be full by then
            record_requests(app, 2000)
            await app.live.send_updates()
            await asyncio.sleep(0.01)

        before, beats = {id(viewer): viewer._slot for viewer in stuck}, app.live._beats
        at_once, names = asyncio.Semaphore(20), [f"stream-{n}" for n in range(60)]
        answers = await asyncio.gather(*(stream(app, name, at_once) for name in names))
        assert {
            (answer.status, answer.body.endswith(b"data: [DONE]\n\n")) for answer in answers
        } == {(200, True)}
        await eventually(lambda: ended.issuperset(names), within=DEADLINE_S)
        await eventually(lambda: app.live._beats > beats + 8, within=DEADLINE_S)
        assert not any(dropped)
        # Stuck viewers still hold the same single message.
        assert viewers >= stuck
        assert all(viewer._slot is before[id(viewer)] for viewer in stuck)
        assert not app.live.recorder._ended
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    # A viewer that reads again gets the full state.
    stuck_clients[0].read_on()
    pieces = [b"", b""]
    async with asyncio.timeout(DEADLINE_S):
        while names[-1].encode() not in pieces[-2] + pieces[-1]:
            pieces.append(await stuck_clients[0].reader.read(1 << 20))
    text = b"".join(pieces)
    assert names[-1].encode() in text.rpartition(b"event: all")[2]
    assert text.count(b"event: all") > 1
    for client in stuck_clients:
        client.close()


async def test_stop_ends_the_events(app: App, web: aiohttp.ClientSession) -> None:
    async with web.get(app.admin_url + "/admin/live") as answer:
        stream_of_events = events(answer)
        await anext(stream_of_events)
        await asyncio.wait_for(app.stop(), DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            with suppress(aiohttp.ClientError):  # the connection may break
                async for _ in stream_of_events:
                    pass

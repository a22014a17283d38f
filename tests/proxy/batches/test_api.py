"""The desk: what it refuses, and how it gives out what is large."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.batches.office import CHAT, Office, busy, lines
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import get, request
from tests.proxy.wire.site import eventually


def post(path: str, body: object) -> bytes:
    """Return the bytes of a POST."""
    return request(json.dumps(body).encode(), path=path)


def form(purpose: str | None = "batch", content: bytes | None = b"{}") -> bytes:
    """Return the bytes of an upload."""
    body = b""
    if purpose is not None:
        body += b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%b\r\n' % (
            purpose.encode()
        )
    if content is not None:
        body += b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n%b\r\n' % content
    kind = b"Content-Type: multipart/form-data; boundary=b"
    lead = b"POST /v1/files HTTP/1.1\r\nHost: x\r\n%b\r\nContent-Length: " % kind
    body += b"--b--\r\n"
    return lead + b"%d\r\n\r\n%b" % (len(body), body)


async def test_what_it_answers_is_counted_and_told(office: Office) -> None:
    site, told = office.site, []
    site.metrics.at_end = (
        lambda seen, _, route, status, reason: told.append((seen.id, route, status, reason.value)),
    )
    named = b"X-Request-Id: of-the-visit"
    data = get("/v1/files").replace(b"\r\n", b"\r\n" + named + b"\r\n", 1)
    assert (await site.ask(data)).status == 200
    assert (await site.ask(get("/v1/files/file-1/content"))).status == 404
    assert (await site.ask(get("/v1/batches"))).status == 200
    assert told[0] == ("of-the-visit", "files", 200, "own")
    assert [each[1:3] for each in told] == [("files", 200), ("files", 404), ("batches", 200)]
    assert all(name for name, *_ in told)
    counted = {(key[0], key[5]): each.count for key, each in site.metrics.requests.items()}
    assert counted == {("files", 200): 1, ("files", 404): 1, ("batches", 200): 1}


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/file-1/content", "/v1/batches"])
async def test_how_much_it_sends_is_told(office: Office, path: str) -> None:
    site, sent = office.site, list[int]()
    site.metrics.at_end = (lambda seen, *_: sent.append(seen.sent_bytes),)
    client = await site.client()
    await client.send(get(path, b"Connection: close"))
    assert [len(await client.closed())] == sent


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/batches/batch_1/cancel"])
async def test_without_a_folder_it_is_said_who_turns_them_on(start: Start, path: str) -> None:
    site = await start()
    answer = await site.ask(get(path))
    assert answer.status == 404
    assert "router.batches.path" in answer.error()["message"]
    assert (await site.ask(get("/v1/filesystem"))).error()["message"].startswith("no such path")


@pytest.mark.parametrize(
    ("data", "status", "param"),
    [
        (form(purpose="fine-tune"), 400, "purpose"),
        (form(purpose=None), 400, "purpose"),
        (form(content=None), 400, "file"),
        (form(content=b""), 400, "file"),
        (form(content=b"x" * 2000), 413, "file"),
        (request(b"{}", path="/v1/files"), 400, None),
        (get("/v1/files/file-1"), 404, "id"),
        (get("/v1/files/file-1/content"), 404, "id"),
        (get("/v1/files?limit=0"), 400, "limit"),
        (get("/v1/files?limit=99999999999"), 400, "limit"),
        (get("/v1/batches?order=up"), 400, "order"),
        (get("/v1/batches?" + "a=1&" * 20), 400, None),
        (get("/v1/batches?after=%ff%00&limit=%zz"), 400, "limit"),
        (get("/v1/batches/batch_1"), 404, "id"),
        (post("/v1/batches/batch_1/cancel", {}), 404, "id"),
        (request(b"{", path="/v1/batches"), 400, None),
        (request(b"[]", path="/v1/batches"), 400, None),
        (post("/v1/batches", {"x": "x" * 70_000}), 413, None),
        (post("/v1/batches", {}), 400, "input_file_id"),
        (get("/v1/batches/batch_1/cancel"), 405, None),
        (request(b"", path="/v1/files/file-1/content", method="DELETE"), 405, None),
        (get("/v1/files/../x"), 404, None),
        (get("/v1/files/file-1/other"), 404, None),
    ],
)
async def test_what_is_refused(
    start: Start, tmp_path: Path, data: bytes, status: int, param: str | None
) -> None:
    office = Office(await start(), tmp_path, max_file_bytes=1000)
    await office.open()
    answer = await office.site.ask(data)
    assert (answer.status, answer.error()["param"]) == (status, param)
    assert len(answer.all(b"allow")) == (status == 405)
    await office.close()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/audio/transcriptions"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "1"}}, "metadata"),
        ({"input_file_id": "file-nobody"}, "id"),
    ],
)
async def test_what_is_no_batch(office: Office, changes: dict[str, Any], param: str) -> None:
    file_id = await office.upload(lines(1))
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"} | changes
    answer = await office.site.ask(post("/v1/batches", body))
    assert answer.error()["param"] == param


async def test_a_batch_takes_no_files_of_results(office: Office) -> None:
    done = await office.until(await office.begin(lines(1)))
    body = {"input_file_id": done.output_file_id, "endpoint": CHAT, "completion_window": "1h"}
    answer = await office.site.ask(post("/v1/batches", body))
    assert answer.error()["param"] == "input_file_id"


async def test_a_large_file_waits_for_who_reads_slowly(office: Office) -> None:
    content = b"x" * (24 << 20)
    made = await office.client.files.create(file=("in", content), purpose="batch")
    client = await office.site.client(rcvbuf=1 << 16)
    await client.send(get(f"/v1/files/{made.id}/content"))
    head = await client.head()
    assert head.one(b"content-length") == b"%d" % len(content)
    [visit] = office.site.wire.visits
    await eventually(lambda: not visit._writable.is_set())  # type: ignore[attr-defined]
    size = 0
    while size < len(content):
        size += len(await client.reader.read(1 << 20))
    assert size == len(content)
    assert (await client.ask(get("/v1/batches"))).status == 200
    client.close()


async def test_who_leaves_is_no_trouble(office: Office) -> None:
    made = await office.client.files.create(file=("in", b"x" * (24 << 20)), purpose="batch")
    client = await office.site.client(rcvbuf=1 << 16)
    await client.send(get(f"/v1/files/{made.id}/content"))
    await client.head()
    client.close()
    await eventually(lambda: not office.site.wire.visits)


async def test_who_keeps_a_connection_is_told_that_the_router_leaves(office: Office) -> None:
    office.site.wire.leaving = True
    client = await office.site.client()
    answer = await client.ask(get("/v1/files"))
    assert (answer.status, answer.one(b"connection")) == (200, b"close")
    assert await client.closed() == b""


async def test_a_stop_ends_what_is_read(office: Office) -> None:
    made = await office.client.files.create(file=("in", b"x" * (24 << 20)), purpose="batch")
    client = await office.site.client(rcvbuf=1 << 16)
    await client.send(get(f"/v1/files/{made.id}/content"))
    await client.head()
    await office.site.wire.drain(0.0)
    size = 0
    with suppress(ConnectionError):
        async with asyncio.timeout(10):
            while data := await client.reader.read(1 << 20):
                size += len(data)
    assert size < 24 << 20


@pytest.fixture
async def small(start: Start, tmp_path: Path) -> AsyncIterator[Office]:
    """Start one that holds a body of at most 100 kB, and two of them not at once."""
    most = {"max_collected_bytes": 100_000, "max_body_bytes": 100_000}
    office = Office(await start(wire=most), tmp_path)
    await office.open()
    yield office
    await office.close()


async def test_uploads_that_wait_for_the_store_are_of_the_pot_of_bodies(small: Office) -> None:
    site, pot = small.site, small.site.wire.collecting
    upload = form(content=b"x" * 60_000)
    with busy(small.batches.keeper):
        first = asyncio.create_task(site.ask(upload, within=30))
        await eventually(lambda: pot.held > 60_000)
        for _ in range(3):
            second = await site.ask(upload)
            assert (second.status, second.error()["code"]) == (503, "too_many_bodies")
        assert 60_000 < pot.held < 61_000
        data = request(b"x" * 30_000, path="/v1/files", method="GET")
        plain = asyncio.create_task(site.ask(data, within=30))
        await eventually(lambda: len(site.wire.visits) == 2)
        assert pot.held < 61_000, "what nobody reads is not held"
    assert [(await first).status, (await plain).status] == [200, 200]
    assert pot.held == 0
    assert (await site.ask(upload)).status == 200
    assert pot.held == 0


async def test_who_leaves_takes_along_what_the_store_has_not_begun(small: Office) -> None:
    site, pot = small.site, small.site.wire.collecting
    with busy(small.batches.keeper):
        for _ in range(3):
            client = await site.client()
            await client.send(form(content=b"x" * 60_000))
            await eventually(lambda: pot.held > 60_000)
            client.close()
            await eventually(lambda: pot.held == 0)
    assert [each.id async for each in small.client.files.list()] == []

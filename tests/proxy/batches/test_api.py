"""The Files and Batches API: refusals and large downloads."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from openai import BadRequestError

from tests.present import present
from tests.proxy.batches.conftest import OpenHarness
from tests.proxy.batches.harness import CHAT, BatchHarness, busy, lines
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import Client, get, request
from tests.proxy.wire.site import eventually


def post(path: str, body: object) -> bytes:
    return request(json.dumps(body).encode(), path=path)


def form(purpose: str | None = "batch", content: bytes | None = b"{}") -> bytes:
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


async def test_requests_are_counted_and_recorded(harness: BatchHarness) -> None:
    site, records = harness.site, []
    site.metrics.at_end = (
        lambda seen, _, route, status, reason: records.append(
            (seen.id, route, status, reason.value, seen.sent_bytes)
        ),
    )
    for number, (path, status) in enumerate(
        {"/v1/files": 200, "/v1/files/file-1/content": 404, "/v1/batches": 200}.items()
    ):
        client = await site.client()
        await client.send(get(path, b"Connection: close", b"X-Request-Id: id-%d" % number))
        answer = await client.closed()
        route = path.split("/")[2]
        reason = "own" if status == 200 else "unknown_path"
        assert records.pop() == (f"id-{number}", route, status, reason, len(answer))
        assert answer.startswith(b"HTTP/1.1 %d " % status)
    counts = {(key[0], key[5]): series.count for key, series in site.metrics.requests.items()}
    assert counts == {("files", 200): 1, ("files", 404): 1, ("batches", 200): 1}


async def test_without_batches_404_names_the_setting(start: Start) -> None:
    site = await start()
    for path in ("/v1/files", "/v1/batches", "/v1/batches/batch_1/cancel"):
        answer = await site.ask(get(path))
        assert answer.status == 404
        assert "router.batches.path" in answer.error()["message"]
    assert (await site.ask(get("/v1/filesystem"))).error()["message"].startswith("no such path")


INVALID_REQUESTS = [
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
    (get("/v1/files?after=file-1"), 400, "after"),
    (get("/v1/batches?after=batch_1"), 400, "after"),
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
]


async def test_invalid_requests_are_refused(open_harness: OpenHarness) -> None:
    site = (await open_harness(max_file_bytes=1000)).site
    for data, status, param in INVALID_REQUESTS:
        answer = await site.ask(data)
        assert (answer.status, answer.error()["param"]) == (status, param), data
        assert len(answer.all(b"allow")) == (status == 405), data


@pytest.mark.parametrize(
    ("anchor", "seconds", "kept_s"),
    [
        ("created_at", 3600, 3600),
        ("created_at", 2_592_000, 86_400),
        ("created_at", 3599, None),
        ("created_at", 2_592_001, None),
        ("last_active_at", 3600, None),
        ("created_at", "x", None),
    ],
)
async def test_expires_after(
    open_harness: OpenHarness, anchor: Any, seconds: Any, kept_s: int | None
) -> None:
    """`keep_days` is a maximum."""
    files = (await open_harness(keep_days=1.0)).client.files
    after: Any = {"anchor": anchor, "seconds": seconds}
    with nullcontext() if kept_s else pytest.raises(BadRequestError, match="expires_after"):
        file = await files.create(file=("in", b"{}"), purpose="batch", expires_after=after)
        assert present(file.expires_at) - file.created_at == kept_s


INVALID_BATCHES = [
    ({"endpoint": "/v1/audio/transcriptions"}, "endpoint"),
    ({"completion_window": "soon"}, "completion_window"),
    ({"completion_window": "31d"}, "completion_window"),
    ({"completion_window": 24}, "completion_window"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a" * 65: "1"}}, "metadata"),
    ({"input_file_id": "file-unknown"}, "id"),
]


async def test_invalid_batches_are_refused(harness: BatchHarness) -> None:
    done = await harness.until(await harness.begin(lines(1)))
    body = {
        "input_file_id": done.input_file_id, "endpoint": CHAT, "completion_window": "24h"
    }  # fmt: skip
    result_file = {"input_file_id": done.output_file_id}
    for changes, param in [*INVALID_BATCHES, (result_file, "input_file_id")]:
        answer = await harness.site.ask(post("/v1/batches", body | changes))
        assert answer.error()["param"] == param, changes


DOWNLOAD_BYTES = 24 << 20


async def begin_download(harness: BatchHarness) -> Client:
    """Begin a large download; return its client, which has read the head."""
    content = b"x" * DOWNLOAD_BYTES
    file = await harness.client.files.create(file=("in", content), purpose="batch")
    client = await harness.site.client(rcvbuf=1 << 16)
    await client.send(get(f"/v1/files/{file.id}/content"))
    assert (await client.head()).one(b"content-length") == b"%d" % DOWNLOAD_BYTES
    return client


async def test_large_download_waits_for_a_slow_reader(harness: BatchHarness) -> None:
    client = await begin_download(harness)
    [download] = harness.site.wire.local_requests
    await eventually(lambda: not download._writable.is_set())  # type: ignore[attr-defined]
    size = 0
    while size < DOWNLOAD_BYTES:
        size += len(await client.reader.read(1 << 20))
    assert size == DOWNLOAD_BYTES
    assert (await client.ask(get("/v1/batches"))).status == 200
    client.close()


async def test_client_that_leaves_a_download_is_forgotten(harness: BatchHarness) -> None:
    (await begin_download(harness)).close()
    await eventually(lambda: not harness.site.wire.local_requests)


async def test_drain_ends_downloads(harness: BatchHarness) -> None:
    client = await begin_download(harness)
    await harness.site.wire.drain(0.0)
    size = 0
    with suppress(ConnectionError):
        async with asyncio.timeout(10):
            while data := await client.reader.read(1 << 20):
                size += len(data)
    assert size < DOWNLOAD_BYTES


async def test_notice_period_closes_kept_connections(harness: BatchHarness) -> None:
    harness.site.wire.leaving = True
    client = await harness.site.client()
    answer = await client.ask(get("/v1/files"))
    assert (answer.status, answer.one(b"connection")) == (200, b"close")
    assert await client.closed() == b""


@pytest.fixture
async def small_harness(open_harness: OpenHarness) -> BatchHarness:
    """Start a router that collects bodies of at most 100 kB in total."""
    return await open_harness(wire={"max_collected_bytes": 100_000, "max_body_bytes": 100_000})


async def test_uploads_that_wait_for_the_store_count_as_collected_bodies(
    small_harness: BatchHarness,
) -> None:
    site, collecting = small_harness.site, small_harness.site.wire.body_budget
    upload = form(content=b"x" * 60_000)
    with busy(small_harness.batches.store):
        first = asyncio.create_task(site.ask(upload, within=30))
        await eventually(lambda: collecting.held > 60_000)
        for _ in range(3):
            second = await site.ask(upload)
            assert (second.status, second.error()["code"]) == (503, "too_many_bodies")
        assert 60_000 < collecting.held < 61_000
        data = request(b"x" * 30_000, path="/v1/files", method="GET")
        listing = asyncio.create_task(site.ask(data, within=30))
        await eventually(lambda: len(site.wire.local_requests) == 2)
        assert collecting.held < 61_000, "an unused body is not held"
    assert [(await first).status, (await listing).status] == [200, 200]
    assert collecting.held == 0
    assert (await site.ask(upload)).status == 200
    assert collecting.held == 0


async def test_client_that_leaves_cancels_its_waiting_upload(small_harness: BatchHarness) -> None:
    site, collecting = small_harness.site, small_harness.site.wire.body_budget
    with busy(small_harness.batches.store):
        for _ in range(3):
            client = await site.client()
            await client.send(form(content=b"x" * 60_000))
            await eventually(lambda: collecting.held > 60_000)
            client.close()
            await eventually(lambda: collecting.held == 0)
    assert [file.id async for file in small_harness.client.files.list()] == []


async def test_loop_that_deletes_while_it_lists_does_not_end_early(
    open_harness: OpenHarness,
) -> None:
    """The client asks for the page after the file that it deleted last."""
    files = (await open_harness()).client.files
    for _ in range(4):
        await files.create(file=("in", b"{}"), purpose="batch")

    async def delete_all() -> None:
        async for file in files.list(limit=2):
            await files.delete(file.id)

    with pytest.raises(BadRequestError, match="list again"):
        await delete_all()
    assert len((await files.list()).data) == 2

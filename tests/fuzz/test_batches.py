"""Fuzzed files and batches: no 500, and every batch ends."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from tests.proxy.batches.harness import BatchHarness
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import request
from tests.proxy.wire.site import eventually

UPLOAD = b"POST /v1/files HTTP/1.1\r\nHost: a\r\nContent-Type: multipart/form-data; boundary=b\r\n"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
GOOD = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}


def line(**changed: object) -> bytes:
    """Return a line of a batch with changed fields."""
    return json.dumps(GOOD | changed).encode()


LINES = (
    b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"\x00", b"{}", b'{"custom_id": 1}',
    b"[" * 5000,
    b'{"custom_id": "\\ud800"}', line(url="http://elsewhere/"),
    line(url="/metrics"), line(method="GET"),
    line(body=[]), line(body={"stream": True}),
    line(body=CHAT | {"kv_transfer_params": {"a": 1}}),
    line(custom_id="x" * 100_000),
    line(custom_id=""), line(body={"model": 1}),
    line()[:-3], json.dumps(GOOD).replace("}", ', "custom_id": "2"}').encode(),
)  # fmt: skip
BODIES = (
    b"", b"null", b"[]", b"{", b'{"input_file_id": 1}', b'{"input_file_id": "file-x"}',
    b'{"input_file_id": "../../etc/passwd", "endpoint": "/v1/chat/completions"}',
    b'{"input_file_id": "file-x", "endpoint": "/metrics", "completion_window": "24h"}',
    b'{"input_file_id": "file-x", "endpoint": [], "completion_window": {}}',
    b'{"input_file_id": "\\u0000", "endpoint": "/v1/completions", "completion_window": "1e99h"}',
    b'{"input_file_id": "%s"}' % (b"x" * 50_000), b"\xff" * 100, b'{"a":' * 2000, b"[" * 100_000,
)  # fmt: skip
PATHS = (
    "/v1/files", "/v1/batches", "/v1/files?limit=x", "/v1/files?limit=-1", "/v1/files?limit=1e9",
    "/v1/files?after=%00", "/v1/batches?limit=99999999999999999999", "/v1/batches?after=x&after=y",
    "/v1/files/..%2f..%2fetc", "/v1/files/%00/content", "/v1/files/file-x/content", "/v1/batches/x",
    "/v1/batches/x/cancel", "/v1/batches//cancel", "/v1/files/" + "x" * 5000, "/v1/batches/%ff",
)  # fmt: skip


def form(dice: random.Random) -> bytes:
    """Return a possibly invalid form."""
    lines = b"\n".join(dice.choice((*LINES, line())) for _ in range(4))
    parts = [
        (
            b'form-data; name="purpose"',
            dice.choice((b"batch", b"batch", b"fine-tune", b"", b"\xff")),
        ),
        (b'form-data; name="file"; filename="in.jsonl"', lines),
    ]
    if dice.random() < 0.3:
        parts.insert(dice.randrange(3), dice.choice(parts))
    if dice.random() < 0.2:
        del parts[dice.randrange(len(parts))]
    body = b"".join(b"--b\r\nContent-Disposition: %b\r\n\r\n%b\r\n" % part for part in parts)
    body += b"--b--\r\n"
    if dice.random() < 0.3:
        at = dice.randrange(len(body))
        body = body[:at] + dice.randbytes(dice.randrange(4)) + body[at + dice.randrange(9) :]
    return body


def upload(body: bytes) -> bytes:
    return UPLOAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("seed", [1, 2])
async def test_fuzzed_uploads_and_batches_are_no_500(
    start: Start, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    harness = BatchHarness(await start(), tmp_path / "batches")
    await harness.open()
    site, file_ids = harness.site, []
    try:
        for _ in range(60):
            answer = await site.ask(upload(form(dice)))
            assert answer.status < 500, answer
            if answer.status == 200:
                file_ids.append(answer.json()["id"])
        assert file_ids
        for body in BODIES:
            assert (await site.ask(request(body, path="/v1/batches"))).status in (400, 404, 413), (
                body
            )
        for path in PATHS:
            for method in ("GET", "POST", "DELETE", "PUT"):
                answer = await site.ask(request(b"", path=path, method=method))
                assert answer.status < 500, (method, path, answer)
        batch_ids = []
        for item_id in file_ids:
            body = json.dumps({"input_file_id": item_id, "endpoint": "/v1/chat/completions",
                               "completion_window": "24h"}).encode()  # fmt: skip
            answer = await site.ask(request(body, path="/v1/batches"))
            assert answer.status < 500, answer
            if answer.status == 200:
                batch_ids.append(answer.json()["id"])
        assert batch_ids
        # Each batch ends: completed, or failed line by line.
        for item_id in batch_ids:
            batch = await harness.client.batches.retrieve(item_id)
            async with asyncio.timeout(30.0):
                while batch.status in ("validating", "in_progress", "finalizing"):
                    await asyncio.sleep(0.02)
                    batch = await harness.client.batches.retrieve(item_id)
            assert batch.status in ("completed", "failed")
        await eventually(lambda: not site.unfinished(), site.unfinished, within=30.0)
    finally:
        await harness.close()
    assert all(call.path == "/v1/chat/completions" for call in site.served())
    assert not any(b"kv_transfer" in call.body for call in site.served())

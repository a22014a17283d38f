"""A worker behind a slow connection: all bytes arrive and are passed on."""

from __future__ import annotations

import time

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start, start
from tests.proxy.wire.fake_worker import SlowWire
from tests.proxy.wire.raw_client import chat, request

__all__ = ["start"]
SLOWLY = SlowWire(piece=256, window=4096, gap_s=0.01)
PIECES = 16


async def test_slow_connection_passes_requests_and_responses_complete(start: Start) -> None:
    site = await start()
    body = bytes(range(256)) * PIECES
    site.fake.always(scripts.answer(body=body, content_type=b"application/octet-stream"))
    site.fake.slow_wire = SLOWLY
    request_bytes, began = chat("x" * 30_000), time.monotonic()
    answer = await site.ask(request_bytes)
    assert time.monotonic() - began >= PIECES * SLOWLY.gap_s
    assert answer.body == body
    assert request(site.fake.served[0].body) == request_bytes
    site.fake.slow_wire = None
    assert (await site.ask(chat())).body == body

"""A worker that is reached by a slow wire: all of it arrives, and is passed on."""

from __future__ import annotations

import time

from tests.proxy.wire import scripts
from tests.proxy.wire.conftest import Start, start
from tests.proxy.wire.fake_worker import SlowWire
from tests.proxy.wire.raw_client import chat, request

__all__ = ["start"]
SLOWLY = SlowWire(piece=256, window=4096, gap_s=0.01)
PIECES = 16


async def test_both_ways_it_is_slow_and_whole(start: Start) -> None:
    site = await start()
    said = bytes(range(256)) * PIECES
    site.fake.always(scripts.answer(body=said, content_type=b"application/octet-stream"))
    site.fake.slow_wire = SLOWLY
    asked, began = chat("x" * 30_000), time.monotonic()
    answer = await site.ask(asked)
    assert time.monotonic() - began >= PIECES * SLOWLY.gap_s
    assert answer.body == said
    assert request(site.fake.served[0].body) == asked
    site.fake.slow_wire = None
    assert (await site.ask(chat())).body == said

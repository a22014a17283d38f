"""Large bodies leave the event loop to others between their steps."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from proxy.core.request.json_body import LargeBody
from proxy.core.request.json_limits import LARGE_BODY_BYTES
from proxy.wire.large_body_queue import LargeBodyQueue, LargeBodyReader
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, eventually

pytestmark = pytest.mark.plain("replaces parts")


class Bodies:
    """A queue whose bodies log their steps; a body's text is its name and its number of steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.queue = LargeBodyQueue(lambda: 7.0)
        monkeypatch.setattr("proxy.wire.large_body_queue.LargeBody", self._body)

    def add(self, text: str) -> LargeBodyReader:
        def done(now: float, _: LargeBody) -> None:
            self.log.append(f"{text[0]} done at {now:g}")

        return self.queue.add(text.encode(), done, lambda now: self.log.append(f"failed at {now}"))

    def _body(self, text: bytes) -> Any:
        name, steps = chr(text[0]), int(text[1:])
        body = Mock()

        def advance() -> bool:
            nonlocal steps
            if not steps:
                raise ValueError("of this body only")
            steps -= 1
            self.log.append(name)
            return steps > 0

        body.advance = advance
        return body


async def test_one_step_is_done_in_each_turn_and_bodies_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies = Bodies(monkeypatch)
    bodies.add("a3")
    bodies.add("b2")
    expected = ["a", "a", "a", "a done at 7", "b", "b", "b done at 7"]
    for steps in (1, 2, 4, 5, 7):
        await asyncio.sleep(0)
        assert bodies.log == expected[:steps]
    bodies.add("c1")
    await asyncio.sleep(0)
    assert bodies.log[7:] == ["c", "c done at 7"]


async def test_dropped_and_failed_bodies_do_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies = Bodies(monkeypatch)
    bodies.add("a0")
    bodies.add("b2").drop()
    bodies.add("c1")
    for _ in range(3):
        await asyncio.sleep(0)
    assert bodies.log == ["failed at 7.0", "c", "c done at 7"]


LARGE = chat("word " * (LARGE_BODY_BYTES // 5 + 1))


async def test_small_request_is_served_between_the_steps_of_a_large_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await start(Fake(max_model_len=10**6))
    held = asyncio.Event()
    advance = LargeBody.advance
    monkeypatch.setattr(LargeBody, "advance", lambda body: advance(body) or not held.is_set())
    large = await site.send(LARGE)
    await eventually(lambda: len(site.wire.exchanges) == 1)
    small = await site.send(chat())
    assert (await small.answer()).status == 200
    held.set()
    assert (await large.answer()).status == 200
    assert [len(call.body) > LARGE_BODY_BYTES for call in site.served()] == [False, True]


async def test_client_that_leaves_while_its_body_is_read_has_no_request(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await start(Fake(max_model_len=10**6))
    monkeypatch.setattr(LargeBody, "advance", lambda _: True)
    client = await site.send(LARGE)
    await eventually(lambda: len(site.wire.exchanges) == 1)
    client.close()
    await site.settled()
    assert site.served() == []


async def test_failure_to_read_a_large_body_ends_its_request(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await start(Fake(max_model_len=10**6))

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("of this request only")

    monkeypatch.setattr(site.router, "read", fail)
    answer = await (await site.send(LARGE)).answer()
    assert answer.status == 503

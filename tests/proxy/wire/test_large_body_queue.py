"""Large bodies leave the event loop to others between their steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from proxy.core.request.json_body import LargeBody
from proxy.core.request.json_limits import LARGE_BODY_BYTES
from proxy.wire.large_body_queue import LargeBodyQueue
from tests.proxy.wire.conftest import Start
from tests.proxy.wire.raw_client import chat
from tests.proxy.wire.site import Fake, eventually


def reader(name: str, steps: int, log: list[str]) -> Callable[[], bool]:
    """Return a reader that takes a number of steps."""

    def step() -> bool:
        nonlocal steps
        log.append(name)
        steps -= 1
        return steps > 0

    return step


async def test_one_step_is_done_in_each_turn_and_bodies_keep_their_order() -> None:
    log: list[str] = []
    queue = LargeBodyQueue()
    queue.add(reader("a", 3, log))
    queue.add(reader("b", 2, log))
    for turn in range(1, 6):
        await asyncio.sleep(0)
        assert log == ["a", "a", "a", "b", "b"][:turn]
    queue.add(reader("c", 1, log))
    await asyncio.sleep(0)
    assert log[5:] == ["c"]


async def test_failed_reader_does_not_stop_the_others() -> None:
    log: list[str] = []
    queue, errors = LargeBodyQueue(), []

    def fail() -> bool:
        raise ValueError("of this body only")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    queue.add(fail)
    queue.add(reader("a", 1, log))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (log, len(errors)) == (["a"], 1)


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
    await site.settled()

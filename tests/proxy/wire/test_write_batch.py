"""Writes kept until the end of the event loop's turn."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.wire.write_batch import MAX_BATCH_BYTES, WriteBatch


class Transport:
    """Notes what is written."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log, self.closing = name, log, False

    def is_closing(self) -> bool:
        return self.closing

    def writelines(self, pieces: Any) -> None:
        self.log.append((self.name, b"".join(pieces)))


async def test_the_first_goes_at_once_and_the_rest_in_order_when_the_turn_ends() -> None:
    log: list[Any] = []
    a, b = Transport("a", log), Transport("b", log)
    outbox: Any = WriteBatch()
    outbox.write(a, b"1", b"2")
    outbox.write(b, b"3")
    outbox.write(a, b"4")
    assert log == [("a", b"12")]
    await asyncio.sleep(0)
    assert log == [("a", b"12"), ("b", b"3"), ("a", b"4")]
    outbox.write(b, b"5")
    assert log[3:] == [("b", b"5")]


async def test_what_is_much_goes_before_the_turn_ends_and_in_order() -> None:
    log: list[Any] = []
    a, b = Transport("a", log), Transport("b", log)
    outbox: Any = WriteBatch()
    outbox.write(a, b"1")
    outbox.write(b, b"2")
    outbox.write(a, b"head", b"x" * (MAX_BATCH_BYTES - 1))
    assert log == [("a", b"1")]
    outbox.write(b, b"3")
    assert [name for name, _ in log] == ["a", "b", "a", "b"]
    outbox.write(a, b"4")
    assert len(log) == 4
    await asyncio.sleep(0)
    assert log[4:] == [("a", b"4")]


async def test_a_flush_before_a_close_leaves_nothing_for_later() -> None:
    log: list[Any] = []
    a = Transport("a", log)
    outbox: Any = WriteBatch()
    outbox.write(a, b"1")
    outbox.write(a, b"2")
    outbox.flush()
    assert log == [("a", b"1"), ("a", b"2")]
    await asyncio.sleep(0)
    assert len(log) == 2


async def test_nothing_is_written_to_a_connection_that_is_gone() -> None:
    log: list[Any] = []
    gone, here = Transport("gone", log), Transport("here", log)
    outbox: Any = WriteBatch()
    outbox.write(here, b"1")
    outbox.write(gone, b"2")
    outbox.write(here, b"3")
    gone.closing = True
    await asyncio.sleep(0)
    assert log == [("here", b"1"), ("here", b"3")]

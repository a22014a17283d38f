"""Writes batched until the end of the event loop's turn."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.wire.write_batch import MAX_BATCH_BYTES, WriteBatch


class Transport:
    """Records what is written."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log, self.closing = name, log, False

    def is_closing(self) -> bool:
        return self.closing

    def writelines(self, pieces: Any) -> None:
        self.log.append((self.name, b"".join(pieces)))


async def test_first_write_is_immediate_and_the_rest_follow_at_turn_end() -> None:
    log: list[Any] = []
    a, b = Transport("a", log), Transport("b", log)
    batch: Any = WriteBatch()
    batch.write(a, b"1", b"2")
    batch.write(b, b"3")
    batch.write(a, b"4")
    assert log == [("a", b"12")]
    await asyncio.sleep(0)
    assert log == [("a", b"12"), ("b", b"3"), ("a", b"4")]
    batch.write(b, b"5")
    assert log[3:] == [("b", b"5")]


async def test_large_batch_is_written_before_the_turn_ends() -> None:
    log: list[Any] = []
    a, b = Transport("a", log), Transport("b", log)
    batch: Any = WriteBatch()
    batch.write(a, b"1")
    batch.write(b, b"2")
    batch.write(a, b"head", b"x" * (MAX_BATCH_BYTES - 1))
    assert log == [("a", b"1")]
    batch.write(b, b"3")
    assert [name for name, _ in log] == ["a", "b", "a", "b"]
    batch.write(a, b"4")
    assert len(log) == 4
    await asyncio.sleep(0)
    assert log[4:] == [("a", b"4")]


async def test_flush_writes_everything_once() -> None:
    log: list[Any] = []
    a, b = Transport("a", log), Transport("b", log)
    batch: Any = WriteBatch()
    batch.write(a, b"1")
    batch.write(b, b"2")
    assert (batch.has_pending(a), batch.has_pending(b)) == (False, True)
    batch.flush()
    assert not batch.has_pending(b)
    assert log == [("a", b"1"), ("b", b"2")]
    await asyncio.sleep(0)
    assert len(log) == 2


async def test_closing_connection_gets_no_writes() -> None:
    log: list[Any] = []
    gone, here = Transport("gone", log), Transport("here", log)
    batch: Any = WriteBatch()
    batch.write(here, b"1")
    batch.write(gone, b"2")
    batch.write(here, b"3")
    gone.closing = True
    await asyncio.sleep(0)
    assert log == [("here", b"1"), ("here", b"3")]

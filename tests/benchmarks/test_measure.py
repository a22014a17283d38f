"""Measured windows over real sockets, with the mock worker only."""

from __future__ import annotations

import pytest

from benchmarks.router import measure
from benchmarks.router.measure import Closed, Paced, Times
from benchmarks.router.stage import Side
from tests.benchmarks.servers import answering, mock_worker

TIMES = Times(warm_up=0.02, closed=0.1, paced=0.2)


async def test_closed_window_has_latencies() -> None:
    async with mock_worker() as port:
        found = await measure.play(Side("direct", port), "1kb-c32", 3, TIMES)
    assert (found.load, found.side, found.round, found.errors) == ("1kb-c32", "direct", 3, {})
    assert found.done > 0
    assert 0.1 <= found.seconds < 5
    assert found.p50_s is not None
    assert found.p99_s is not None
    assert 0 < found.p50_s <= found.p99_s


async def test_paced_window_counts_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.LOADS, "chunks", Paced(8, gap_ms=20, start_s=0.02))
    async with mock_worker() as port:
        found = await measure.play(Side("direct", port), "chunks", 1, TIMES)
    assert (found.errors, found.most_open) == ({}, 8)
    assert found.events == pytest.approx(8 * found.seconds / 0.02, rel=0.5)


async def test_errors_of_the_warm_up_are_recorded() -> None:
    async with answering(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n") as port:
        found = await measure.play(Side("direct", port), "c1", 1, TIMES)
    assert found.done == 0
    assert found.p50_s is None
    assert found.errors["HTTP 500"] > 0


async def test_sides_take_turns_and_some_loads_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measure,
        "LOADS",
        {
            "a": Closed(1024, 1),
            "over": Closed(1024, 1, hands_over=True),
            "streams": Paced(2, gap_ms=20, start_s=0.02),
        },
    )
    progress: list[str] = []
    async with mock_worker() as port:
        sides = [Side(name, port) for name in ("direct", "x", "y")]
        sides.append(Side("x", port, hands_over=True))
        found = await measure.measure(sides, ["a", "over", "streams"], 2, TIMES, progress.append)
    order = [(sample.round, sample.load, sample.side) for sample in found.samples]
    assert order == [
        *((1, "a", side) for side in ("x", "y", "direct")),
        (1, "over", "x"),
        *((2, "a", side) for side in ("y", "direct", "x")),
        (2, "over", "x"),
        *((2, "streams", side) for side in ("x", "y")),
    ]
    assert len(progress) == len(order)
    assert found.memory == {}

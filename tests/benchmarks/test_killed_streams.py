"""The benchmark that kills the processes behind workers' addresses."""

from __future__ import annotations

import asyncio
import io
from contextlib import suppress

import pytest
from rich.console import Console

from benchmarks.killed_streams import Ports, Streamed, Tally, report, start_relay

PAGE = """\
proxy_continued_streams_total{worker="w0"} 3
proxy_continued_streams_total{worker="w1"} 4
proxy_streams_not_continued_total{why="field"} 0
proxy_streams_not_continued_total{why="no_worker"} 2
"""


@pytest.mark.parametrize(("end", "verdict"), [("equal", "met"), ("different", "MISSED")])
def test_report_shows_ends_and_pauses(end: str, verdict: str) -> None:
    tally = Tally(kills=[10.0, 20.0])
    tally.ends[end] += 1
    pauses = {"a": (3.5, 13.0), "b": (0.5, 9.0), "c": (4.5, 24.0), "d": (2.0, 12.0)}
    tally.streams = {
        name: Streamed(("", "stop", 1), pause_s, until) for name, (pause_s, until) in pauses.items()
    }
    tally.decisions = {
        "a": {"predicted_ttft_s": 1.5, "left_workers": ["w0"]},
        "b": {"predicted_ttft_s": 1.0, "left_workers": [], "ttft_s": 1.25},
        "c": {"predicted_ttft_s": 1.0, "left_workers": ["w0", "w1"]},
        "d": {"predicted_ttft_s": 2.0, "left_workers": ["w0"]},
    }
    console = Console(file=io.StringIO(), width=200)
    report(console, tally, PAGE)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 kills, 1 streams" in text
    assert "continued 7 times; not continued: {'no_worker': '2'}" in text
    assert "2 streams continued once, from the kill: p50 2.50 s" in text
    assert "of its own: p50 1.50x" in text  # 3 / 1.5 and 2 / 2
    assert "that moved with it: p50 1.25x" in text  # 3 / 2 and 2 / 2
    assert "1 streams continued more often, from the kill: p50 4.00 s" in text
    assert "of its own: p50 4.00x" in text
    assert "1 other streams: p50 0.50 s" in text
    assert "their first token over the predicted prefill: p50 1.25x" in text
    assert f"equal: {verdict}" in text


async def test_killed_relay_ends_connections_and_refuses_new_ones() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(9))
        await reader.read()
        writer.close()

    ports = Ports()
    async with await asyncio.start_server(answer, "127.0.0.1", ports.server):
        for _ in range(2):  # the same port works again
            relay = await start_relay(ports)
            async with asyncio.timeout(60):
                while True:
                    try:
                        reader, writer = await asyncio.open_connection("127.0.0.1", ports.relay)
                        break
                    except ConnectionRefusedError:
                        await asyncio.sleep(0.05)
            writer.write(b"x")
            assert await reader.read(9) == b"x"
            relay.kill()
            await relay.wait()
            with suppress(ConnectionResetError):
                assert await reader.read(9) == b""
            writer.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", ports.relay)

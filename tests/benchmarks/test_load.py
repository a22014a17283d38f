"""The load generator: answers and errors."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.router import load as clients
from benchmarks.router.load import Load, closed_loop, streams
from benchmarks.router.mock import DONE, EVENT, LAST_CHUNKS, STREAM_HEAD, answer, chunk, completion
from benchmarks.router.prompts import Pace, Prompts
from tests.benchmarks.servers import answering, mock_worker, until
from vllm_sched.workers.launch import free_port

GOOD = completion(1024)
CHUNKED = STREAM_HEAD + chunk(GOOD.partition(b"\r\n\r\n")[2]) + b"0\r\n\r\n"
CLOSING = GOOD.replace(b"server: uvicorn", b"connection: close", 1)
SORRY = b'data: {"error": {"message": "worker died"}}\n\n'


async def against(reply: bytes, *, then_close: bool = False, streamed: bool = False) -> Load:
    """Run a closed loop or three streams until there are enough answers or errors."""
    prompts = Prompts(1024, seed=1, pace=Pace(events=5, gap_ms=1) if streamed else None)
    async with answering(reply, then_close=then_close) as port:
        kind = streams(port, prompts, 3, 0.0) if streamed else closed_loop(port, prompts, 2)
        async with kind as load:
            wanted = 3 if streamed else 6
            await until(lambda: load.tally.done + load.errors.total() >= wanted)
    return load


@pytest.mark.parametrize("size", [1024, 100 * 1024])
async def test_closed_loop_gets_answers(size: int) -> None:
    async with (
        mock_worker() as port,
        closed_loop(port, Prompts(size, seed=1), connections=3) as load,
    ):
        await until(lambda: load.tally.done >= 50)
    assert load.errors == Counter()
    assert len(load.tally.latencies) == load.tally.done
    assert all(0 < seconds < 10 for seconds in load.tally.latencies)


async def test_streams_run_concurrently_to_their_end() -> None:
    pace = Pace(events=4, gap_ms=100)
    async with (
        mock_worker() as port,
        streams(port, Prompts(1024, seed=1, pace=pace), count=20, over_s=0.02) as load,
    ):
        await until(lambda: load.most_open == 20)
        assert load.open == 20
    assert load.errors == Counter()
    assert (load.tally.done, load.tally.events, load.open) == (20, 80, 0)


@pytest.mark.parametrize(
    ("reply", "then_close"), [(CHUNKED, False), (CLOSING, True)], ids=["chunked", "closing"]
)
async def test_other_framing_is_accepted(reply: bytes, *, then_close: bool) -> None:
    load = await against(reply, then_close=then_close)
    assert load.errors == Counter()
    assert load.tally.done >= 6


@pytest.mark.parametrize(
    ("reply", "then_close", "error"),
    [
        (answer(b"{}", 503), False, "HTTP 503"),
        (GOOD[:-5], True, "cut off"),
        (answer(b'{"error": {"message": "no"}}'), False, "not the mock's answer"),
    ],
)
async def test_wrong_answer_is_an_error(reply: bytes, *, then_close: bool, error: str) -> None:
    load = await against(reply, then_close=then_close)
    assert error in next(iter(load.errors))
    assert (load.tally.done, load.tally.latencies, len(load.errors)) == (0, [], 1)


async def test_bytes_after_an_answer_are_an_error() -> None:
    assert "bytes " in next(iter((await against(GOOD + b"x")).errors))


@pytest.mark.parametrize(
    ("reply", "then_close", "error"),
    [
        (STREAM_HEAD + chunk(EVENT) * 4 + LAST_CHUNKS, False, "stream of 4 events of 5"),
        (STREAM_HEAD + chunk(EVENT) * 5 + b"0\r\n\r\n", False, "stream without its end"),
        (STREAM_HEAD + chunk(EVENT) * 5 + chunk(DONE), True, "cut off"),
        (STREAM_HEAD + chunk(EVENT) + chunk(SORRY), False, "worker died"),
        (answer(b"{}", 429), False, "HTTP 429"),
    ],
)
async def test_wrong_stream_is_an_error(reply: bytes, *, then_close: bool, error: str) -> None:
    load = await against(reply, then_close=then_close, streamed=True)
    assert all(error in kind for kind in load.errors)
    assert load.errors.total() == 3
    if not error.startswith("worker"):
        assert load.open == 0


async def test_missing_connection_and_answer_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    async with closed_loop(free_port(), Prompts(1024, seed=1), connections=1) as load:
        await until(lambda: load.errors)
    assert next(iter(load.errors)).startswith("no connection")
    monkeypatch.setattr(clients, "FINISH_S", 0.05)
    async with answering(b"") as port, closed_loop(port, Prompts(1024, seed=1), 3) as load:
        await until(lambda: len(load.exchanges) == 3)
    assert load.errors == Counter({"no answer within 0.05 s": 3})

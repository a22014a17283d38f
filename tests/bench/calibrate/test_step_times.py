"""Step times before a new request's token, measured by running streams."""

from __future__ import annotations

import asyncio

from vllm_sched.bench.calibrate.step_times import _last_steps
from vllm_sched.bench.calibrate.token_times import TimedStream


def streamed(*ticks: float) -> TimedStream:
    """Return a stream with a prompt of 100 tokens and output tokens at these times."""
    stream = TimedStream(100)
    for number, at in enumerate(ticks, start=1):
        stream.tick(at, number)
    return stream


async def test_last_steps_are_counted_back_from_the_token() -> None:
    stream = streamed(0.0, 1.0, 3.0, 6.0)
    measuring = asyncio.create_task(_last_steps([stream], 6.1, 2))
    await asyncio.sleep(0)
    for at in (10.0, 11.0, 12.0):
        assert not measuring.done()
        stream.tick(at, stream.count + 1)
        await asyncio.sleep(0)
    assert await measuring == [(2.0, 102), (3.0, 103)]


async def test_stream_that_ends_in_that_step_is_used() -> None:
    stream = streamed(0.0, 1.0, 3.0, 6.0)
    stream.end()
    assert await _last_steps([stream], 6.1, 2) == [(2.0, 102), (3.0, 103)]


async def test_stream_that_ended_earlier_is_not_used() -> None:
    stream = streamed(0.0, 1.0, 3.0, 6.0)
    stream.end()
    assert await _last_steps([stream], 9.5, 2) == [None, None]

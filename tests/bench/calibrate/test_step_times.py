"""The steps before a newcomer's token, as running streams saw them."""

from __future__ import annotations

import asyncio

from vllm_sched.bench.calibrate.step_times import _last_steps
from vllm_sched.bench.calibrate.token_times import TimedStream


def streamed(*ticks: float) -> TimedStream:
    """Return a stream of 100 tokens of prompt whose tokens came at these moments."""
    stream = TimedStream(100)
    for number, at in enumerate(ticks, start=1):
        stream.tick(at, number)
    return stream


async def test_they_are_counted_back_from_the_token() -> None:
    stream = streamed(0.0, 1.0, 3.0, 6.0)
    asking = asyncio.create_task(_last_steps([stream], 6.1, 2))
    await asyncio.sleep(0)
    for at in (10.0, 11.0, 12.0):
        assert not asking.done()
        stream.tick(at, stream.count + 1)
        await asyncio.sleep(0)
    assert await asking == [(2.0, 102), (3.0, 103)]


async def test_one_that_ends_in_that_very_step_still_tells() -> None:
    stream = streamed(0.0, 1.0, 3.0, 6.0)
    stream.end()
    assert await _last_steps([stream], 6.1, 2) == [(2.0, 102), (3.0, 103)]


async def test_one_that_had_ended_long_before_tells_nothing() -> None:
    stream = streamed(0.0, 1.0, 3.0, 6.0)
    stream.end()
    assert await _last_steps([stream], 9.5, 2) == [None, None]

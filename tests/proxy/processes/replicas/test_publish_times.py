"""When hosts publish."""

from __future__ import annotations

import asyncio

import pytest

from proxy.processes.replicas import publish_times
from proxy.processes.replicas.publish_times import (
    FLUSH_LEAD_S,
    PUBLISH_INTERVAL_S,
    SMALL_INTERVAL_S,
    FlushTimer,
    PublishTimes,
    until_flush_s,
    until_publish_s,
)
from tests.proxy.processes.router_group import DEADLINE_S


@pytest.mark.parametrize(
    ("past", "publish", "flush", "small"),
    [
        (0.001, 0.019, 0.016, 0.099),
        (0.010, 0.010, 0.007, 0.090),
        (0.014, 0.006, 0.003, 0.086),
        (0.016, 0.024, 0.021, 0.084),  # a timer fired early
        (0.096, 0.024, 0.021, 0.104),
        (0.098, 0.022, 0.019, 0.102),
    ],
)
def test_hosts_publish_at_the_same_moments(
    monkeypatch: pytest.MonkeyPatch, past: float, publish: float, flush: float, small: float
) -> None:
    monkeypatch.setattr(publish_times.time, "time", lambda: 1_000_000 * SMALL_INTERVAL_S + past)
    assert until_publish_s() == pytest.approx(publish, abs=1e-6)
    assert until_publish_s(SMALL_INTERVAL_S) == pytest.approx(small, abs=1e-6)
    assert until_flush_s() == pytest.approx(flush, abs=1e-6)
    assert 0 < FLUSH_LEAD_S < PUBLISH_INTERVAL_S


async def test_small_changes_are_due_unless_an_urgent_one_comes_first() -> None:
    times = PublishTimes()
    assert not await times.wait(urgent=True)
    for _ in range(2):
        assert await times.wait(urgent=False)
        times.wake()
        assert not await times.wait(urgent=False)


async def test_small_changes_are_written_in_time_and_urgent_ones_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flushed = asyncio.Event()
    FlushTimer(lambda: False).start(flushed.set)
    await asyncio.wait_for(flushed.wait(), DEADLINE_S)
    monkeypatch.setattr(publish_times, "SMALL_INTERVAL_S", 1e9)
    looked, urgent = asyncio.Event(), asyncio.Event()
    flushed.clear()

    def has_urgent() -> bool:
        looked.set()
        return urgent.is_set()

    FlushTimer(has_urgent).start(flushed.set)
    await asyncio.wait_for(looked.wait(), DEADLINE_S)
    assert not flushed.is_set()
    urgent.set()
    await asyncio.wait_for(flushed.wait(), DEADLINE_S)

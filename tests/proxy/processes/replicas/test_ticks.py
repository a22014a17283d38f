"""When hosts publish."""

from __future__ import annotations

import pytest

from proxy.processes.replicas import ticks
from proxy.processes.replicas.ticks import (
    FLUSH_LEAD_S,
    PUBLISH_INTERVAL_S,
    SMALL_INTERVAL_S,
    PublishTimes,
    until_flush,
    until_publish,
)


@pytest.mark.parametrize(
    ("past", "publish", "flush"),
    [
        (0.001, 0.019, 0.016),
        (0.010, 0.010, 0.007),
        (0.016, 0.024, 0.001),  # a timer fired early
        (0.018, 0.022, 0.019),
    ],
)
def test_hosts_publish_at_the_same_moments(
    monkeypatch: pytest.MonkeyPatch, past: float, publish: float, flush: float
) -> None:
    monkeypatch.setattr(ticks.time, "time", lambda: 1_000_000 * PUBLISH_INTERVAL_S + past)
    assert until_publish() == pytest.approx(publish, abs=1e-6)
    assert until_flush() == pytest.approx(flush, abs=1e-6)
    assert 0 < FLUSH_LEAD_S < PUBLISH_INTERVAL_S


@pytest.mark.parametrize(("past", "left"), [(0.03, 0.07), (0.096, 0.104)])
def test_small_changes_wait_for_a_later_moment(
    monkeypatch: pytest.MonkeyPatch, past: float, left: float
) -> None:
    monkeypatch.setattr(ticks.time, "time", lambda: 1_000_000 * SMALL_INTERVAL_S + past)
    assert until_publish(SMALL_INTERVAL_S) == pytest.approx(left, abs=1e-6)


async def test_small_changes_are_due_unless_an_urgent_one_comes_first() -> None:
    times = PublishTimes()
    assert not await times.wait(urgent=True)
    for _ in range(2):
        assert await times.wait(urgent=False)
        times.wake()
        assert not await times.wait(urgent=False)

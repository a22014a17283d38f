"""When hosts publish."""

from __future__ import annotations

import pytest

from proxy.processes.replicas import ticks
from proxy.processes.replicas.ticks import (
    FLUSH_LEAD_S,
    PUBLISH_INTERVAL_S,
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

"""Rates of short and long requests."""

from __future__ import annotations

import pytest

from proxy.core.learned.traffic import MEMORY_S, Traffic


def test_rate_of_shorts_decays() -> None:
    traffic = Traffic()
    for _ in range(10):  # on a clock that does not advance
        traffic.record_short(5.0)
    assert traffic.shorts_per_s(5.0) == 10 / MEMORY_S
    assert traffic.shorts_per_s(20 * MEMORY_S) == pytest.approx(0, abs=1e-6)
    assert traffic.shorts_ever == 10


def test_long_share_is_prefill_time_over_elapsed_time() -> None:
    traffic = Traffic()
    for i in range(100):
        traffic.record_long(i * 10.0, prefill_s=4.0)
    assert traffic.workers_with_longs(995.0) == pytest.approx(0.4, rel=0.15)
    assert (traffic.longs_ever, traffic.long_s_ever) == (100, 400.0)


def test_longs_lately_is_true_for_a_minute() -> None:
    traffic = Traffic()
    assert not traffic.has_longs
    assert not traffic.has_recent_longs(0.0)
    traffic.record_long(0.0, 1.0)
    assert traffic.has_recent_longs(30.0)
    assert not traffic.has_recent_longs(90.0)

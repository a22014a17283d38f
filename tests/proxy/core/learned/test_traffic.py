"""The tide."""

from __future__ import annotations

import pytest

from proxy.core.learned.traffic import MEMORY_S, Traffic


def test_it_fades() -> None:
    traffic = Traffic()
    for i in range(100):
        traffic.saw_short(i / 100)
    assert traffic.shorts_per_s(20 * MEMORY_S) == pytest.approx(0, abs=1e-6)


def test_longs_keep_workers_for_a_share_of_their_time() -> None:
    traffic = Traffic()
    for i in range(100):
        traffic.saw_long(i * 10.0, prefill_s=4.0)
    assert traffic.long_share(995.0) == pytest.approx(0.4, rel=0.15)


def test_longs_are_late_news_for_a_minute() -> None:
    traffic = Traffic()
    assert not traffic.any_long
    assert not traffic.longs_lately(0.0)
    traffic.saw_long(0.0, 1.0)
    assert traffic.longs_lately(30.0)
    assert not traffic.longs_lately(90.0)


def test_a_clock_that_stands_still_is_no_matter() -> None:
    traffic = Traffic()
    for _ in range(10):
        traffic.saw_short(5.0)
        traffic.saw_long(5.0, 1.0)
    assert traffic.shorts_per_s(5.0) == 10 / MEMORY_S


def test_all_that_ever_came_is_counted() -> None:
    traffic = Traffic()
    for at in (0.0, 9 * MEMORY_S):
        traffic.saw_short(at)
        traffic.saw_long(at, 1.5)
    assert (traffic.shorts_ever, traffic.longs_ever, traffic.long_s_ever) == (2, 2, 3.0)

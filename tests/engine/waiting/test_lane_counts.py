"""The held time of a lane: exact for recent times, approximate for older ones."""

from __future__ import annotations

import random

import pytest

from vllm_sched.engine.waiting.lane_counts import OLD_POINTS, HeldTime


def test_held_time_of_a_lane_never_held_is_zero() -> None:
    assert HeldTime().seconds_since(0.0) == 0


def test_held_time_since_any_time() -> None:
    held = HeldTime()
    held.add(10.0, 11.0)
    held.add(11.0, 12.0)  # the next step
    held.add(20.0, 25.0)
    expected = {0.0: 7, 10.0: 7, 10.5: 6.5, 12.0: 5, 15.0: 5, 20.0: 5, 24.0: 1, 25.0: 0, 99.0: 0}
    assert {when: held.seconds_since(when) for when in expected} == pytest.approx(expected)


def test_clock_that_stops_or_goes_back_adds_no_held_time() -> None:
    held = HeldTime()
    held.add(10.0, 12.0)
    for start, end in ((12.0, 12.0), (5.0, 6.0), (11.0, 12.0)):
        held.add(start, end)
    assert held.seconds_since(0.0) == 2
    held.add(11.0, 13.0)
    assert held.seconds_since(0.0) == 3


def test_old_held_time_is_approximate_and_bounded() -> None:
    held, dice = HeldTime(), random.Random(3)
    spans, now = [], 0.0
    for _ in range(20_000):
        now += dice.random()
        spans.append((now, now + dice.random()))
        held.add(*spans[-1])
        now = spans[-1][1]
    assert len(held._times) == len(held._sums) <= 2 * OLD_POINTS
    for ago in (10.0, 60.0, 600.0, 6000.0, 20_000.0):
        when = now - ago
        exact = sum(max(end - max(start, when), 0.0) for start, end in spans)
        assert held.seconds_since(when) == pytest.approx(exact, rel=0.05)

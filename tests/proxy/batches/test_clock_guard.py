"""Trust in the time of day."""

from __future__ import annotations

import time

import pytest

from proxy.batches.clock_guard import DISTRUST_S, JUMP_S, ClockGuard

NIGHT_S = 8 * 3600.0


def test_suspend_is_trusted_and_a_clock_jump_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    awake_s = slept_s = set_s = 0.0
    clocks = {time.CLOCK_MONOTONIC: lambda: awake_s, time.CLOCK_BOOTTIME: lambda: awake_s + slept_s}
    monkeypatch.setattr(time, "clock_gettime", lambda clock: clocks[clock]())
    guard = ClockGuard(lambda: awake_s, lambda: awake_s + slept_s + set_s)
    for _ in range(3):
        awake_s += NIGHT_S
        slept_s += NIGHT_S
        assert guard.is_trusted()
    set_s += 2 * JUMP_S
    assert not guard.is_trusted()
    slept_s += DISTRUST_S  # distrust ends also during a suspend
    assert guard.is_trusted()

"""How often slots become free while requests wait.

Time without waiting requests is excluded: freed slots then measure demand, not speed.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

SAMPLE_S = 5.0
MAX_PAUSE_S = 2 * SAMPLE_S  # after a longer one, the samples are outdated


class SlotSample(NamedTuple):
    at: float = 0.0
    freed: int = 0  # since the start


class SlotRate:
    def __init__(self) -> None:
        self._freed = 0
        self._older = self._newer = SlotSample()
        self._last_waiting_at = -inf

    def record_waiting(self, now: float) -> None:
        self._last_waiting_at = now

    def record_freed(self, now: float) -> None:
        """Count a slot that became free while requests waited."""
        self._last_waiting_at = now
        self._freed += 1
        if now - self._newer.at > SAMPLE_S:
            self._older, self._newer = self._newer, SlotSample(now, self._freed)

    def restart_if_old(self, now: float) -> None:
        if now - self._newer.at > MAX_PAUSE_S:
            self._restart(now)

    def resume(self, now: float) -> None:
        """Resume after a pause without waiting requests; restart after a long one."""
        if (idle_s := now - self._last_waiting_at) > MAX_PAUSE_S:
            self._restart(now)
        else:
            older, newer = self._older, self._newer
            self._older = older._replace(at=older.at + idle_s)
            self._newer = newer._replace(at=newer.at + idle_s)

    def _restart(self, now: float) -> None:
        self._older = self._newer = SlotSample(now, self._freed)

    def wait_s(self, now: float, ahead: int, *, is_pause: bool) -> float | None:
        """Return the predicted wait behind `ahead` requests; None if the rate is unknown."""
        if is_pause:
            if now - self._last_waiting_at > MAX_PAUSE_S:
                return None
            now = self._last_waiting_at
        freed, seconds = self._freed - self._older.freed, now - self._older.at
        return (ahead + 1) * seconds / freed if freed > 0 and seconds > 0 else None

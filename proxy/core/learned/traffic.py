"""Recent traffic of a model, fading exponentially."""

from __future__ import annotations

from math import exp

MEMORY_S = 20.0
TICK_S = 0.5
MIN_RECENT_LONGS = 0.05  # rest of a long request, after three memories


class Traffic:
    def __init__(self) -> None:
        self._at = 0.0
        self._shorts = 0.0
        self._longs = 0.0
        self._long_s = 0.0
        self.shorts_ever = self.longs_ever = 0
        self.long_s_ever = 0.0

    def _fade(self, now: float) -> None:
        if now > self._at:
            left = exp((self._at - now) / MEMORY_S)
            self._shorts *= left
            self._longs *= left
            self._long_s *= left
            self._at = now

    @property
    def has_longs(self) -> bool:
        return self._longs > 0.0

    def record_short(self, now: float) -> None:
        if now - self._at > TICK_S:
            self._fade(now)
        self._shorts += 1.0
        self.shorts_ever += 1

    def record_long(self, now: float, prefill_s: float) -> None:
        self._fade(now)
        self._longs += 1.0
        self._long_s += prefill_s
        self.longs_ever += 1
        self.long_s_ever += prefill_s

    def record_remote(self, now: float, shorts: int, longs: int, long_s: float) -> None:
        self._fade(now)
        self._shorts += shorts
        self._longs += longs
        self._long_s += long_s

    def shorts_per_s(self, now: float) -> float:
        self._fade(now)
        return self._shorts / MEMORY_S

    def workers_with_longs(self, now: float) -> float:
        """Return how many workers long prefills occupy on average."""
        self._fade(now)
        return self._long_s / MEMORY_S

    def has_recent_longs(self, now: float) -> bool:
        if not self._longs:
            return False
        self._fade(now)
        return self._longs > MIN_RECENT_LONGS

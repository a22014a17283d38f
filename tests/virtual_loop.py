"""An event loop in virtual time: the clock jumps to the next timer when no socket has data."""

from __future__ import annotations

import asyncio
import selectors

# A loaded kernel may deliver what was sent over loopback a little later.
DELIVERY_S = 0.0005


class JumpingSelector(selectors.SelectSelector):
    """A selector that adds the time it should wait to its clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(DELIVERY_S)
        if not events:
            self.now += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Client and server run in one loop of this kind, and durations are exact."""

    def __init__(self) -> None:
        self._clock = JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

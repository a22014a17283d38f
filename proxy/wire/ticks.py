"""The server's timer: it checks deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from proxy.metrics.histogram import Histogram

# The short tick is only for the queue and short waits: an idle router's tick costs 150 us.
SWEEP_INTERVAL_S = 0.2
SHORT_TICK_S = 0.05
# A tick this late means a suspended process or machine.
SUSPENDED_LAG_S = 1.0


class Ticks:
    """Calls `check` at each tick with the time and whether a sweep is due."""

    def __init__(
        self,
        check: Callable[[float, bool], None],
        needs_short: Callable[[], bool],
        clock: Callable[[], float],
        lag: Histogram,
    ) -> None:
        self._check = check
        self._needs_short = needs_short
        self._clock = clock
        self._lag = lag
        self.timer: asyncio.TimerHandle | None = None
        self.due = 0.0  # monotonic time
        self.next_sweep = 0.0
        self._is_short = False  # the timer uses SHORT_TICK_S
        self._skipped = False

    def start(self) -> None:
        if self.timer is None:
            self._schedule_tick(SWEEP_INTERVAL_S)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def shorten(self) -> None:
        """Use the short period, because a request waits."""
        if not self._is_short and self.timer is not None:
            self.timer.cancel()
            self._is_short = True
            self._schedule_tick(SHORT_TICK_S)

    def _schedule_tick(self, pause_s: float) -> None:
        self.due = time.monotonic() + pause_s
        self.timer = asyncio.get_running_loop().call_later(pause_s, self.tick)

    def tick(self) -> None:
        """Check the deadlines that have passed."""
        late_s = max(time.monotonic() - self.due, 0.0)
        self._lag.observe(late_s)
        self._is_short = self._needs_short()
        self._schedule_tick(SHORT_TICK_S if self._is_short else SWEEP_INTERVAL_S)
        # Data that arrived during a suspension is unread: skip one tick's deadlines. Never skip two
        # in a row, or an overloaded process would enforce none.
        self._skipped = late_s > SUSPENDED_LAG_S and not self._skipped
        if self._skipped:
            return
        now = self._clock()
        sweep = not self._is_short or now >= self.next_sweep
        if sweep:
            self.next_sweep = now + SWEEP_INTERVAL_S
        self._check(now, sweep)

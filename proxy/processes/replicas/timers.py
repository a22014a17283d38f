"""Timers for what happens with every request: few timers of the loop serve many starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf


class EarliestTimer:
    """Calls a function at the earliest time that it was started for."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._handle: asyncio.Handle | None = None
        self._at = inf  # uvloop's handle of a short delay does not know it

    def start(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        if (at := loop.time() + delay_s) < self._at:
            if self._handle is not None:
                self._handle.cancel()
            self._handle, self._at = loop.call_at(at, self._run), at

    def _run(self) -> None:
        self._handle, self._at = None, inf
        self._call()


class ReplyDeadline:
    """Calls a function a while after the last start, if it was not started again."""

    def __init__(self, timeout_s: float, call: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._call = call
        self._started_at = 0.0
        self._runs = False

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._started_at = loop.time()
        if not self._runs:
            self._runs = True
            loop.call_later(self._timeout_s, self._check)

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = self._started_at + self._timeout_s - loop.time()
        if left_s > 0.0:
            loop.call_later(left_s, self._check)
        else:
            self._runs = False
            self._call()

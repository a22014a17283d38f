"""CPU time for the client: real-time priority, and a watch for times without CPU."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Self

WATCH_INTERVAL_S: Final = 0.02


@contextmanager
def realtime_priority() -> Iterator[None]:
    """Run with real-time priority if the kernel allows it.

    Otherwise a busy machine delays the client, which looks like a delay of the worker.
    """
    try:
        # Reset on fork: child processes get normal priority.
        first = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, first, os.sched_param(1))
    except (AttributeError, OSError):  # another system or no permission; StallWatch reports stalls
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class StallWatch:
    """Records how long this process had no CPU, which would look like a slow worker."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            asleep = time.perf_counter()
            await asyncio.sleep(WATCH_INTERVAL_S)
            late_s = time.perf_counter() - asleep - WATCH_INTERVAL_S
            self.longest_s = max(self.longest_s, late_s)

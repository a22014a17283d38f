"""Deletes expired data of batches once an hour, one slice per turn of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from proxy.batches.clock_guard import ClockGuard
from proxy.batches.storage.store import Store
from proxy.batches.storage.store_thread import StoreThread

PURGE_INTERVAL_S = 3600.0


class Purge:
    def __init__(
        self, store: StoreThread, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._store = store
        self._clock, self._wall = clock, wall
        self._clock_guard = ClockGuard(clock, wall)
        self._next_at = -inf

    def make_due(self) -> None:
        self._next_at = -inf

    async def run_if_due(self, *, is_leader: bool) -> bool:
        """Delete a slice if this process leads; return True if there is more to delete."""
        is_trusted = self._clock_guard.is_trusted()
        if not is_leader or self._clock() < self._next_at:
            return False
        self._next_at, has_more = self._clock() + PURGE_INTERVAL_S, True
        try:
            if is_trusted:
                has_more = await self._store(Store.purge, self._wall())
            else:
                has_more = await self._store(Store.shrink)
        finally:  # also due after an error
            if has_more:
                self._next_at = -inf
        return has_more

"""The disk that a router in this process keeps its batches on, which fills up."""

from __future__ import annotations

from proxy.batches.service import Batches
from proxy.batches.store import Store
from tests.proxy.wire.site import eventually

ROOM = 1 << 20  # pages


class Disk:
    """What there is room on, or is not: SQLite says of a bound what it says of a full disk."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def fill(self) -> None:
        """Leave no room for anything new."""
        await self._batches.keeper(_limit, 1)  # no more than it has

    async def clear(self) -> None:
        """Make room."""
        await self._batches.keeper(_limit, ROOM)

    async def is_missed(self, within_s: float) -> None:
        """Have no room until somebody has wanted it."""
        lane = self._batches.lane
        await self.fill()
        await eventually(lambda: "no room" in lane.paused, within=within_s)
        await self.clear()


def _limit(store: Store, pages: int) -> None:
    store.connection.execute(f"PRAGMA max_page_count = {pages}")

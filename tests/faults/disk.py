"""The disk that a router keeps its batches on, which fills up.

SQLite says of a bound on its pages what it says of a full disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from proxy.batches.service import Batches
from proxy.batches.storage.store import Store
from tests.proxy.wire.site import eventually

ROOM = 1 << 20  # pages
NONE = 1  # means no more than there are
# Runs in the router's processes: see `names`.
CODE = """\
from pathlib import Path

from proxy.batches.storage.store_thread import StoreThread

call = StoreThread.__call__


async def on_that_disk(self, what, *args, **named):
    pages = {none} if Path({flag!r}).exists() else {room}

    def do(store):
        store.connection.execute(f"PRAGMA max_page_count = {{pages}}")
        return what(store, *args, **named)

    return await call(self, do)


StoreThread.__call__ = on_that_disk
"""
# In the router's log, each time that the lane pauses for it; not what uploads are told.
SEEN = "batches: paused: the disk of"


class Disk(Protocol):
    """Whichever it is."""

    async def fill(self) -> None:
        """Leave no room for anything new."""

    async def clear(self) -> None:
        """Make room."""


class DiskHere:
    """That of a router in this process."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def fill(self) -> None:
        """Leave no room for anything new."""
        await self._batches.keeper(_limit, NONE)

    async def clear(self) -> None:
        """Make room."""
        await self._batches.keeper(_limit, ROOM)

    async def is_missed(self, within_s: float) -> None:
        """Have no room until somebody has wanted it."""
        lane = self._batches.lane
        await self.fill()
        await eventually(lambda: "is full" in lane.paused, within=within_s)
        await self.clear()


class DiskThere:
    """That of a router in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._flag = folder / "no-room"
        self.code = CODE.format(flag=str(self._flag), none=NONE, room=ROOM)

    async def fill(self) -> None:
        """Leave no room for anything new."""
        self._flag.touch()

    async def clear(self) -> None:
        """Make room."""
        self._flag.unlink(missing_ok=True)


def _limit(store: Store, pages: int) -> None:
    store.connection.execute(f"PRAGMA max_page_count = {pages}")

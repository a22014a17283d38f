"""A full disk under the router's batches.

SQLite reports a page limit as a full disk.
"""

from __future__ import annotations

from pathlib import Path

from proxy.batches.service import Batches
from proxy.batches.storage.store import Store
from tests.proxy.wire.site import eventually

UNLIMITED_PAGES = 1 << 20  # pages
NO_NEW_PAGES = 1  # below the current number: no new pages
# Runs in the router's processes, see `dns`.
CODE = """\
from pathlib import Path

from proxy.batches.storage.store_thread import StoreThread

call = StoreThread.__call__


async def on_full_disk(self, call_store, *args, **named):
    pages = {none} if Path({flag!r}).exists() else {room}

    def do(store):
        store.backend.execute(f"PRAGMA max_page_count = {{pages}}")
        return call_store(store, *args, **named)

    return await call(self, do)


StoreThread.__call__ = on_full_disk
"""
# Logged each time that batches pause for a full disk.
FULL_DISK_LINE = "batches: paused: the disk of"


class LocalDisk:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def fill(self) -> None:
        await self._batches.store(_limit, NO_NEW_PAGES)

    async def clear(self) -> None:
        await self._batches.store(_limit, UNLIMITED_PAGES)

    async def fill_until_noticed(self, within_s: float) -> None:
        """Fill the disk until the batches have paused for it."""
        scheduler = self._batches.scheduler
        await self.fill()
        await eventually(lambda: "is full" in scheduler.paused, within=within_s)
        await self.clear()


class ProcessDisk:
    def __init__(self, folder: Path) -> None:
        self._flag = folder / "no-room"
        self.code = CODE.format(flag=str(self._flag), none=NO_NEW_PAGES, room=UNLIMITED_PAGES)

    async def fill(self) -> None:
        self._flag.touch()

    async def clear(self) -> None:
        self._flag.unlink(missing_ok=True)


Disk = LocalDisk | ProcessDisk


def _limit(store: Store, pages: int) -> None:
    store.backend.execute(f"PRAGMA max_page_count = {pages}")

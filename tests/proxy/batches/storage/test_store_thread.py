"""The store's thread: calls run in order, and cancelled calls are dropped."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path

from proxy.batches.storage.database import StoreLimits
from proxy.batches.storage.sqlite import SqliteBackend
from proxy.batches.storage.store import Store
from proxy.batches.storage.store_thread import StoreThread
from tests.proxy.batches.harness import busy


class LargeObject:
    """An object of which a weak reference can exist."""


async def test_cancelled_call_releases_its_arguments_at_once(tmp_path: Path) -> None:
    store_thread = StoreThread(lambda: SqliteBackend(tmp_path), 60.0, StoreLimits())
    await store_thread.open()
    seen: list[object] = []

    def record_type(_: Store, thing: object) -> None:
        seen.append(type(thing))

    thing = LargeObject()
    reference = weakref.ref(thing)
    with busy(store_thread):
        first = asyncio.create_task(store_thread(record_type, thing))
        second = asyncio.create_task(store_thread(record_type, 1))
        del thing
        await asyncio.sleep(0)
        assert reference() is not None
        first.cancel()
        await asyncio.wait([first])
        del first  # its traceback refers to the object
        assert reference() is None
    await second
    assert seen == [int]
    await store_thread.close()

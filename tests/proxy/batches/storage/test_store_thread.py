"""The store's thread: what it is told is done in turn, and what is given up is let go of."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path

from proxy.batches.storage.database import StoreLimits
from proxy.batches.storage.store import Store
from proxy.batches.storage.store_thread import StoreThread
from tests.proxy.batches.office import busy


class Thing:
    """Something large."""


async def test_what_is_given_up_is_not_kept_until_its_turn(tmp_path: Path) -> None:
    keeper = StoreThread(tmp_path, 60.0, StoreLimits())
    await keeper.open()
    seen: list[object] = []

    def look(_: Store, thing: object) -> None:
        seen.append(type(thing))

    thing = Thing()
    left = weakref.ref(thing)
    with busy(keeper):
        first = asyncio.create_task(keeper(look, thing))
        second = asyncio.create_task(keeper(look, 1))
        del thing
        await asyncio.sleep(0)
        assert left() is not None
        first.cancel()
        await asyncio.wait([first])
        del first  # whose traceback has it
        assert left() is None
    await second
    assert seen == [int]
    await keeper.close()

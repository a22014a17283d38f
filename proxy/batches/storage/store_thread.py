"""The store's own thread: what waits for a disk is never done in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from proxy.batches.storage.disk import disk_errors, gone
from proxy.batches.storage.store import Store, StoreLimits
from proxy.errors import ProxyError

Given = ParamSpec("Given")
Got = TypeVar("Got")


class StoreThread:
    """Does what it is told to a store, one thing after the other."""

    def __init__(self, path: Path, keep_s: float, bounds: StoreLimits) -> None:
        self._path = path
        self._keep_s = keep_s
        self._bounds = bounds
        self._store: Store | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    async def open(self) -> None:
        """Open the store; raises `ProxyError`."""
        loop = asyncio.get_running_loop()
        self._store = await loop.run_in_executor(
            self._thread, Store, self._path, self._keep_s, self._bounds
        )

    async def reopen(self) -> bool:
        """Open the database anew if another one is in its place; whether it did.

        Raises `DiskError` while the folder is gone.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._reopen)

    def _reopen(self) -> bool:
        store = self._store
        if store is None or store.is_in_place:
            return False
        if not self._path.is_dir():  # as at a mount that is missing: made at the start only
            raise gone(self._path)
        self._store = Store(self._path, self._keep_s, self._bounds)
        store.close()
        return True

    def _in_place(self) -> Store:
        """Return the store; raises `DiskError` if its database is not in its folder any more."""
        store = self._store
        if store is None:
            raise ProxyError("the store of batches is closed")
        if not store.is_in_place:
            raise gone(self._path)
        return store

    def keep_for(self, keep_s: float, bounds: StoreLimits) -> None:
        """Keep things for so long, and so many, from now on."""
        self._keep_s, self._bounds = keep_s, bounds
        if (store := self._store) is not None:
            store.keep_s, store.bounds = keep_s, bounds

    async def close(self) -> None:
        """Close it, once what was begun is done."""
        if self._store is not None:
            store, self._store = self._store, None
            await asyncio.get_running_loop().run_in_executor(self._thread, store.close)
        self._thread.shutdown(wait=False)

    async def __call__(
        self,
        what: Callable[Concatenate[Store, Given], Got],
        *args: Given.args,
        **named: Given.kwargs,
    ) -> Got:
        """Do it: `await keep(Store.add_file, tenant, ...)`; raises `DiskError`."""
        if self._store is None:
            raise ProxyError("the store of batches is closed")
        loop = asyncio.get_running_loop()
        todo = [lambda: what(self._in_place(), *args, **named)]

        def do() -> Got:
            with disk_errors(self._path):
                got = todo.pop()()
            self._in_place()  # or what was written is in a file that was removed meanwhile
            return got

        try:
            return await loop.run_in_executor(self._thread, do)
        finally:
            todo.clear()  # what is given up lies in the thread's line until its turn, emptied

"""The store's thread: disk operations never block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from proxy.batches.storage.database import StoreLimits
from proxy.batches.storage.disk import disk_errors, gone
from proxy.batches.storage.store import Store
from proxy.errors import ProxyError

Given = ParamSpec("Given")
Got = TypeVar("Got")


class StoreThread:
    """Runs store operations one at a time in a thread."""

    def __init__(self, path: Path, keep_s: float, bounds: StoreLimits) -> None:
        self._path = path
        self._keep_s = keep_s
        self._bounds = bounds
        self._store: Store | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    async def open(self) -> None:
        """Open the store; raise `ProxyError` on failure."""
        loop = asyncio.get_running_loop()
        self._store = await loop.run_in_executor(
            self._thread, Store, self._path, self._keep_s, self._bounds
        )

    async def reopen(self) -> bool:
        """Open the database anew if the file was replaced; return True if it was.

        Raises `DiskError` while the folder is missing.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._reopen)

    def _reopen(self) -> bool:
        store = self._store
        if store is None or store.is_in_place:
            return False
        if not self._path.is_dir():  # a mount may be missing; the folder is created only at startup
            raise gone(self._path)
        self._store = Store(self._path, self._keep_s, self._bounds)
        store.close()
        return True

    def _in_place(self) -> Store:
        store = self._store
        if store is None:
            raise ProxyError("the batch store is closed")
        if not store.is_in_place:
            raise gone(self._path)
        return store

    def keep_for(self, keep_s: float, bounds: StoreLimits) -> None:
        """Apply a new retention time and new limits."""
        self._keep_s, self._bounds = keep_s, bounds
        if (store := self._store) is not None:
            store.keep_s, store.bounds = keep_s, bounds

    async def close(self) -> None:
        """Close the store after pending operations."""
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
        """Run an operation: `await store(Store.add_file, tenant, ...)`; raises `DiskError`."""
        if self._store is None:
            raise ProxyError("the batch store is closed")
        loop = asyncio.get_running_loop()
        todo = [lambda: what(self._in_place(), *args, **named)]

        def do() -> Got:
            with disk_errors(self._path):
                got = todo.pop()()
            self._in_place()  # raises if the file was removed during the write
            return got

        try:
            return await loop.run_in_executor(self._thread, do)
        finally:
            todo.clear()  # a cancelled operation stays in the thread's queue: free its arguments

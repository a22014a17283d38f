"""The store's thread: disk operations never block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from proxy.batches.storage.backend import Backend, BatchDuties
from proxy.batches.storage.database import StoreLimits
from proxy.batches.storage.store import Store
from proxy.errors import ProxyError

P = ParamSpec("P")
T = TypeVar("T")


class StoreThread:
    def __init__(self, backend: Callable[[], Backend], keep_s: float, limits: StoreLimits) -> None:
        self._backend = backend
        self._keep_s = keep_s
        self._limits = limits
        self._store: Store | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    async def open(self) -> None:
        """Open the store; raise `ProxyError` on failure."""
        backend = await asyncio.get_running_loop().run_in_executor(self._thread, self._backend)
        self._store = Store(backend, self._keep_s, self._limits)

    @property
    def is_shared(self) -> bool:
        return self._opened_store().backend.is_shared

    async def renew_duties(self) -> BatchDuties:
        """Return this process's duties; open the database anew if it was replaced or lost."""
        backend = self._opened_store().backend

        def renew() -> BatchDuties:
            with backend.errors():
                return backend.renew_duties()

        return await asyncio.get_running_loop().run_in_executor(self._thread, renew)

    def _opened_store(self) -> Store:
        if self._store is None:
            raise ProxyError("the batch store is closed")
        return self._store

    def keep_for(self, keep_s: float, limits: StoreLimits) -> None:
        self._keep_s, self._limits = keep_s, limits
        if (store := self._store) is not None:
            store.keep_s, store.limits = keep_s, limits

    async def close(self) -> None:
        """Close the store after pending operations."""
        if self._store is not None:
            store, self._store = self._store, None
            await asyncio.get_running_loop().run_in_executor(self._thread, store.close)
        self._thread.shutdown(wait=False)

    async def __call__(
        self,
        operation: Callable[Concatenate[Store, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run an operation: `await store(Store.add_file, tenant, ...)`; raises `DiskError`."""
        self._opened_store()
        loop = asyncio.get_running_loop()
        pending = [lambda store: operation(store, *args, **kwargs)]

        def run() -> T:
            store = self._opened_store()
            with store.backend.errors():
                store.backend.check()
                result = pending.pop()(store)
                store.backend.check()  # raises if the file was removed during the write
            return result

        try:
            return await loop.run_in_executor(self._thread, run)
        finally:
            pending.clear()  # a cancelled operation stays in the thread's queue: free its arguments

"""The batch service of one router: starts and stops the store, the API and the scheduler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from proxy.batches.api import BatchApi
from proxy.batches.scheduler import BatchScheduler
from proxy.batches.storage.backend import Backend
from proxy.batches.storage.database import StoreLimits
from proxy.batches.storage.store_thread import StoreThread
from proxy.config.batches import BatchesConfig
from proxy.wire.server import WireServer

logger = logging.getLogger(__name__)

DAY_S = 86_400.0


class Batches:
    """The batch service.

    Start it before the router listens; stop it before the data path closes.
    """

    def __init__(
        self, wire: WireServer, settings: BatchesConfig, wall: Callable[[], float] = time.time
    ) -> None:
        self.store = StoreThread(partial(_open_backend, settings), *_retention_and_limits(settings))
        self.scheduler = BatchScheduler(wire, self.store, settings, wall)
        self._api = BatchApi(wire, self.store, self.scheduler, settings, wall)
        self._wire = wire
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the store and start the scheduler; raise `ProxyError` if the store is unusable."""
        await self.store.open()
        self._wire.extension = self._api
        self._wire.metrics.batches = self.scheduler.counts
        self._task = asyncio.create_task(self.scheduler.run(), name="batches")

    async def stop(self) -> None:
        """Cut open API requests, cancel lines in flight, save results and close the store."""
        if self._task is None:
            return
        for request in list(self._wire.local_requests):
            request.end_for_shutdown(self._wire.clock())
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        with suppress(Exception):  # without saved results the lines run again
            await self.scheduler.save()
        await self.store.close()

    def reconfigure(self, settings: BatchesConfig) -> None:
        """Apply new settings; the store cannot change."""
        self.scheduler.settings = self._api.settings = settings
        self.store.keep_for(*_retention_and_limits(settings))
        self.scheduler.purge_soon()


def _open_backend(settings: BatchesConfig) -> Backend:
    if settings.path is not None:
        from proxy.batches.storage.sqlite import SqliteBackend

        return SqliteBackend(settings.path)
    from proxy.batches.storage.postgres import PostgresBackend

    return PostgresBackend(settings.database or "", settings.database_password_file)


def _retention_and_limits(settings: BatchesConfig) -> tuple[float, StoreLimits]:
    limits = StoreLimits(
        settings.max_bytes, settings.max_bytes_per_tenant, settings.max_active_per_tenant
    )
    return settings.keep_days * DAY_S, limits

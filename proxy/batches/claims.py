"""The part of this process in the batches, and the lines that it may run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from proxy.batches.storage.backend import Part
from proxy.batches.storage.store import Store

if TYPE_CHECKING:
    from proxy.batches.in_flight import BatchProgress
    from proxy.batches.storage.store_thread import StoreThread
    from proxy.batches.types import LineResult
    from proxy.wire.server import WireServer

IDLE_CLAIM_S = 10.0  # after it, other processes may run lines that were not sent


class Claims:
    """Claims on lines of a database that several processes use; a folder has none."""

    def __init__(self, store: StoreThread) -> None:
        self._store = store
        self._session = 0
        self.part = Part(runs=False, leads=False, session=0, lost=False)

    @property
    def are_old(self) -> bool:
        """True if others may have led, or claimed lines, since `keep`."""
        return self.part.session != self._session

    def forget(self) -> None:
        """Release all claims in the next turn."""
        self._session = 0

    async def keep(self, batches: Iterable[BatchProgress], unsaved: list[LineResult]) -> None:
        """Release all other lines: a claim may have been made as the connection was lost."""
        known = {(result.batch, result.number) for result in unsaved}
        known |= {(job.batch, job.number) for batch in batches for job in batch.jobs}
        await self._store(Store.release_except, known)
        self._session = self.part.session

    async def share(self, running: BatchProgress, wire: WireServer) -> None:
        """Read lines anew, which others may have released, and release lines that are not sent."""
        if not self._store.is_shared:
            return
        running.read_all = wire.draining
        is_idle = wire.draining or wire.clock() >= running.active_at + IDLE_CLAIM_S
        if is_idle and (idle := running.pop_idle(everything=wire.draining)):
            running.read_all = True  # others may claim them first
            await self._store(Store.release, running.batch, [job.number for job in idle])

"""A process's duties in the batches, and the lines that it may run."""

from __future__ import annotations

from collections.abc import Iterable

from proxy.batches.in_flight import BatchProgress
from proxy.batches.storage.backend import BatchDuties
from proxy.batches.storage.store import Store
from proxy.batches.storage.store_thread import StoreThread
from proxy.batches.types import LineResult
from proxy.wire.server import WireServer

IDLE_CLAIM_S = 10.0  # after it, other processes may run lines that were not sent


class Claims:
    """Claims on lines of a database that several processes use; a folder has none."""

    def __init__(self, store: StoreThread) -> None:
        self._store = store
        self._session = 0
        self.duties = BatchDuties(sends_lines=False, leads=False, session=0, lost_claims=False)

    @property
    def may_be_outdated(self) -> bool:
        """True if others may have led, or claimed lines, since `release_unknown`."""
        return self.duties.session != self._session

    def release_all_next_turn(self) -> None:
        self._session = 0

    async def release_unknown(
        self, batches: Iterable[BatchProgress], unsaved: list[LineResult]
    ) -> None:
        """Release lines that are not known here; their claim outlived a lost connection."""
        in_use = {(result.batch, result.number) for result in unsaved}
        in_use |= {(job.batch, job.number) for batch in batches for job in batch.unfinished_jobs}
        await self._store(Store.release_other_lines, in_use)
        self._session = self.duties.session

    async def release_idle(self, progress: BatchProgress, wire: WireServer) -> None:
        """Release lines that wait too long, and read lines anew, which others may have released."""
        if not self._store.is_shared:
            return
        progress.read_all = wire.draining
        is_idle = wire.draining or wire.clock() >= progress.active_at + IDLE_CLAIM_S
        if is_idle and (idle := progress.pop_idle(everything=wire.draining)):
            progress.read_all = True  # others may claim them first
            await self._store(Store.release_lines, progress.batch, [job.number for job in idle])

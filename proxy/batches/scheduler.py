"""Batch scheduler: sends lines when workers have spare capacity, and completes each batch.

One process leads, however many routers share the store. It starts and ends batches, and runs one
slice of long operations and of hourly deletion in each turn. All processes that share a database
send lines. The store is read every second and on notification.

A line refused with 429 or 503 is sent again until its batch expires. A line whose worker failed is
sent at most `MAX_TRIES` times. Lines in flight at shutdown run again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from math import inf
from sys import maxsize

from proxy.batches.claims import Claims
from proxy.batches.in_flight import BatchProgress
from proxy.batches.line_request import LineRequest
from proxy.batches.maintenance import Maintenance, end_batch, validate_input
from proxy.batches.purge import Purge
from proxy.batches.spare_capacity import has_spare_capacity, within_limits
from proxy.batches.storage.store import Store
from proxy.batches.storage.store_thread import StoreThread
from proxy.batches.types import Batch, DiskError, LineJob, LineResult, Status
from proxy.config.batches import BatchesConfig
from proxy.core.tenants.tenants import Tenant
from proxy.metrics.batch_counts import COMPLETED, FAILED, SENT_AGAIN, BatchCounts
from proxy.wire.server import WireServer

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
CAPACITY_CHECK_S = 0.05  # between two capacity checks while lines are ready
ERROR_PAUSE_S = 5.0
MAX_LINES_AHEAD = 64  # lines of one batch that are read ahead
MAX_BATCHES_AHEAD = 8  # batches of one tenant with lines read ahead
MAX_TRIES = 3  # attempts of a line whose workers fail
TENANT_GONE = "its tenant has no API key any more"
NO_STORAGE = (
    "no storage for results: its tenant reached router.batches.max_bytes_per_tenant, or all "
    "tenants reached max_bytes; raise the limit, or delete files"
)


class BatchScheduler:
    """Runs the batches of one store; `wall` returns the time of day."""

    def __init__(
        self,
        wire: WireServer,
        store: StoreThread,
        settings: BatchesConfig,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.counts = BatchCounts()
        self.paused = ""  # reason why the scheduler is paused; empty if it runs
        self._wire = wire
        self._store = store
        self._wall = wall
        self._purge = Purge(store, wire.clock, wall)
        self._claims = Claims(store)
        self._running: dict[str, BatchProgress] = {}
        self._maintenance = Maintenance(store)
        self._has_more_work = False  # the next turn need not wait
        self._unsaved: list[LineResult] = []
        self._full: set[str] = set()  # tenants without storage left for results
        self._turns: dict[str, int] = {}
        self._numbers = count(1)
        self._wakeup = asyncio.Event()
        self._turn_lock = asyncio.Lock()
        self._next_poll = self._paused_until = -inf

    @property
    def is_leader(self) -> bool:
        """True if this process validates and ends batches."""
        return self._claims.duties.leads

    @property
    def in_flight(self) -> int:
        return sum(len(progress.requests) for progress in self._running.values())

    def wake(self) -> None:
        """Read the batches anew at once."""
        self._next_poll = -inf
        self._wakeup.set()

    def purge_soon(self) -> None:
        """Delete expired data in the next turn."""
        self._purge.make_due()
        self._paused_until = -inf
        self.wake()

    async def run(self) -> None:
        """Run until cancelled; without a folder's lock, turns do nothing."""
        try:
            while True:
                await self.turn()
                if self._has_more_work:
                    await asyncio.sleep(0)
                    continue
                waiting = any(progress.ready for progress in self._running.values())
                pause = CAPACITY_CHECK_S if waiting else POLL_INTERVAL_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wakeup.wait()
                self._wakeup.clear()
        finally:
            self.stop()

    def stop(self) -> None:
        """Cancel all lines; lines without a result run again later."""
        now = self._wire.clock()
        for progress in self._running.values():
            progress.cancel_requests(now)
        self._running = {}
        self._maintenance.clear()
        self._claims.release_all_next_turn()

    async def _renew_duties(self) -> bool:
        """Return True if this process may send lines."""
        duties = self._claims.duties = await self._store.renew_duties()
        if duties.lost_claims or duties.replaced:
            self.stop()
        if duties.replaced:
            self._unsaved.clear()  # they belong to the replaced database
            logger.warning("batches: the database was replaced")
        if self._claims.may_be_outdated:
            self._maintenance.begin(duties.session)
            await self._claims.release_unknown(self._running.values(), self._unsaved)
        return duties.sends_lines

    async def turn(self) -> None:
        async with self._turn_lock:
            await self._turn()

    async def _turn(self) -> None:
        clock = self._wire.clock
        self._has_more_work = False
        if clock() < self._paused_until:
            return
        try:
            if not await self._renew_duties():
                self._resume()
                return
            # First, because deletion may free space for the rest.
            has_more_to_purge = await self._purge.run_if_due(is_leader=self.is_leader)
            await self.save()
            if clock() >= self._next_poll:
                self._next_poll = clock() + POLL_INTERVAL_S
                await self._read_batches()
            self._full = await self._store(Store.full_tenants)
            if (message := await self._maintenance.run_next_slice(self._full)) is not None:
                logger.info("%s", message)
                await self._read_batches()
            await self._read_lines()
            self._resume()
            self._send_lines()
            next_operation = self._maintenance.next_operation(self._full)
            self._has_more_work = has_more_to_purge or next_operation is not None
        except DiskError as error:
            self._pause(str(error))
        except Exception as error:  # the scheduler must survive any error
            why = f"{type(error).__name__}: {error}"
            if why != self.paused:  # log the traceback once, not at every attempt
                logger.exception("batches: a turn failed")
            self._pause(why)

    def _resume(self) -> None:
        if self.paused:
            logger.info("batches: resumed")
            self.paused = ""
            self.counts.paused = False

    def _pause(self, why: str) -> None:
        if why != self.paused:
            logger.error("batches: paused: %s", why)
            self.paused = why
            self.counts.paused = True
        self._paused_until = self._wire.clock() + ERROR_PAUSE_S

    # Batches

    async def _read_batches(self) -> None:
        batches = await self._store(Store.active_batches)
        counted = batches if self.is_leader else ()
        self.counts.active = Counter(batch.status.value for batch in counted)
        ids = {batch.id for batch in batches}
        for missing in self._running.keys() - ids:
            self._cancel_lines(missing)
        for batch in batches:
            await self._advance_batch(batch)

    async def _advance_batch(self, batch: Batch) -> None:
        now = self._wall()
        if batch.status is Status.CANCELLING:
            await self._end_batch(batch, Status.CANCELLED)
        elif now >= batch.expires:
            await self._end_batch(batch, Status.EXPIRED)
        elif batch.id in self._maintenance:
            pass  # its input is being validated, or it is being completed
        elif batch.status is Status.VALIDATING:
            if self.is_leader:
                max_lines, wall = self.settings.max_lines, self._wall
                self._maintenance.add(
                    batch, lambda store: validate_input(store, batch, max_lines, wall)
                )
        elif self.is_leader and batch.completed + batch.failed >= batch.total:
            await self._end_batch(batch, Status.COMPLETED)
        elif batch.id not in self._running:
            self._running[batch.id] = BatchProgress(batch)
        else:
            await self._claims.release_idle(self._running[batch.id], self._wire)

    async def _end_batch(self, batch: Batch, status: Status) -> None:
        if self._maintenance.is_ending(batch.id):
            return
        self._cancel_lines(batch.id)
        await self.save()
        if self.is_leader:
            self._maintenance.add(
                batch, lambda store: end_batch(store, batch, status, self._wall), ends=True
            )

    def _cancel_lines(self, batch_id: str) -> None:
        progress = self._running.pop(batch_id, None)
        if progress is not None:
            progress.cancel_requests(self._wire.clock())

    # Lines

    async def _read_lines(self) -> None:
        read_ahead = Counter(x.batch.tenant for x in self._running.values() if x.ready)
        for progress in list(self._running.values()):
            tenant = progress.batch.tenant
            wants_lines = not progress.ready and not progress.read_all
            if wants_lines and read_ahead[tenant] < MAX_BATCHES_AHEAD:
                read_ahead[tenant] += 1
                jobs = await self._store(
                    Store.next_jobs, progress.batch, progress.last_read, MAX_LINES_AHEAD
                )
                progress.ready += jobs
                progress.read_all = not jobs
                if jobs:
                    progress.last_read = jobs[-1].number
                    progress.active_at = self._wire.clock()
            may_end = progress.is_done and self.is_leader
            if may_end and await self._store(Store.is_complete, progress.batch):
                await self._end_batch(progress.batch, Status.COMPLETED)

    def _send_lines(self) -> None:
        """Send as many lines as allowed: tenants in turn, and each tenant's batches in turn."""
        wire = self._wire
        waiting = sort_by_turn((x for x in self._running.values() if x.ready), self._turns)
        room = self.settings.concurrency - self.in_flight
        refused_sizes: dict[str, int] = {}
        while waiting and room > 0 and not wire.draining:
            now = wire.clock()
            progress = waiting.popleft()
            tenant = wire.router.tenants.get(progress.batch.tenant)
            if (job := self._next_line(now, progress, tenant, refused_sizes)) is None:
                continue
            progress.turn = self._turns[progress.batch.tenant] = next(self._numbers)
            progress.ready.remove(job)
            progress.active_at = now
            self._send_line(now, progress, job, tenant)
            room -= 1
            if progress.ready:
                waiting.append(progress)
            waiting = sort_by_turn(waiting, self._turns)
        self.counts.in_flight = self.in_flight

    def _next_line(
        self,
        now: float,
        progress: BatchProgress,
        tenant: Tenant | None,
        refused_sizes: dict[str, int],
    ) -> LineJob | None:
        """Return the first line that fits; note the least size that does not."""
        if self._check_hold(progress, tenant):
            return None
        if now < progress.paused_until or (tenant is not None and not within_limits(tenant, now)):
            return None
        for job in progress.ready:
            size = len(job.body)
            if size < refused_sizes.get(job.model, maxsize):
                if has_spare_capacity(self._wire.router, job.model, now, size):
                    return job
                refused_sizes[job.model] = size
        return None

    def _check_hold(self, progress: BatchProgress, tenant: Tenant | None) -> bool:
        """Return whether no line of a batch may be sent; log a new reason."""
        why_held = ""
        if tenant is None and not self._wire.router.tenants.open:
            why_held = TENANT_GONE
        elif progress.batch.tenant in self._full:
            why_held = NO_STORAGE
        if why_held and why_held != progress.why_held:
            logger.warning("batch %s: held: %s", progress.batch.id, why_held)
        progress.why_held = why_held
        return bool(why_held)

    def _send_line(
        self, now: float, progress: BatchProgress, job: LineJob, tenant: Tenant | None
    ) -> None:
        on_end = partial(self._line_ended, progress)
        request = LineRequest(self._wire, job, progress.batch.endpoint, tenant, on_end)
        progress.requests.add(request)
        request.start(now)

    def _line_ended(self, progress: BatchProgress, request: LineRequest) -> None:
        progress.requests.discard(request)
        self.counts.in_flight = self.in_flight
        self._wakeup.set()
        job = request.job
        if request.is_refused_for_now or (
            request.worker_failed and progress.line_failed(job.number) < MAX_TRIES
        ):
            progress.ready.appendleft(job)
            self.counts.lines[SENT_AGAIN] += 1
            progress.pause(self._wire.clock(), request.retry_after_s)
            return
        progress.line_succeeded(job.number)
        result = request.result()
        self.counts.lines[COMPLETED if result.ok else FAILED] += 1
        progress.unsaved += 1
        self._unsaved.append(result)

    async def save(self) -> None:
        if not (results := self._unsaved[:]):
            return
        await self._store(Store.save_results, results)
        del self._unsaved[: len(results)]
        for result in results:
            if (progress := self._running.get(result.batch)) is not None:
                progress.unsaved -= 1


def sort_by_turn(
    batches: Iterable[BatchProgress], tenant_turns: Mapping[str, int]
) -> deque[BatchProgress]:
    """Return batches in sending order: the tenant, then the batch, with the oldest turn first."""
    return deque(sorted(batches, key=lambda x: (tenant_turns.get(x.batch.tenant, 0), x.turn)))

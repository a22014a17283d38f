"""The batch lane: runs lines where there is a gap, and sees each batch to its end.

One lane runs for a folder, however many routers and processes share it. It looks at the store every
second, or when it is told of something; each turn keeps what has come back, sees what is new, does
a slice of what takes long (`chores`; and of forgetting, hourly), and sends what there is room for,
the batches in turn.

A line that nobody could take is sent again until its batch expires; one whose worker failed, a few
times. Lines under way when the router stops have no result, and are run by the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import count
from math import inf
from pathlib import Path
from sys import maxsize
from typing import TYPE_CHECKING

from proxy.batches.clock_guard import ClockGuard
from proxy.batches.in_flight import BatchProgress
from proxy.batches.line_request import LineRequest
from proxy.batches.maintenance import Maintenance, close, take_in
from proxy.batches.spare_capacity import gap, within_limits
from proxy.batches.storage.disk import disk_errors
from proxy.batches.storage.lock import FolderLock
from proxy.batches.storage.store import Store
from proxy.batches.types import (
    Batch,
    DiskError,
    LineJob,
    LineResult,
    Status,
)
from proxy.metrics.batch_counts import COMPLETED, FAILED, SENT_AGAIN, BatchCounts

if TYPE_CHECKING:
    from proxy.batches.storage.store_thread import StoreThread
    from proxy.config.batches import BatchesConfig
    from proxy.core.tenants.tenants import Tenant
    from proxy.wire.server import WireServer

logger = logging.getLogger(__name__)

LOOK_S = 1.0
TURN_S = 0.05  # between two looks for a gap, while lines wait for one
FULL_DISK_S = 5.0
PURGE_S = 3600.0
FETCHED = 64  # lines of one batch that are at hand
AT_HAND = 8  # batches of one tenant that have lines at hand
MOST_TRIES = 3  # of a line on workers that fail
NOBODY_COULD = (429, 503)  # no verdict on the line
SERVER_ERROR = 500


class BatchScheduler:
    """Runs the batches of one folder; `wall` tells the time of day."""

    def __init__(
        self,
        wire: WireServer,
        keeper: StoreThread,
        settings: BatchesConfig,
        path: Path,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.counts = BatchCounts()
        self.paused = ""  # why nothing is begun now
        self._wire = wire
        self._keep = keeper
        self._path = path
        self._wall = wall
        self._almanac = ClockGuard(wire.clock, wall)
        self._lock = FolderLock(path)
        self._running: dict[str, BatchProgress] = {}
        self._chores = Maintenance(keeper)
        self._goes_on = False  # whether something waits for the next turn, and for nothing else
        self._unsaved: list[LineResult] = []
        self._full: set[str] = set()  # the tenants that have no room for results
        self._turns: dict[str, int] = {}  # when each tenant had one last
        self._numbers = count(1)
        self._told = asyncio.Event()
        self._turning = asyncio.Lock()
        self._next_look = self._next_purge = self._paused_until = -inf

    @property
    def in_flight(self) -> int:
        """How many lines are on their way."""
        return sum(len(each.errands) for each in self._running.values())

    def tell(self) -> None:
        """Hear that there is something to do."""
        self._next_look = -inf
        self._told.set()

    def purge_soon(self) -> None:
        """Forget what is kept no longer, in the next turn."""
        self._next_purge = self._paused_until = -inf
        self.tell()

    async def run(self) -> None:
        """Run until cancelled, as soon as nobody else does."""
        try:
            while True:
                await self.turn()
                if self._goes_on:
                    await asyncio.sleep(0)
                    continue
                pause = TURN_S if any(x.ready for x in self._running.values()) else LOOK_S
                try:
                    async with asyncio.timeout(pause):
                        await self._told.wait()
                except TimeoutError:
                    pass
                self._told.clear()
        finally:
            self.stop()

    def stop(self) -> None:
        """Let go of all lines; what has no result is run again by whoever comes next."""
        now = self._wire.clock()
        for running in self._running.values():
            running.drop(now)
        self._running = {}
        self._chores.clear()
        self._lock.release()

    def _lead(self) -> bool:
        """Whether this is the one that runs the folder's lines."""
        if self._lock.is_lost:
            self.stop()
        return self._lock.take()

    async def turn(self) -> None:
        """Do what there is to do now."""
        async with self._turning:
            await self._turn()

    async def _turn(self) -> None:
        clock = self._wire.clock
        self._goes_on = False
        if clock() < self._paused_until:
            return
        try:
            if await self._keep.reopen():
                self.stop()  # what was known of the database that is gone
                self._unsaved.clear()
                logger.warning("batches: %s holds another database than before", self._path)
            with disk_errors(self._path):
                leads = self._lead()
            if not leads:
                self._go_on()
                return
            believed = self._almanac.is_believed()
            more = clock() >= self._next_purge
            if more:  # first: it may be what makes room for all else
                self._next_purge = clock() + PURGE_S
                try:
                    if believed:
                        more = await self._keep(Store.purge, self._wall())
                    else:
                        more = await self._keep(Store.give_back)
                finally:
                    if more:
                        self._next_purge = -inf
            await self.save()
            if clock() >= self._next_look:
                self._next_look = clock() + LOOK_S
                await self._look()
            self._full = await self._keep(Store.full)
            if (said := await self._chores.turn(self._full)) is not None:
                logger.info("%s", said)
                await self._look()
            await self._fetch()
            self._go_on()
            self._send()
            self._goes_on = more or self._chores.waiting(self._full) is not None
        except DiskError as error:
            self._pause(str(error))
        except Exception as error:  # whatever it is, the lane must go on
            why = f"{type(error).__name__}: {error}"
            if why != self.paused:  # it is tried every few seconds
                logger.exception("batches: a turn failed")
            self._pause(why)

    def _go_on(self) -> None:
        if self.paused:
            logger.info("batches: go on")
            self.paused = ""
            self.counts.paused = False

    def _pause(self, why: str) -> None:
        if why != self.paused:
            logger.error("batches: paused: %s", why)
            self.paused = why
            self.counts.paused = True
        self._paused_until = self._wire.clock() + FULL_DISK_S

    # What is new

    async def _look(self) -> None:
        """See which batches there are, and move those on that can be."""
        batches = await self._keep(Store.active)
        self.counts.active = Counter(batch.status.value for batch in batches)
        known = {batch.id for batch in batches}
        for gone in self._running.keys() - known:
            self._let_go(gone)
        for batch in batches:
            await self._see(batch)

    async def _see(self, batch: Batch) -> None:
        now = self._wall()
        if batch.status is Status.CANCELLING:
            await self._end(batch, Status.CANCELLED)
        elif now >= batch.expires:
            await self._end(batch, Status.EXPIRED)
        elif batch.id in self._chores:
            pass  # it is being read, or ended as complete
        elif batch.status is Status.VALIDATING:
            most = self.settings.max_lines
            self._chores.add(batch, lambda store: take_in(store, batch, most, self._wall))
        elif batch.id not in self._running:
            self._running[batch.id] = BatchProgress(batch)

    async def _end(self, batch: Batch, status: Status) -> None:
        if self._chores.ends(batch.id):
            return
        self._let_go(batch.id)
        await self.save()
        self._chores.add(batch, lambda store: close(store, batch, status, self._wall), ends=True)

    def _let_go(self, batch_id: str) -> None:
        running = self._running.pop(batch_id, None)
        if running is not None:
            running.drop(self._wire.clock())

    # Lines

    async def _fetch(self) -> None:
        """Have lines at hand, and end the batches that have no more."""
        at_hand = Counter(x.batch.tenant for x in self._running.values() if x.ready)
        for running in list(self._running.values()):
            tenant = running.batch.tenant
            if not running.ready and not running.read_all and at_hand[tenant] < AT_HAND:
                at_hand[tenant] += 1
                jobs = await self._keep(Store.jobs, running.batch, running.last, FETCHED)
                running.ready += jobs
                running.read_all = not jobs
                if jobs:
                    running.last = jobs[-1].number
            if running.over:
                await self._end(running.batch, Status.COMPLETED)

    def _send(self) -> None:
        """Send what there is room for: tenants in turn, and the batches of each."""
        wire = self._wire
        waiting = self._in_turn(x for x in self._running.values() if x.ready)
        room = self.settings.concurrency - self.in_flight
        shut: dict[str, int] = {}
        while waiting and room > 0 and not wire.draining:
            now = wire.clock()
            running = waiting.popleft()
            tenant = wire.router.tenants.get(running.batch.tenant)
            if (job := self._next_of(now, running, tenant, shut)) is None:
                continue
            running.turn = self._turns[running.batch.tenant] = next(self._numbers)
            running.ready.remove(job)
            self._send_one(now, running, job, tenant)
            room -= 1
            if running.ready:
                waiting.append(running)
            waiting = self._in_turn(waiting)
        self.counts.in_flight = self.in_flight

    def _in_turn(self, some: Iterable[BatchProgress]) -> deque[BatchProgress]:
        turns = self._turns
        return deque(sorted(some, key=lambda x: (turns.get(x.batch.tenant, 0), x.turn)))

    def _next_of(
        self, now: float, running: BatchProgress, tenant: Tenant | None, shut: dict[str, int]
    ) -> LineJob | None:
        """Name the line that a batch may send now: the first for whose model there is a gap.

        `shut`: of models, from which size on there is none, as was found in this turn.
        """
        held = self._held(running.batch.tenant, tenant)
        if held != running.held:
            running.held = held
            if held:
                logger.warning("batch %s: held: %s", running.batch.id, held)
        if held:
            return None
        if now < running.rest_until or (tenant is not None and not within_limits(tenant, now)):
            return None
        for job in running.ready:
            size = len(job.body)
            if size < shut.get(job.model, maxsize):
                if gap(self._wire.router, job.model, now, size):
                    return job
                shut[job.model] = size
        return None

    def _held(self, name: str, tenant: Tenant | None) -> str:
        """Say why nothing of a tenant's is begun now; nothing where it may be."""
        if tenant is None and not self._wire.router.tenants.open:
            return "whose it is has no key now"
        if name in self._full:
            return (
                "no room for results: its tenant has router.batches.max_bytes_per_tenant, or all "
                "have max_bytes; raise that, or have files deleted"
            )
        return ""

    def _send_one(
        self, now: float, running: BatchProgress, job: LineJob, tenant: Tenant | None
    ) -> None:
        def over(errand: LineRequest) -> None:
            self._over(running, errand)

        batch = running.batch
        errand = LineRequest(self._wire, job, batch.endpoint, tenant, over)
        running.errands.add(errand)
        errand.start(now)

    def _over(self, running: BatchProgress, errand: LineRequest) -> None:
        """Take what became of a line, or send it again."""
        running.errands.discard(errand)
        self.counts.in_flight = self.in_flight
        self._told.set()
        status, job = errand.status, errand.job
        failed = errand.broken or (
            status >= SERVER_ERROR and status not in NOBODY_COULD and not errand.is_final
        )
        if status in NOBODY_COULD or (failed and running.failed(job.number) < MOST_TRIES):
            running.ready.appendleft(job)
            self.counts.lines[SENT_AGAIN] += 1
            running.rest(self._wire.clock(), errand.retry_after_s)
            return
        running.went_well(job.number)
        self._came(running, errand.result())

    def _came(self, running: BatchProgress, result: LineResult) -> None:
        self.counts.lines[COMPLETED if result.ok else FAILED] += 1
        running.unsaved += 1
        self._unsaved.append(result)
        self._told.set()

    async def save(self) -> None:
        """Keep the results there are."""
        if not (results := self._unsaved[:]):
            return
        await self._keep(Store.save, results)
        del self._unsaved[: len(results)]
        for result in results:
            if (running := self._running.get(result.batch)) is not None:
                running.unsaved -= 1

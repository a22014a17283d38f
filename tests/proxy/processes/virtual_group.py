"""Routers over one shared table, in one process and in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome
from proxy.core.queue.ticket import Ticket
from proxy.processes.shared.limits import SharedLimits
from proxy.processes.shared.load import READ_INTERVAL_S, SharedLoad
from proxy.processes.shared.prefixes import SharedPrefixes
from proxy.processes.shared.queue import SharedQueues
from proxy.processes.shared.shared_memory import LIFE, SharedTable
from proxy.processes.shared.traffic import SharedTraffic
from tests.proxy.core.making import ask, placed, router_of, worker_of


class VirtualGroup:
    """Routers that publish their events when a turn ends."""

    def __init__(self, size: int, *specs: WorkerSpec, **settings: object) -> None:
        self.table = SharedTable.make(size)
        self.now = 1.0
        self.callbacks: list[Callable[[], None]] = []
        self.lives = 0
        self.leases: dict[Ticket, Lease] = {}  # of dispatched tickets
        self.specs = specs
        self.settings = settings
        self.routers = [router_of(*specs, **settings) for _ in range(size)]
        self.queues: list[SharedQueues] = [None] * size  # type: ignore[list-item]
        self.sharings = [self.join(i) for i in range(size)]

    def join(self, index: int) -> SharedLoad:
        """Let a process share its load."""
        router = self.routers[index]
        fleet = router.fleet
        sharing = SharedLoad(self.table, index, fleet, lambda: self.now, self.callbacks.append)
        self.lives += 1
        sharing.sheet.write_count(LIFE, self.lives)
        queues = self.queues[index] = SharedQueues(router.queue, sharing)
        sharing.parts += (
            queues,
            SharedLimits(router.tenants, router.queue.turns, self.table, sharing),
            SharedTraffic(router, sharing),
            SharedPrefixes(fleet, sharing),
        )
        for row, worker in enumerate(fleet.roster):
            sharing.place(worker, row, 0.0)
        fleet.roster.others, router.queue.elsewhere = sharing, queues
        return sharing

    def restart(self, index: int) -> None:
        """Replace a process as after a crash."""
        self.table.clear(index)
        self.routers[index] = router_of(*self.specs, **self.settings)
        self.sharings[index] = self.join(index)

    def end_turn(self) -> None:
        """End the turn of every process, and let a little time pass."""
        callbacks, self.callbacks[:] = list(self.callbacks), []
        for callback in callbacks:
            callback()
        self.now += 2 * READ_INTERVAL_S

    def read_all(self) -> None:
        """Let every process read the table."""
        for sharing in self.sharings:
            sharing.look(self.now)

    def submit(self, index: int, **fields: int) -> Lease:
        """Place a request in a process."""
        lease = placed(self.routers[index].submit(ask(**fields), self.now))
        self.end_turn()
        return lease

    def finish(self, index: int, lease: Lease, outcome: Outcome = Outcome.DONE) -> None:
        """Finish a request."""
        self.routers[index].leases.finish(lease, self.now, outcome)
        self.end_turn()

    def worker(self, index: int, name: str) -> Worker:
        """Return a worker in one process."""
        return worker_of(self.routers[index], name)

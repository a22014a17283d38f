"""Routers that share their state, in one process and in virtual time.

They are processes of one host with one shared table, or hosts that send each other messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome
from proxy.core.queue.ticket import Ticket
from proxy.core.tenants.tenants import TenantSpec
from proxy.processes.ipc_messages import KnownWorker, WorkersChanged
from proxy.processes.replicas.messages import decode
from proxy.processes.replicas.replication import Replication
from proxy.processes.shared.load import READ_INTERVAL_S, REMOTE_INTERVAL_S, SharedLoad
from proxy.processes.shared.queue import SharedQueues
from proxy.processes.shared.shared_memory import MAX_REMOTE, SharedTable
from proxy.processes.shared.sharing import share_router
from tests.proxy.core.making import make_info, placed, router_of, worker_of


class VirtualGroup:
    """Routers that publish their events when a turn ends."""

    turn_s = 2 * READ_INTERVAL_S

    def __init__(self, size: int, *specs: WorkerSpec, **settings: object) -> None:
        self.tables = self.make_tables(size)
        self.now = 1.0
        self.callbacks: list[Callable[[], None]] = []
        self.lives = 0
        self.leases: dict[Ticket, Lease] = {}  # of dispatched tickets
        self.specs = specs
        self.settings = settings
        self.tenants: list[TenantSpec] = []
        self.routers = [router_of(*specs, **settings) for _ in range(size)]
        self.queues: list[SharedQueues] = [None] * size  # type: ignore[list-item]
        self.shared_loads = [self.join(i) for i in range(size)]

    def make_tables(self, size: int) -> list[SharedTable]:
        return [SharedTable.make(size)]

    def clock(self) -> float:
        return self.now

    def run_later(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def place_of(self, index: int) -> tuple[SharedTable, int]:
        """Return the table of a router, and its process index there."""
        return self.tables[0], index

    def close(self) -> None:
        for table in self.tables:
            table.close()

    def crash(self, index: int) -> None:
        """Let the supervisor of a process notice that it has ended."""
        table, process = self.place_of(index)
        table.clear(process)

    def join(self, index: int) -> SharedLoad:
        router = self.routers[index]
        self.lives += 1
        shared_load, self.queues[index] = share_router(
            router, *self.place_of(index), self.clock, self.run_later, life=self.lives
        )
        for row, worker in enumerate(router.fleet.roster):
            shared_load.share_worker(worker, row, 0.0)
        return shared_load

    def restart(self, index: int) -> None:
        """Replace a process as after a crash."""
        self.crash(index)
        router = self.routers[index] = router_of(*self.specs, **self.settings)
        router.tenants.replace(self.tenants, {})
        self.shared_loads[index] = self.join(index)

    def exchange_once(self) -> bool:
        """Let each host send a message; return whether one had something to send."""
        return False

    def end_turn(self) -> None:
        """End the turn of every process, and let a little time pass."""
        callbacks, self.callbacks[:] = list(self.callbacks), []
        for callback in callbacks:
            callback()
        self.now += self.turn_s

    def read_all(self, *, after_s: float = 0.0) -> None:
        """Let every process read the table, after some time."""
        self.now += after_s
        for shared_load in self.shared_loads:
            shared_load.read_remote_charges(self.now)

    def set_tenants(self, *specs: TenantSpec) -> None:
        """Give all processes these tenants, as a reload does."""
        self.tenants = [*specs]
        for router in self.routers:
            router.tenants.replace(specs, {})

    def submit(self, index: int, **fields: int) -> Lease:
        lease = placed(self.routers[index].submit(make_info(**fields), self.now))
        self.end_turn()
        return lease

    def finish(self, index: int, lease: Lease, outcome: Outcome = Outcome.DONE) -> None:
        self.routers[index].leases.finish(lease, self.now, outcome)
        self.end_turn()

    def worker(self, index: int, name: str) -> Worker:
        return worker_of(self.routers[index], name)

    def open_breaker(self, index: int, name: str) -> None:
        """Let requests of one process fail on a worker until its breaker opens."""
        for _ in range(3):
            self.routers[index].fleet.health.record_failure(self.worker(index, name), self.now)


MakeGroup = Callable[..., VirtualGroup]  # what the fixtures return


class HostGroup(VirtualGroup):
    """Routers on hosts of their own; messages arrive at once, at the end of a turn."""

    turn_s = 1.1 * REMOTE_INTERVAL_S

    def make_tables(self, size: int) -> list[SharedTable]:
        self.replications: list[Replication] = []
        return [SharedTable.make(1, MAX_REMOTE) for _ in range(size)]

    def place_of(self, index: int) -> tuple[SharedTable, int]:
        return self.tables[index], 0

    def join(self, index: int) -> SharedLoad:
        shared_load = super().join(index)
        shared_load.peers.settle_s = 0.0  # messages of all arrive together
        return shared_load

    def crash(self, index: int) -> None:
        super().crash(index)
        self.replications[index].process_ended(0)
        self.exchange()

    def end_turn(self) -> None:
        super().end_turn()
        self.exchange()

    def read_all(self, *, after_s: float = 0.0) -> None:
        super().read_all(after_s=after_s)
        self.exchange()
        self.now += self.turn_s
        super().read_all()

    def exchange(self) -> None:
        """Let all hosts send what they have to send, until they have nothing."""
        while self.exchange_once():
            pass

    def exchange_once(self) -> bool:
        messages = [host.next_message(self.now) for host in self.hosts()]
        for message in messages:
            for host in self.replications if message is not None else ():
                host.handle(decode(message), self.now)
        return any(messages)

    def hosts(self) -> list[Replication]:
        """Return the hosts, which join at first use."""
        if not self.replications:
            known = tuple(
                KnownWorker(
                    spec, row, 0.0, up=True, probed=True, up_since=0.0, awaited_since=0.0,
                    draining=False, models=(), reported_max_model_len=None, gauges=None, pace=None,
                )
                for row, spec in enumerate(self.specs)
            )  # fmt: skip
            for table in self.tables:
                host = Replication(table, nullcontext, send=lambda _: None, clock=self.clock)
                host.report(WorkersChanged(known))
                host.connected = True
                self.replications.append(host)
        return self.replications


class AloneGroup(VirtualGroup):
    """One router that shares nothing and gets the requests of all."""

    def __init__(self, size: int, *specs: WorkerSpec, **settings: object) -> None:
        super().__init__(1, *specs, **settings)
        self.routers *= size
        self.queues *= size
        self.shared_loads *= size

    def join(self, index: int) -> SharedLoad:
        shared_load, router = super().join(index), self.routers[index]
        router.fleet.roster.remote_load = router.queue.remote_queues = None
        return shared_load

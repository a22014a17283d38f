"""A simulated fleet behind several hosts, whose messages take virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from proxy.config import FleetConfig
from proxy.core.router import Router
from proxy.processes.ipc_messages import KnownWorker, WorkersChanged
from proxy.processes.replicas.messages import Update, decode
from proxy.processes.replicas.publish_times import FLUSH_LEAD_S, PUBLISH_INTERVAL_S
from proxy.processes.replicas.replication import Replication
from proxy.processes.server_process import ALONE_INTERVAL_S, QUEUED_INTERVAL_S
from proxy.processes.shared.load import REMOTE_INTERVAL_S
from proxy.processes.shared.shared_memory import MAX_REMOTE, SETTLE_S, SharedTable
from proxy.processes.shared.sharing import share_router
from vllm_sched.sim.fleet.base_fleet import RequestFlight
from vllm_sched.sim.fleet.fleet import SimulatedFleet, make_router
from vllm_sched.sim.types import Leg, MakeEngine, WorkerModel

TRAVEL_S = 0.005
WAITS_S = FLUSH_LEAD_S + PUBLISH_INTERVAL_S + REMOTE_INTERVAL_S
USUAL_AGE_S = WAITS_S + TRAVEL_S


class Delays(NamedTuple):
    """How long knowledge waits for each step on its way to another host, at most."""

    flush_s: float
    publish_s: float
    travel_s: float
    read_s: float

    @classmethod
    def of_age(cls, age_s: float) -> Delays:
        """Return the product's intervals, shortened for small ages; the rest is travel."""
        share = min(age_s / USUAL_AGE_S, 1.0)
        return cls(
            share * FLUSH_LEAD_S,
            share * PUBLISH_INTERVAL_S,
            age_s - share * WAITS_S,
            share * REMOTE_INTERVAL_S,
        )


class StaleFleet(SimulatedFleet):
    """Routers that each get a random part of the requests.

    `age_s`: the greatest age of what a router knows of the others; None if they share nothing.
    """

    def __init__(
        self,
        config: FleetConfig,
        models: Mapping[str, WorkerModel],
        make: MakeEngine,
        *,
        count: int,
        age_s: float | None,
        seed: int,
    ) -> None:
        super().__init__(config, models, make)
        self.routers += [make_router(config, models) for _ in range(count - 1)]
        self._random = random.Random(f"{seed}/routers")
        self.most_requests = 0  # that a worker had at once
        self.hosts: list[Host] = []
        if age_s is not None and count > 1:
            self._delays = Delays.of_age(age_s)
            for index, router in enumerate(self.routers):
                self.hosts.append(Host(self, router, self._delays))
                self.at(self._delays.publish_s * index / count, self.hosts[-1].publish)
                self.at(ALONE_INTERVAL_S * index / count, self.hosts[-1].watch)

    @property
    def now(self) -> float:
        return self._queue.now

    def at(self, when: float, call: Callable[[float], Any]) -> None:
        self._queue.schedule(when, call)

    def settle(self, router: Router, now: float) -> None:
        self._dispatch_queued(router, now)

    def _choose_router(self) -> Router:
        return self._random.choice(self.routers)

    def _send(self, flight: RequestFlight, name: str, leg: Leg, now: float) -> None:
        super()._send(flight, name, leg, now)
        gauges = self.engines[name].gauges(now)
        self.most_requests = max(self.most_requests, gauges.running + gauges.waiting)

    def send(self, host: Host, update: Update, now: float) -> None:
        """Deliver an update to all other hosts."""

        def deliver(now: float) -> None:
            for other in self.hosts:
                if other is not host:
                    other.replication.handle(update, now)

        if self._delays.travel_s:
            self.at(now + self._delays.travel_s, deliver)
        else:
            deliver(now)

    def exchange(self, now: float) -> None:
        """Let all hosts send until none has anything to send."""
        while sum(host.send(now) for host in self.hosts):
            pass

    def close(self) -> None:
        for host in self.hosts:
            host.table.close()


class Host:
    """A router, the memory of its host, and the exchange with other hosts."""

    def __init__(self, fleet: StaleFleet, router: Router, delays: Delays) -> None:
        self.table = SharedTable.make(1, MAX_REMOTE)
        self._fleet = fleet
        self._router = router
        self._delays = delays
        self._shared_load, self._queues = share_router(
            router, self.table, 0, lambda: fleet.now, self._soon, life=1
        )
        shared_load = self._shared_load
        shared_load.peers.settle_s = delays.read_s * SETTLE_S / REMOTE_INTERVAL_S
        shared_load._interval_s = delays.read_s - shared_load.peers.settle_s
        for row, worker in enumerate(router.fleet.roster):
            shared_load.share_worker(worker, row, 0.0)
        self.replication = Replication(
            self.table, nullcontext, send=lambda _: None, clock=lambda: fleet.now
        )
        self.replication.connected = True
        self.replication.report(
            WorkersChanged(
                tuple(
                    KnownWorker(
                        worker.spec, row, 0.0, up=True, probed=True, up_since=0.0,
                        awaited_since=0.0, draining=False, models=(), reported_max_model_len=None,
                        gauges=None, pace=None,
                    )
                    for row, worker in enumerate(router.fleet.roster)
                )
            )
        )  # fmt: skip
        self._seen = 0
        self._idle_until = 0.0

    def _soon(self, call: Callable[[], None]) -> None:
        self._fleet.at(self._fleet.now + self._delays.flush_s, partial(self._flush, call))

    def _flush(self, call: Callable[[], None], now: float) -> None:
        call()
        if not self._delays.publish_s:
            self._fleet.exchange(now)

    def send(self, now: float) -> bool:
        """Send what other hosts do not know; return whether there was something."""
        message = self.replication.next_message(now)
        if message is not None:
            self._fleet.send(self, decode(message), now)
        return message is not None

    def publish(self, now: float) -> None:
        """Send again and again, as `Replication` does."""
        if self.replication.is_due(now):
            self.send(now)
        if self._delays.publish_s:
            self._fleet.at(now + self._delays.publish_s, self.publish)

    def watch(self, now: float) -> None:
        """Serve the queue when others have changed something, as `ServerProcess` does."""
        queue, shared_load = self._router.queue, self._shared_load
        if queue.length or now >= self._idle_until:
            self._idle_until = now + ALONE_INTERVAL_S
            shared_load.read_remote_charges(now)
            shared_load.publish_rest()
            if queue.length and (shared_load.changes != self._seen or self._queues.holds_back):
                self._queues.holds_back = False
                self._fleet.settle(self._router, now)
            self._seen = shared_load.changes
        self._fleet.at(now + QUEUED_INTERVAL_S, self.watch)

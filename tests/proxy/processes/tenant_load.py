"""Tenants that always have some requests waiting in a virtual group."""

from __future__ import annotations

from collections import Counter
from random import Random

from proxy.core.fleet.leases import Lease
from proxy.core.model.types import Outcome, RequestInfo
from proxy.core.tenants.tenants import Tenant
from tests.proxy.core.making import make_info, placed
from tests.proxy.processes.virtual_group import VirtualGroup

PUBLISH_STEPS = 20  # of a millisecond, between two messages of a host


class TenantLoad:
    def __init__(self, group: VirtualGroup, waiting: dict[tuple[int, str], int]) -> None:
        self.group = group
        self.waiting = waiting  # by process and tenant
        self.served: Counter[str] = Counter()
        self.first_served: dict[str, float] = {}  # time of each tenant's first dispatch
        self.running: list[tuple[float, int, Lease]] = []
        self.rng = Random(1)

    def tenant(self, index: int, name: str) -> Tenant:
        found = self.group.routers[index].tenants.get(name)
        assert found is not None
        return found

    def serve(self, index: int, lease: Lease) -> None:
        self.running.append((self.group.now + self.rng.uniform(0.2, 0.4), index, lease))
        if (tenant := lease.info.tenant) is not None:
            self.served[tenant.name] += 1
            self.first_served.setdefault(tenant.name, self.group.now)

    def add_request(self, index: int, name: str) -> None:
        info: RequestInfo = make_info(100, 50)
        info.tenant = self.tenant(index, name)
        info.rank = info.tenant.spec.rank
        answer = self.group.routers[index].submit(info, self.group.now)
        if isinstance(answer, Lease):
            self.serve(index, answer)
        self._end_turn()

    def run(self, seconds: float) -> None:
        """Keep the numbers of waiting requests for this time."""
        group, start = self.group, self.group.now
        self.served.clear()
        for step in range(round(seconds * 1000)):
            group.now = start + step / 1000
            if step % PUBLISH_STEPS == 0:
                group.exchange_once()
            group.shared_loads[step % len(group.shared_loads)].read_remote_charges(group.now)
            for (index, name), wanted in self.waiting.items():
                while self.tenant(index, name).waiting < wanted:
                    self.add_request(index, name)
            for job in [job for job in self.running if job[0] <= group.now]:
                self.running.remove(job)
                group.routers[job[1]].leases.finish(job[2], group.now, Outcome.DONE)
                self._end_turn()
                self._settle(job[1])
            if step % 5 < len(group.routers):
                self._settle(step % 5)
        assert self.served.total() > 20 * seconds

    def _settle(self, index: int) -> None:
        for _, answer in self.group.routers[index].pop_due(self.group.now):
            self.serve(index, placed(answer))
        self._end_turn()

    def _end_turn(self) -> None:
        callbacks, self.group.callbacks[:] = list(self.group.callbacks), []
        for callback in callbacks:
            callback()

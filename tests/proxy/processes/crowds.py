"""Tenants of which each always has so many waiting, in some processes, in virtual time."""

from __future__ import annotations

from collections import Counter
from random import Random

from proxy.core.fleet.leases import Lease
from proxy.core.model.types import Outcome, RequestInfo
from proxy.core.tenants.tenants import Tenant
from tests.proxy.core.making import ask, placed
from tests.proxy.processes.making import Crew


class Crowds:
    """What they want, and what they got."""

    def __init__(self, crew: Crew, waits: dict[tuple[int, str], int]) -> None:
        self.crew = crew
        self.waits = waits  # by process and tenant
        self.got: Counter[str] = Counter()
        self.first: dict[str, float] = {}  # when one of a tenant went that had to wait
        self.running: list[tuple[float, int, Lease]] = []
        self.rng = Random(1)

    def tenant(self, index: int, name: str) -> Tenant:
        """Find a tenant as one process knows it."""
        found = self.crew.routers[index].tenants.get(name)
        assert found is not None
        return found

    def goes(self, index: int, lease: Lease) -> None:
        """Have one be served for a while."""
        self.running.append((self.crew.now + self.rng.uniform(0.2, 0.4), index, lease))
        if (tenant := lease.ask.tenant) is not None:
            self.got[tenant.name] += 1
            self.first.setdefault(tenant.name, self.crew.now)

    def comes(self, index: int, name: str) -> None:
        """Have one more wait, or go at once."""
        asked: RequestInfo = ask(100, 50)
        asked.tenant = self.tenant(index, name)
        asked.rank = asked.tenant.spec.rank
        answer = self.crew.routers[index].submit(asked, self.crew.now)
        if isinstance(answer, Lease):
            self.goes(index, answer)
        self._turn()

    def play(self, seconds: float) -> None:
        """Go on for so long."""
        crew, start = self.crew, self.crew.now
        self.got.clear()
        for step in range(round(seconds * 1000)):
            crew.now = start + step / 1000
            crew.sharings[step % len(crew.sharings)].look(crew.now)
            for (index, name), most in self.waits.items():
                while self.tenant(index, name).waiting < most:
                    self.comes(index, name)
            for each in [each for each in self.running if each[0] <= crew.now]:
                self.running.remove(each)
                crew.routers[each[1]].leases.finish(each[2], crew.now, Outcome.DONE)
                self._turn()
                self._settle(each[1])
            if step % 5 < len(crew.routers):
                self._settle(step % 5)
        assert self.got.total() > 20 * seconds

    def _settle(self, index: int) -> None:
        for _, answer in self.crew.routers[index].due(self.crew.now):
            self.goes(index, placed(answer))
        self._turn()

    def _turn(self) -> None:
        later, self.crew.later[:] = list(self.crew.later), []
        for each in later:
            each()

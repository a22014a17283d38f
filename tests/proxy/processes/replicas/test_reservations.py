"""Slots of workers that hosts take at the same moments, with delayed and lost messages."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.processes.replicas.reservations import Reservations, slots_for_others

WORKER = "a http://a"


class Host:
    """A host that takes and frees slots of one worker."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reservations = Reservations(name)
        self.requests = self.number = self.reserved = 0
        self.members: dict[str, Any] = {}

    def message(self) -> tuple[str, int, int, dict[str, int]]:
        self.number += 1
        self.reservations.report(self.number, {WORKER: self.requests})
        heard = {name: member.number for name, member in self.members.items()}
        return self.name, self.number, self.requests, heard

    def receive(self, message: tuple[str, int, int, dict[str, int]]) -> None:
        name, number, requests, heard = message
        self.members[name] = SimpleNamespace(number=number, requests=requests, heard=heard)

    @property
    def remote(self) -> int:
        return sum(member.requests for member in self.members.values())

    def reserve(self, limit: int, hosts: int) -> None:
        """Decide how many slots to leave, after each message."""
        self.reservations.acknowledge(list(self.members.values()))
        believed = self.reservations.believed(WORKER)
        self.reserved = slots_for_others(limit, believed, self.remote, hosts)

    def may_take(self, limit: int) -> int:
        """Return how many slots the host may take now."""
        return max(limit - self.reserved - self.remote - self.requests, 0)


def join(count: int, limit: int) -> list[Host]:
    """Return hosts that know each other."""
    hosts = [Host(str(index)) for index in range(count)]
    for _ in range(2):
        for host in hosts:
            message = host.message()
            for other in hosts:
                if other is not host:
                    other.receive(message)
    for host in hosts:
        host.reserve(limit, count)
    return hosts


@pytest.mark.parametrize("seed", range(200))
def test_hosts_exceed_a_limit_by_less_than_one_request_each(seed: int) -> None:
    rng = random.Random(seed)
    count, limit = rng.randint(2, 6), rng.choice([1, 2, 3, 8, 31])
    hosts = join(count, limit)
    under_way: dict[tuple[str, str], list[Any]] = {}
    for _ in range(400):
        host = rng.choice(hosts)
        match rng.randrange(4):
            case 0:
                host.requests += rng.randint(0, host.may_take(limit))
            case 1:
                host.requests -= rng.randint(0, host.requests)
            case 2:
                message = host.message()
                host.reserve(limit, count)
                for other in hosts:
                    if other is not host:
                        under_way.setdefault((host.name, other.name), []).append(message)
            case _:
                queues = [key for key, queue in under_way.items() if queue]
                if queues:
                    sender, receiver = rng.choice(queues)
                    hosts[int(receiver)].receive(under_way[sender, receiver].pop(0))
                    hosts[int(receiver)].reserve(limit, count)
        assert sum(host.requests for host in hosts) < limit + count


@pytest.mark.parametrize("count", [2, 3, 8])
def test_one_busy_host_gets_every_slot(count: int) -> None:
    limit = 64
    hosts = join(count, limit)
    busy, *idle = hosts
    rounds = 0
    while busy.requests < limit:
        busy.requests += busy.may_take(limit)
        message = busy.message()
        for host in idle:
            host.receive(message)
            host.reserve(limit, count)
        for host in idle:
            busy.receive(host.message())
            busy.reserve(limit, count)
        rounds += 1
        assert rounds <= 64
    assert busy.may_take(limit) == 0
    assert [host.may_take(limit) for host in idle] == [0] * len(idle)

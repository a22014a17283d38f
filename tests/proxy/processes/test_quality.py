"""Decisions of several processes compared with those of one, in virtual time.

Each request comes to a random process, at the same moments.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean

import pytest

from proxy.core.fleet.leases import Lease
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome, Refusal, RequestInfo, Usage
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router
from tests.proxy.core.making import GENERAL, LONG, SHORT, make_info, spec
from tests.proxy.core.toy import Speed, Toy, p99
from tests.proxy.processes.virtual_group import VirtualGroup

TELL_S = 0.001
GPU = Speed(token_s=1e-4, base_s=0.02, sequence_s=2e-4)
POOLS = (*(spec(f"s{i}", SHORT, 8192, 24) for i in range(4)), spec("l", LONG, 65_536, 24))
EQUAL_WORKERS = tuple(spec(f"g{i}", GENERAL, 32_768, 16) for i in range(6))


class ToyGroup(VirtualGroup):
    """Processes in the time of a toy fleet; events are published a millisecond later."""

    def __init__(self, toy: Toy, count: int, specs: tuple[WorkerSpec, ...], policy: str) -> None:
        self._toy = toy
        super().__init__(count, *specs, policy=policy)

    def clock(self) -> float:
        return self._toy.now

    def run_later(self, callback: Callable[[], None]) -> None:
        self._toy.at(self._toy.now + TELL_S, callback)


class RandomRouter:
    """The routers of a group with the interface of one."""

    def __init__(self, group: VirtualGroup) -> None:
        self._routers = group.routers
        self._rng = random.Random(11)
        self._router_of: dict[Lease, Router] = {}
        self.settings = group.routers[0].settings
        self.leases = self  # the part of a router

    def _placed(self, router: Router, placed: Lease | Ticket | Refusal) -> None:
        if isinstance(placed, Lease):
            self._router_of[placed] = router

    def submit(self, info: RequestInfo, now: float) -> Lease | Ticket | Refusal:
        router = self._rng.choice(self._routers)
        placed = router.submit(info, now)
        self._placed(router, placed)
        return placed

    def pop_due(self, now: float) -> Iterator[tuple[Ticket, Lease | Refusal]]:
        for router in self._routers:
            for ticket, placed in router.pop_due(now):
                self._placed(router, placed)
                yield ticket, placed

    def record_first_token(self, lease: Lease, now: float) -> None:
        self._router_of[lease].leases.record_first_token(lease, now)

    def record_tokens(self, lease: Lease, count: int) -> None:
        self._router_of[lease].leases.record_tokens(lease, count)

    def finish(self, lease: Lease, now: float, outcome: Outcome, usage: Usage) -> None:
        self._router_of.pop(lease).leases.finish(lease, now, outcome, usage)


@dataclass(frozen=True)
class Result:
    work: Counter[str]  # tokens by worker
    ttfts: list[float]  # of short requests


def simulate(
    count: int, specs: tuple[WorkerSpec, ...], rate: float, longs: float, policy: str
) -> Result:
    toy = Toy(*specs, speed=GPU, policy=policy)
    group = None
    if count > 1:
        group = ToyGroup(toy, count, specs, policy)
        toy.router = RandomRouter(group)  # type: ignore[assignment]
    rng, now = random.Random(5), 0.0
    while now < 30.0:
        now += rng.expovariate(rate)
        long = rng.random() < longs
        prompt, output = (rng.randint(10_000, 30_000), 100) if long else (rng.randint(50, 1500), 80)
        toy.at(now, partial(toy.send, make_info(prompt, output), output))
    toy.run()
    work: Counter[str] = Counter()
    for job in toy.jobs:
        assert job.done_at is not None
        work[job.where] += job.info.prompt_tokens + 10 * job.written
    if group is not None:
        group.close()
    ttfts = [job.ttft for job in toy.jobs if not job.info.long]
    return Result(work, ttfts)


def imbalance(result: Result, specs: tuple[WorkerSpec, ...]) -> float:
    """Return the load of the busiest worker relative to the mean, among equal workers."""
    work = [result.work[s.name] for s in specs if s.role is not LONG]
    return max(work) / mean(work)


@pytest.mark.parametrize(
    ("count", "policy", "rate"), [(2, "least_loaded", 12.0), (4, "adaptive", 28.0)]
)
def test_processes_balance_workers_as_evenly_as_one(count: int, policy: str, rate: float) -> None:
    alone, shared = (simulate(size, EQUAL_WORKERS, rate, 0.0, policy) for size in (1, count))
    assert imbalance(shared, EQUAL_WORKERS) <= 1.1 * imbalance(alone, EQUAL_WORKERS)
    assert mean(shared.ttfts) <= 1.15 * mean(alone.ttfts)


def test_processes_serve_short_requests_as_fast_as_one() -> None:
    alone, shared = (simulate(count, POOLS, 20.0, 0.02, "adaptive") for count in (1, 4))
    assert imbalance(shared, POOLS) <= 1.1 * imbalance(alone, POOLS)
    assert mean(shared.ttfts) <= 1.2 * mean(alone.ttfts)
    assert p99(shared.ttfts) <= 1.4 * p99(alone.ttfts)

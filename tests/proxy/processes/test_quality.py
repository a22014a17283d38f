"""Decisions of several processes beside those of one, in virtual time on a toy fleet.

The same requests at the same moments; each comes to a process at random, as connections do. What is
told at the end of a turn is told a millisecond later, as if each turn took so long.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean

import pytest

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Lease
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome, Refusal, RequestInfo, Usage
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router, RouterSettings
from proxy.processes.shared.load import SharedLoad
from proxy.processes.shared.queue import SharedQueues
from proxy.processes.shared.shared_memory import LIFE, SharedTable
from proxy.processes.shared.traffic import SharedTraffic
from tests.proxy.core.making import GENERAL, LONG, SHORT, ask, spec
from tests.proxy.core.toy import Speed, Toy, p99

TELL_S = 0.001
GPU = Speed(token_s=1e-4, base_s=0.02, each_s=2e-4)
POOLS = (*(spec(f"s{i}", SHORT, 8192, 24) for i in range(4)), spec("l", LONG, 65_536, 24))
MOST = 16
ALIKE = tuple(spec(f"g{i}", GENERAL, 32_768, MOST) for i in range(6))


class Together:
    """Many routers, asked as if they were one."""

    def __init__(self, toy: Toy, count: int, specs: tuple[WorkerSpec, ...], policy: str) -> None:
        self.settings = RouterSettings(policy)
        self.table = SharedTable.make(count)
        self._toy = toy
        self._rng = random.Random(11)
        self._routers = []
        for index in range(count):
            fleet = Fleet()
            for each in specs:
                fleet.roster.add(each)
                fleet.health.probe_ok(each.name, 0.0)
            router = Router(self.settings, fleet)
            sharing = SharedLoad(self.table, index, fleet, lambda: toy.now, self._later)
            sharing.sheet.write_count(LIFE, index + 1)
            queues = SharedQueues(router.queue, sharing)
            sharing.parts += (queues, SharedTraffic(router, sharing))
            for row, worker in enumerate(fleet.roster):
                sharing.place(worker, row, 0.0)
            fleet.roster.others, router.queue.elsewhere = sharing, queues
            self._routers.append(router)
        self._whose: dict[Lease, Router] = {}
        self.leases = self  # the part of a router

    def _later(self, what: object) -> None:
        assert callable(what)
        self._toy.at(self._toy.now + TELL_S, what)

    def _placed(self, router: Router, placed: Lease | Ticket | Refusal) -> None:
        if isinstance(placed, Lease):
            self._whose[placed] = router

    def submit(self, asked: RequestInfo, now: float) -> Lease | Ticket | Refusal:
        router = self._rng.choice(self._routers)
        placed = router.submit(asked, now)
        self._placed(router, placed)
        return placed

    def due(self, now: float) -> Iterator[tuple[Ticket, Lease | Refusal]]:
        for router in self._routers:
            for ticket, placed in router.due(now):
                self._placed(router, placed)
                yield ticket, placed

    def first_token(self, lease: Lease, now: float) -> None:
        self._whose[lease].leases.first_token(lease, now)

    def tokens(self, lease: Lease, count: int) -> None:
        self._whose[lease].leases.tokens(lease, count)

    def finish(self, lease: Lease, now: float, outcome: Outcome, usage: Usage) -> None:
        self._whose.pop(lease).leases.finish(lease, now, outcome, usage)


@dataclass(frozen=True)
class Played:
    """How it went."""

    work: Counter[str]  # tokens that each worker had
    ttfts: list[float]  # of shorts
    most: int  # requests that a worker had at once


def play(
    count: int,
    specs: tuple[WorkerSpec, ...],
    rate: float,
    longs: float,
    policy: str,
    seconds: float = 30.0,
) -> Played:
    """Play some seconds of requests."""
    toy = Toy(*specs, speed=GPU, policy=policy)
    together = None
    if count > 1:
        together = Together(toy, count, specs, policy)
        toy.router = together  # type: ignore[assignment]
    rng, now = random.Random(5), 0.0
    while now < seconds:
        now += rng.expovariate(rate)
        long = rng.random() < longs
        prompt, output = (rng.randint(10_000, 30_000), 100) if long else (rng.randint(50, 1500), 80)
        toy.at(now, partial(toy.send, ask(prompt, output), output))
    toy.run()
    work: Counter[str] = Counter()
    for job in toy.jobs:
        assert job.done_at is not None
        work[job.where] += job.ask.prompt_tokens + 10 * job.written
    if together is not None:
        together.table.close()
    ttfts = [job.ttft for job in toy.jobs if not job.ask.long]
    return Played(work, ttfts, max(engine.most_jobs for engine in toy.engines.values()))


def imbalance(played: Played, specs: tuple[WorkerSpec, ...]) -> float:
    """Return how much more than the mean the busiest of those alike had."""
    alike = [played.work[each.name] for each in specs if each.role is not LONG]
    return max(alike) / mean(alike)


@pytest.mark.parametrize(
    ("count", "policy", "rate"),
    [(2, "adaptive", 12.0), (4, "adaptive", 28.0), (4, "least_loaded", 12.0)],
)
def test_workers_are_used_as_evenly_as_by_one(count: int, policy: str, rate: float) -> None:
    alone, shared = (play(each, ALIKE, rate, 0.0, policy) for each in (1, count))
    assert imbalance(shared, ALIKE) <= 1.1 * imbalance(alone, ALIKE)
    assert mean(shared.ttfts) <= 1.15 * mean(alone.ttfts)


def test_shorts_are_as_fast_among_longs() -> None:
    alone, shared = (play(count, POOLS, 20.0, 0.02, "adaptive") for count in (1, 4))
    assert imbalance(shared, POOLS) <= 1.1 * imbalance(alone, POOLS)
    assert mean(shared.ttfts) <= 1.2 * mean(alone.ttfts)
    assert p99(shared.ttfts) <= 1.4 * p99(alone.ttfts)


def test_under_overload_limits_hold_and_no_request_waits_longer() -> None:
    """Each request is told before another process decides."""
    alone, shared = (play(count, ALIKE, 34.0, 0.0, "adaptive") for count in (1, 4))
    assert alone.most == MOST
    assert shared.most == MOST
    assert mean(shared.ttfts) <= 1.1 * mean(alone.ttfts)


def test_without_telling_each_other_they_would_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedLoad, "look", lambda *_: None)
    monkeypatch.setattr(SharedLoad, "have_filled", lambda *_: False)
    assert play(4, ALIKE, 34.0, 0.0, "adaptive", 60.0).most > 2 * MOST

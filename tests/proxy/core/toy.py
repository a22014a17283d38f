"""A toy fleet in virtual time: engines with a prefill speed and a shared step, and a router."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from statistics import quantiles
from typing import Any

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Lease
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Outcome, Refusal, RequestInfo, Usage
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router, RouterSettings
from tests.present import present


@dataclass(frozen=True)
class Speed:
    token_s: float = 2e-4  # per prefilled token
    base_s: float = 0.02  # of a step
    sequence_s: float = 5e-4  # added by each sequence that decodes
    budget: int = 2048  # tokens in a step
    shorts_pass: bool = False  # whether shorts are prefilled before longs


Speeds = Speed | dict[str, Speed]


@dataclass(eq=False)
class Job:
    """One request, from its client to its end."""

    info: RequestInfo
    output: int
    at: float
    lease: Lease | None = None
    left: int = 0  # tokens to prefill
    written: int = 0
    first_at: float | None = None
    done_at: float | None = None
    refusal: Refusal | None = None

    @property
    def ttft(self) -> float:
        """The seconds from sending to the first token."""
        assert self.first_at is not None
        return self.first_at - self.at

    @property
    def where(self) -> str:
        return present(self.lease).worker.name


@dataclass(eq=False)
class Engine:
    """A worker's engine: prefills come first, in order of arrival, in chunks beside the decodes."""

    speed: Speed
    jobs: list[Job] = field(default_factory=list)
    busy: bool = False
    cached: set[int] = field(default_factory=set)
    most_jobs: int = 0

    def take(self, job: Job) -> None:
        blocks = job.info.prefix
        held = next((i for i, block in enumerate(blocks) if block not in self.cached), len(blocks))
        share = held / len(blocks) if blocks else 0.0
        job.left = max(int(job.info.prompt_tokens * (1 - share)), 1)
        self.jobs.append(job)
        self.most_jobs = max(self.most_jobs, len(self.jobs))

    def step(self) -> tuple[float, list[tuple[Job, bool]]]:
        """Return a step's time and the jobs that wrote a token, and if it was the first."""
        speed = self.speed
        decoding = [job for job in self.jobs if job.left == 0]
        budget = speed.budget
        wrote = [(job, False) for job in decoding]
        prefilling = [job for job in self.jobs if job.left]
        if speed.shorts_pass:
            prefilling.sort(key=lambda job: job.info.long)
        for job in prefilling:
            chunk = min(job.left, budget)
            budget -= chunk
            job.left -= chunk
            if chunk and job.left == 0:
                self.cached.update(job.info.prefix)
                wrote.append((job, True))
        seconds = speed.base_s + speed.sequence_s * len(decoding)
        return seconds + speed.token_s * (speed.budget - budget), wrote


class Toy:
    """Plays requests through a router to toy engines."""

    def __init__(self, *specs: WorkerSpec, speed: Speeds, **settings: Any) -> None:
        self.now = 0.0
        self.fleet = Fleet()
        self.engines: dict[str, Engine] = {}
        for spec in specs:
            self.fleet.roster.add(spec)
            self.fleet.health.probe_ok(spec.name, 0.0)
            own = speed if isinstance(speed, Speed) else speed[spec.name]
            self.engines[spec.name] = Engine(own)
        self.router = Router(RouterSettings(**settings), self.fleet)
        self.jobs: list[Job] = []
        self._waiting: dict[Ticket, Job] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.finished: Callable[[Job], None] = lambda _: None

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), call))

    def run(self, until: float = 1e9) -> None:
        """Play until nothing is left to do, or until a time."""
        self.at(self.now, self._tick)
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()

    def _tick(self) -> None:
        self._due()
        if self._waiting or self._events:
            self.at(self.now + 0.1, self._tick)

    def send(self, info: RequestInfo, output: int) -> Job:
        job = Job(info, output, self.now)
        self.jobs.append(job)
        info.long = info.expected_tokens > self.router.settings.short_limit
        placed = self.router.submit(info, self.now)
        if isinstance(placed, Ticket):
            self._waiting[placed] = job
        else:
            self._placed(job, placed)
        return job

    def _placed(self, job: Job, placed: Lease | Refusal) -> None:
        if isinstance(placed, Refusal):
            job.refusal = placed
            return
        job.lease = placed
        engine = self.engines[placed.worker.name]
        engine.take(job)
        if not engine.busy:
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        engine.busy = bool(engine.jobs)
        if not engine.busy:
            return
        seconds, wrote = engine.step()

        def end() -> None:
            for job, first in wrote:
                self._wrote(engine, job, first)
            self._due()
            self._step(engine)

        self.at(self.now + seconds, end)

    def _wrote(self, engine: Engine, job: Job, first: bool) -> None:
        assert job.lease is not None
        job.written += 1
        if first:
            job.first_at = self.now
            if job.info.stream:
                self.router.leases.record_first_token(job.lease, self.now)
        if job.info.stream:
            self.router.leases.record_tokens(job.lease, 1)
        if job.written >= job.output:
            engine.jobs.remove(job)
            job.done_at = self.now
            usage = Usage(job.info.prompt_tokens, job.written)
            self.router.leases.finish(job.lease, self.now, Outcome.DONE, usage)
            self.finished(job)

    def _due(self) -> None:
        for ticket, placed in self.router.pop_due(self.now):
            self._placed(self._waiting.pop(ticket), placed)


def p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[-1]

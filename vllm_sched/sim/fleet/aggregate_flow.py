"""A large fleet: the real router core and fluid engines, with aggregate figures only.

Each finished request is added to sketches and dropped, so memory depends only on requests under
way. A million requests on a thousand workers take minutes. The router decides and learns as usual;
gauges are up to one second old, as with real probes.

Not simulated: token-by-token progress in the router, disconnecting clients, failing workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Lease
from proxy.core.fleet.slots import QUEUED_GAUGE
from proxy.core.model.role import Role
from proxy.core.model.specs import Gauges, WorkerSpec
from proxy.core.model.types import Outcome, Refusal, Usage
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router, RouterSettings
from vllm_sched.bench.results.stats import Trend
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.engines.quantile_sketch import QuantileSketch
from vllm_sched.sim.fleet.as_ask import ask_of
from vllm_sched.sim.fleet.lateness import Lateness, ObservedFlight
from vllm_sched.sim.types import Event, Job, Leg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from proxy.core.tenants.tenants import TenantSpec
    from vllm_sched.bench.results.goodput import Targets
    from vllm_sched.bench.traffic.types import Request
    from vllm_sched.sim.types import WorkerModel

MODEL = "model"
PROBE_INTERVAL_S = 1.0
NEVER = math.inf
# Module constants save an attribute lookup per event.
WHOLE, PREFILL, DECODE = Leg.WHOLE, Leg.PREFILL, Leg.DECODE


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    model: WorkerModel
    role: Role = Role.GENERAL
    max_requests: int | None = None


class EndedRequest(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    ttft: float
    tpot: float
    longest: float  # gap between tokens
    latency: float


@dataclass(slots=True)
class ClassFigures:
    arrived: int = 0
    done: int = 0
    met: int = 0  # within the targets
    kept: int = 0  # within the targets or tolerably late, see `AggregateFlow`
    handed_over: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: QuantileSketch = field(default_factory=QuantileSketch)
    tpot: QuantileSketch = field(default_factory=QuantileSketch)
    longest: QuantileSketch = field(default_factory=QuantileSketch)  # longest gap per request
    e2el: QuantileSketch = field(default_factory=QuantileSketch)  # only if it is a target

    @property
    def share(self) -> float:
        return self.met / self.arrived if self.arrived else 0.0

    @property
    def kept_share(self) -> float:
        """Share of arrivals within the targets or tolerably late."""
        return self.kept / self.arrived if self.arrived else 0.0

    def add(self, ended: EndedRequest, *, met: bool, kept: bool, whole: bool) -> None:
        """Count a request; its latency only if `whole`."""
        self.done += 1
        self.met += met
        self.kept += kept
        self.prompt_tokens += ended.prompt_tokens
        self.output_tokens += ended.output_tokens
        self.ttft.add(ended.ttft)
        if whole:
            self.e2el.add(ended.latency)
        if ended.output_tokens > 1:
            self.tpot.add(ended.tpot)
            self.longest.add(ended.longest)

    def merge(self, other: ClassFigures) -> None:
        self.arrived += other.arrived
        self.done += other.done
        self.met += other.met
        self.kept += other.kept
        self.handed_over += other.handed_over
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens
        self.ttft.merge(other.ttft)
        self.tpot.merge(other.tpot)
        self.longest.merge(other.longest)
        self.e2el.merge(other.e2el)


@dataclass(slots=True)
class FlowResult:
    all: ClassFigures
    classes: dict[str, ClassFigures]
    refused: int
    span_s: float  # of arrivals
    duration_s: float  # until the last end
    gaps: QuantileSketch  # between tokens
    growth: float = 0.0  # of the time to first token, seconds per second
    failed: bool = False  # stopped early because too many requests were late

    @property
    def rate(self) -> float:
        return self.all.arrived / self.span_s if self.span_s else 0.0

    @property
    def goodput(self) -> float:
        return self.rate * self.all.share

    @property
    def throughput(self) -> float:
        figures = self.all
        return (figures.prompt_tokens + figures.output_tokens) / (self.duration_s or 1.0)


def merge_results(runs: Sequence[FlowResult]) -> FlowResult:
    """Return the sum of several runs of a fleet, with the worst queue growth."""
    whole, classes, gaps = ClassFigures(), dict[str, ClassFigures](), QuantileSketch()
    for run in runs:
        whole.merge(run.all)
        gaps.merge(run.gaps)
        for klass, figures in run.classes.items():
            classes.setdefault(klass, ClassFigures()).merge(figures)
    return FlowResult(
        whole,
        classes,
        refused=sum(run.refused for run in runs),
        span_s=sum(run.span_s for run in runs),
        duration_s=sum(run.duration_s for run in runs),
        gaps=gaps,
        growth=max((run.growth for run in runs), default=0.0),
        failed=any(run.failed for run in runs),
    )


class _Flight(ObservedFlight):
    __slots__ = ("cached", "index", "lease", "longest")

    def __init__(self, request: Request, *, counts: bool) -> None:
        super().__init__(request, counts=counts)
        self.lease: Lease | None = None
        self.index = 0  # worker of the current leg
        self.longest = 0.0
        self.cached = 0


class AggregateFlow:
    """A simulated fleet that keeps only aggregate figures.

    `borne_s` returns the tolerated time to first token of a prompt length: a long prompt may exceed
    the target but must not starve.
    """

    def __init__(
        self,
        workers: Sequence[PlacedWorker],
        settings: RouterSettings,
        targets: Targets,
        borne_s: Callable[[int], float] = lambda _prompt: 0.0,
        tenants: Sequence[TenantSpec] = (),
    ) -> None:
        self._targets = targets
        self._borne_s = borne_s
        fleet = Fleet()
        for placed in workers:
            model = placed.model
            name = model.name
            fleet.roster.add(
                WorkerSpec(
                    name, f"http://{name}", placed.role, MODEL, model.max_model_len,
                    placed.max_requests,
                )
            )  # fmt: skip
            fleet.health.probe_ok(name, 0.0)
        self.router = Router(settings, fleet)
        self.router.tenants.replace(list(tenants), {})
        self._prefixes = settings.prefix_affinity
        self._names = [placed.model.name for placed in workers]
        self._rooms = [placed.model.kv_tokens for placed in workers]
        self._index = {name: index for index, name in enumerate(self._names)}
        self.engines = [FluidEngine(placed.model, ended=self._noted) for placed in workers]
        self._due: list[tuple[float, int]] = []
        self._known = [NEVER] * len(workers)
        self._flights: dict[str, _Flight] = {}
        self._tickets: dict[Ticket, _Flight] = {}
        self._next_probe = 0.0
        self._number = self._warm = 0
        self._refused = 0
        self._last = 0.0
        self._lateness = Lateness(targets, borne_s)
        self._all = ClassFigures()
        self._trend = Trend()
        self._classes: dict[str, ClassFigures] = {}

    def play(
        self,
        requests: Iterable[Request],
        *,
        warm: int = 0,
        most_late: float = NEVER,
        most_lost: Mapping[str, float] | None = None,
    ) -> FlowResult:
        """Play requests, ordered by time, until all have ended or the run has failed.

        The run fails above `most_late` refused or late requests, or above `most_lost` requests of a
        class beyond the tolerated time. The first `warm` requests are not counted.
        """
        self._warm = warm
        late = self._lateness = Lateness(self._targets, self._borne_s, most_late, most_lost)
        at = began = 0.0
        for request in requests:
            at = request.at
            self._until(at)
            self._arrive(request, at)
            if self._number == warm:
                began = at
            late.look(at)
            if late.too_many:
                break
        span = at - began
        while (self._flights or self._tickets) and not late.too_many:
            if not self._tickets:
                self._next_probe = NEVER  # no request is left to place
            soonest = min(self._next_probe, self._due[0][0] if self._due else NEVER)
            if soonest == NEVER:
                break
            self._until(soonest)
            late.look(soonest)
        gaps = QuantileSketch()
        for engine in self.engines:
            gaps.merge(engine.gaps)
        growth = self._trend.growth
        return FlowResult(
            self._all, self._classes, self._refused, span, self._last, gaps, growth, late.too_many
        )

    # Time

    def _until(self, now: float) -> None:
        due, known, engines = self._due, self._known, self.engines
        while True:
            at = due[0][0] if due else NEVER
            if self._next_probe <= now and self._next_probe <= at:
                self._probe(self._next_probe)
                self._next_probe += PROBE_INTERVAL_S
            elif at <= now:
                index = heappop(due)[1]
                if known[index] != at:
                    continue
                ended = False
                for event in engines[index].advance(at):
                    ended |= self._heard(event)
                self._touch(index)
                if ended and self._tickets:
                    self._place_waiting(at)
            else:
                return

    def _touch(self, index: int) -> None:
        at = self.engines[index].next_at()
        if at != self._known[index]:
            self._known[index] = at
            if at < NEVER:
                heappush(self._due, (at, index))

    def _probe(self, now: float) -> None:
        fleet = self.router.fleet
        for index, engine in enumerate(self.engines):
            told = engine.gauges(now)
            gauges = Gauges(now, told.running, told.waiting, told.kv_usage, self._rooms[index])
            gauges.extra[QUEUED_GAUGE] = told.waiting - told.fetching
            fleet.health.set_gauges(self._names[index], gauges)
        self._place_waiting(now)

    # Requests

    def _figures(self, klass: str) -> ClassFigures:
        found = self._classes.get(klass)
        if found is None:
            found = self._classes[klass] = ClassFigures()
        return found

    def _arrive(self, request: Request, now: float) -> None:
        self._number += 1
        flight = _Flight(request, counts=self._number > self._warm)
        if flight.counts:
            self._all.arrived += 1
            self._figures(request.klass).arrived += 1
            self._lateness.arrived(flight)
        hashed = self._prefixes and bool(request.shared)
        ask = ask_of(self.router, MODEL, request, self._number, hashed=hashed)
        answer = self.router.submit(ask, now)
        if isinstance(answer, Lease):
            self._send(flight, answer, now)
        elif isinstance(answer, Ticket):
            self._tickets[answer] = flight
        else:
            self._refuse(flight)

    def _place_waiting(self, now: float) -> None:
        for ticket, answer in self.router.due(now):
            flight = self._tickets.pop(ticket)
            if isinstance(answer, Refusal):
                self._refuse(flight)
            else:
                self._send(flight, answer, now)

    def _refuse(self, flight: _Flight) -> None:
        self._refused += flight.counts
        self._lateness.ended(flight, met=False, kept=False)

    def _send(self, flight: _Flight, lease: Lease, now: float) -> None:
        flight.lease = lease
        handed = lease.prefill
        worker, leg = (lease.worker, WHOLE) if handed is None else (handed.worker, PREFILL)
        self._flights[lease.ask.id] = flight
        self._submit(flight, self._index[worker.name], leg, now)

    def _submit(self, flight: _Flight, index: int, leg: Leg, now: float) -> None:
        request, lease = flight.request, flight.lease
        assert lease is not None  # noqa: S101 - set by the callers
        output = 1 if leg is PREFILL else request.output_tokens
        flight.index = index
        job = Job(lease.ask.id, request.prompt_tokens, output, 0, request.shared, leg)
        self.engines[index].submit(job, now)
        self._touch(index)

    def _noted(self, job: Job, gap: float) -> None:
        self._flights[job.id].longest = gap

    def _heard(self, event: Event) -> bool:
        """Report an event to the router; return True if a slot became free."""
        flight = self._flights[event.job_id]
        lease, request, at = flight.lease, flight.request, event.at
        if lease is None:
            return False
        router = self.router
        prompt = request.prompt_tokens
        if event.fetched:
            if lease.prefill is not None:
                before = self._index[lease.prefill.worker.name]
                self.engines[before].release(event.job_id, at)
                self._touch(before)
            return False
        if lease.prefill is not None and not lease.sent:
            router.leases.prefilled(lease, at, Usage(prompt, 1, event.cached_tokens))
            self._submit(flight, self._index[lease.worker.name], DECODE, at)
            return True
        if flight.first < 0:
            flight.first = at
            flight.cached = event.cached_tokens
            self._lateness.first(flight)
            router.leases.first_token(lease, at)
        if not event.finished:
            return False
        del self._flights[event.job_id]
        usage = Usage(prompt, request.output_tokens, flight.cached)
        router.leases.tokens(lease, request.output_tokens)
        router.leases.finish(lease, at, Outcome.DONE, usage)
        self._last = max(self._last, at)
        if flight.counts:
            self._count(flight, at, handed=lease.prefill is not None)
        return True

    def _count(self, flight: _Flight, at: float, *, handed: bool) -> None:
        request, targets = flight.request, self._targets
        output = request.output_tokens
        ttft, latency = flight.first - request.at, at - request.at
        tpot = (at - flight.first) / (output - 1) if output > 1 else 0.0
        kept = targets.paced(tpot, flight.longest)
        met = kept and targets.in_time(ttft, latency)
        self._trend.add(request.at, ttft)
        kept = met or (kept and ttft <= self._borne_s(request.prompt_tokens))
        self._lateness.ended(flight, met=met, kept=kept)
        ended = EndedRequest(request.prompt_tokens, output, ttft, tpot, flight.longest, latency)
        for figures in (self._all, self._figures(request.klass)):
            figures.add(ended, met=met, kept=kept, whole=targets.e2el is not None)
            figures.handed_over += handed

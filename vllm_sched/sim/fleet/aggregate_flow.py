"""A large fleet of fluid engines with aggregate figures only.

Each finished request is added to sketches and dropped, so memory depends only on requests under
way. A million requests on a thousand workers take minutes. Clients never disconnect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final

from proxy.core.fleet.charges import idle_fleet
from proxy.core.fleet.leases import Lease
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.router import Router, RouterSettings
from proxy.core.tenants.tenants import TenantSpec
from vllm_sched.bench.results.goodput import Targets
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.engines.fluid_engine import FluidEngine
from vllm_sched.sim.engines.quantile_sketch import QuantileSketch
from vllm_sched.sim.fleet.base_fleet import BaseSimulatedFleet, RequestFlight
from vllm_sched.sim.fleet.events import Arrivals
from vllm_sched.sim.fleet.figures import FlowFigures, FlowResult
from vllm_sched.sim.types import Event, Job, WorkerModel

MODEL: Final = "model"


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    model: WorkerModel
    role: Role = Role.GENERAL
    max_requests: int | None = None

    @property
    def spec(self) -> WorkerSpec:
        name, length = self.model.name, self.model.max_model_len
        return WorkerSpec(name, f"http://{name}", self.role, MODEL, length, self.max_requests)


class AggregateFlow(BaseSimulatedFleet):
    def __init__(
        self,
        workers: Sequence[PlacedWorker],
        settings: RouterSettings,
        targets: Targets,
        tolerated_ttft_s: Callable[[int], float] = lambda _prompt: 0.0,
        tenants: Sequence[TenantSpec] = (),
    ) -> None:
        router = Router(settings, idle_fleet(placed.spec for placed in workers))
        router.tenants.replace(list(tenants), {})
        self._fluid = [FluidEngine(placed.model, ended=self._record_gap) for placed in workers]
        super().__init__(router, {engine.model.name: engine for engine in self._fluid}, MODEL)
        self._figures = FlowFigures(targets, tolerated_ttft_s)
        self._warm = 0
        self._began = self._newest = 0.0
        self._max_late = inf
        self._max_lost: Mapping[str, float] = {}
        self._failed = False

    def play(
        self,
        requests: Iterable[Request],
        *,
        warm: int = 0,
        max_late: float = inf,
        max_lost: Mapping[str, float] | None = None,
    ) -> FlowResult:
        """Play requests, ordered by time, until all have ended or the run has failed.

        It fails above `max_late` refused or late requests, or above `max_lost` requests of a
        class beyond the tolerated time. The first `warm` requests are not counted.
        """
        self._warm, self._max_late, self._max_lost = warm, max_late, max_lost or {}
        self._queue.schedule(0.0, partial(self._read_gauges, self.router))
        arrivals = Arrivals(self._queue, self._arrive)
        arrivals.open(iter(requests))
        while (arrivals.more or self._flights) and not self._failed:
            self._queue.step()
        gaps = QuantileSketch()
        for engine in self._fluid:
            gaps.merge(engine.gaps)
        span = self._newest - self._began
        return self._figures.result(span, self._last_end, gaps, failed=self._failed)

    def _arrive(self, request: Request, now: float, ended: Callable[[float], None] | None) -> None:
        self._newest = now
        if self._num_arrived >= self._warm:
            self._figures.record_arrival(request.klass)
        elif self._num_arrived == self._warm - 1:
            self._began = now
        self._enter(request, Outcome.from_request(request, now), self.router, now, ended)

    def _report_event(self, flight: RequestFlight, lease: Lease, event: Event, now: float) -> None:
        prefill, outcome = lease.prefill, flight.outcome
        begins = event.tokens and not outcome.ticks and (prefill is None or prefill.released)
        if begins and flight.number >= self._warm:
            klass, prompt = flight.request.klass, flight.request.prompt_tokens
            self._figures.record_first_token(klass, prompt, event.at - outcome.at)
            self._note_failure(klass)
        super()._report_event(flight, lease, event, now)

    def _record_gap(self, job: Job, longest: float) -> None:
        self._flights[job.id].longest_gap = longest

    def _end_request(self, flight: RequestFlight, now: float, *, pause_s: float = 0.0) -> None:
        super()._end_request(flight, now, pause_s=pause_s)
        if flight.number < self._warm:
            return
        figures, outcome, klass = self._figures, flight.outcome, flight.request.klass
        handed_over = flight.lease is not None and flight.lease.prefill is not None
        figures.record_end(outcome, klass, flight.longest_gap, handed_over=handed_over)
        if outcome.good:
            figures.trend.add(outcome.at, outcome.ttft)
        self._note_failure(klass)

    def _note_failure(self, klass: str) -> None:
        figures = self._figures
        lost = figures.lost[klass] > self._max_lost.get(klass, inf)
        self._failed |= lost or figures.late > self._max_late

"""A fleet in virtual time: the real router core in front of simulated workers.

    fleet = SimulatedFleet(config, models, ExactEngine)
    played = fleet.play(schedule)        # outcomes, as in `bench`

In a closed loop a refused client returns after `Retry-After`, or after `MIN_RETRY_PAUSE_S`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from proxy.config import FleetConfig
from proxy.core.fleet.charges import idle_fleet
from proxy.core.router import Router
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.sessions import PlayedSession
from vllm_sched.bench.traffic.schedule import Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.errors import UsageError
from vllm_sched.sim.fleet.base_fleet import BaseSimulatedFleet
from vllm_sched.sim.fleet.events import Arrivals
from vllm_sched.sim.fleet.request_info import salt_prefixes
from vllm_sched.sim.fleet.session_flow import SessionFlow
from vllm_sched.sim.types import Engine, MakeEngine, WorkerModel

TIMEOUT_S: Final = 600.0


@dataclass(slots=True)
class CoarseStream(Outcome):
    """An outcome with only the first token and the end: gaps are unknown."""

    @property
    def itls(self) -> list[float]:
        return []


@dataclass(frozen=True)
class PlayedFleet:
    outcomes: tuple[Outcome, ...]
    duration: float  # virtual seconds until the last response ended
    cut: int  # requests cut to the fleet's longest context
    facts: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    sessions: tuple[PlayedSession, ...] = ()


def make_router(config: FleetConfig, models: Mapping[str, WorkerModel]) -> Router:
    """Return a router to which all workers are up."""
    from proxy.app import router_settings, specs
    from proxy.setup.tenancy import apply_tenants

    fleet = idle_fleet(specs(config))
    for spec in specs(config):
        fleet.roster.set_served(spec.name, (spec.model,), models[spec.name].max_model_len)
    router = Router(router_settings(config), fleet)
    apply_tenants(router.tenants, config, {})
    return router


class SimulatedFleet(BaseSimulatedFleet):
    def __init__(
        self,
        config: FleetConfig,
        models: Mapping[str, WorkerModel],
        make: MakeEngine,
        *,
        timeout_s: float = TIMEOUT_S,
        coarse: bool = False,
    ) -> None:
        """Build the fleet; `coarse` if its engines do not report each token."""
        self.models = models
        engines: dict[str, Engine] = {}
        for name, model in models.items():
            try:
                engines[name] = make(model)
            except UsageError as error:
                raise UsageError(f"worker {name}: {error}") from None
        router, probe_s = make_router(config, models), config.router.probe.interval_s
        super().__init__(router, engines, config.model, probe_s=probe_s, timeout_s=timeout_s)
        # Looked up once: slow with many workers.
        self.longest = router.fleet.roster.contexts().get(config.model) or 0
        self._outcome = CoarseStream if coarse else Outcome
        self._outcomes: list[Outcome] = []
        self._cut = 0

    def play(
        self,
        schedule: Schedule,
        report_progress: Callable[[float, int, int], None] | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> PlayedFleet:
        """Play a schedule to its end, or until `stopped` returns True.

        `report_progress` is called with the time, requests sent and requests ended.
        """
        queue = self._queue
        for index, router in enumerate(self.routers):
            queue.schedule(
                self._probe_s * index / len(self.routers), partial(self._read_gauges, router)
            )
        flow = SessionFlow(queue, self._arrive, limit=self.longest, end=schedule.ends_after_s)
        arrivals = Arrivals(queue, flow.begin if schedule.source.has_sessions else self._arrive)
        arrivals.play(schedule)
        steps = 0
        while arrivals.more or self._flights or flow.open:
            queue.step()
            steps += 1
            if report_progress is not None and not steps & 0x3FF:
                sent = len(self._outcomes)
                report_progress(queue.now, sent, sent - len(self._flights))
            if stopped is not None and not steps & 0x3F and stopped():
                for flight in self._flights.values():
                    flight.outcome.interrupted = True
                return self._make_result(flow, queue.now, interrupted=True)
        return self._make_result(flow, self._last_end)

    def _make_result(
        self, flow: SessionFlow, end: float, *, interrupted: bool = False
    ) -> PlayedFleet:
        return PlayedFleet(
            outcomes=tuple(self._outcomes),
            duration=end,
            cut=self._cut + flow.cut,
            facts=self._facts(),
            interrupted=interrupted,
            sessions=tuple(flow.played),
        )

    def _choose_router(self) -> Router:
        return self.router

    def _arrive(
        self, request: Request, now: float, ended: Callable[[float], None] | None
    ) -> Outcome:
        fitted = request.fit_to(self.longest)
        self._cut += fitted is not request
        router = self._choose_router()
        fitted = salt_prefixes(router, fitted)
        outcome = self._outcome.from_request(fitted, now)
        outcome.sent = now
        self._outcomes.append(outcome)
        self._enter(fitted, outcome, router, now, ended)
        return outcome

    def _facts(self) -> dict[str, Any]:
        reasons: Counter[str] = Counter()
        handovers: Counter[str] = Counter()
        for router in self.routers:
            for (_, reason), count in router.placer.decisions.items():
                reasons[str(reason)] += count
            for (_, why), count in router.placer.handovers.items():
                handovers[why] += count
        return {
            "workers": {name: dict(engine.facts()) for name, engine in self.engines.items()},
            "decisions": dict(sorted(reasons.items())),
            "handovers": dict(sorted(handovers.items())),
            "transfers": dict(sorted(self._transfers.items())),
        }

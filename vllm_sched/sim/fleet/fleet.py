"""A fleet in virtual time: the real router core in front of simulated workers.

    fleet = SimulatedFleet(config, models, ExactEngine)
    played = fleet.play(schedule)        # outcomes, as in `bench`

Real: placement, queueing, refusals, hand-overs, learned estimates and charges. Assumed: every
worker is up; metrics are read every `probe.interval_s`; the network is perfect; prompt sizes are
known. In a closed loop a refused client returns after `Retry-After`, or after `MIN_RETRY_PAUSE_S`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Final

from proxy.config import FleetConfig
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Lease
from proxy.core.fleet.slots import QUEUED_GAUGE
from proxy.core.model import types as core
from proxy.core.model.specs import Gauges
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.results.sessions import PlayedSession
from vllm_sched.bench.traffic.schedule import MIN_RETRY_PAUSE_S, Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.errors import UsageError
from vllm_sched.sim.fleet.as_ask import ask_of, priority_of, salt_prefixes
from vllm_sched.sim.fleet.events import ARRIVAL_RANK, STEP_RANK, Arrivals, EventQueue
from vllm_sched.sim.fleet.session_flow import SessionFlow
from vllm_sched.sim.types import Engine, Event, Job, Leg, MakeEngine, WorkerModel

TIMEOUT_S: Final = 600.0


@dataclass(slots=True, eq=False)
class RequestFlight:
    request: Request
    number: int
    router: Router
    outcome: Outcome
    ended: Callable[[float], None] | None  # called at the end, in a closed loop
    lease: Lease | None = None
    ticket: Ticket | None = None
    cached_tokens: int = 0
    priority: int = 0
    held_by: str = ""  # worker with unreleased KV of the prefill leg

    @property
    def id(self) -> str:
        return str(self.number)


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
    from proxy.setup.tenancy import take_tenants

    fleet = Fleet()
    for spec in specs(config):
        fleet.roster.add(spec)
        fleet.health.probe_ok(spec.name, now=0.0)
        fleet.roster.set_served(spec.name, (spec.model,), models[spec.name].max_model_len)
    router = Router(router_settings(config), fleet)
    take_tenants(router.tenants, config, {})
    return router


class SimulatedFleet:
    """A simulated fleet that plays one schedule."""

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
        self.engines: dict[str, Engine] = {}
        for name, model in models.items():
            try:
                self.engines[name] = make(model)
            except UsageError as error:
                raise UsageError(f"worker {name}: {error}") from None
        self.router = make_router(config, models)
        self.routers = [self.router]
        self._model = config.model
        # Looked up once: slow with many workers.
        self.longest = self.router.fleet.roster.contexts().get(config.model) or 0
        self._probe_s = config.router.probe.interval_s
        self._timeout_s = timeout_s
        self._outcome = CoarseStream if coarse else Outcome
        self._queue = EventQueue()
        self._planned = dict.fromkeys(self.engines, inf)
        self._flights: dict[str, RequestFlight] = {}
        self._queued: dict[Ticket, RequestFlight] = {}
        self._deadlines: deque[tuple[float, str]] = deque()
        self._outcomes: list[Outcome] = []
        self._cut = 0
        self._last = 0.0
        self._transfers: Counter[str] = Counter()

    def play(
        self,
        schedule: Schedule,
        told: Callable[[float, int, int], None] | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> PlayedFleet:
        """Play a schedule to its end, or until `stopped` returns True.

        `told` is called with the time, requests sent and requests ended.
        """
        queue = self._queue
        for index, router in enumerate(self.routers):
            queue.at(self._probe_s * index / len(self.routers), partial(self._look, router))
        flow = SessionFlow(queue, self._arrive, limit=self.longest, end=schedule.ends_after_s)
        arrivals = Arrivals(
            schedule, queue, flow.begin if schedule.source.has_sessions else self._arrive
        )
        steps = 0
        while arrivals.more or self._flights or flow.open:
            queue.step()
            steps += 1
            if told is not None and not steps & 0x3FF:
                sent = len(self._outcomes)
                told(queue.now, sent, sent - len(self._flights))
            if stopped is not None and not steps & 0x3F and stopped():
                for flight in self._flights.values():
                    flight.outcome.interrupted = True
                return self._played(flow, queue.now, interrupted=True)
        return self._played(flow, self._last)

    def _played(self, flow: SessionFlow, end: float, *, interrupted: bool = False) -> PlayedFleet:
        return PlayedFleet(
            tuple(self._outcomes),
            end,
            self._cut + flow.cut,
            self._facts(),
            interrupted,
            tuple(flow.played),
        )

    # Arrivals

    def _choose_router(self) -> Router:
        return self.router

    def _arrive(
        self, request: Request, now: float, ended: Callable[[float], None] | None
    ) -> Outcome:
        fitted = request.fitted(self.longest)
        self._cut += fitted is not request
        router = self._choose_router()
        fitted = salt_prefixes(router, fitted)
        number = len(self._outcomes)
        outcome = self._outcome.of(fitted, now)
        outcome.sent = now
        self._outcomes.append(outcome)
        flight = RequestFlight(fitted, number, router, outcome, ended)
        self._flights[flight.id] = flight
        self._deadlines.append((now + self._timeout_s, flight.id))
        hashed = router.settings.prefix_affinity and bool(fitted.shared)
        ask = ask_of(router, self._model, fitted, number, hashed=hashed)
        self._placed(flight, router.submit(ask, now), now)
        return outcome

    def _placed(
        self, flight: RequestFlight, answer: Lease | Ticket | core.Refusal, now: float
    ) -> None:
        if isinstance(answer, core.Refusal):
            flight.outcome.error = answer.message
            self._over(flight, now, pause_s=max(answer.retry_after_s or 0.0, MIN_RETRY_PAUSE_S))
        elif isinstance(answer, Ticket):
            flight.ticket = answer
            self._queued[answer] = flight
            settle = partial(self._settle, flight.router)
            self._queue.at(answer.deadline, settle, rank=ARRIVAL_RANK)
        else:
            flight.ticket, flight.lease = None, answer
            flight.priority = priority_of(flight.router, answer.ask)
            flight.outcome.worker = answer.decision.route
            first = answer.prefill
            if first is None:
                self._send(flight, answer.worker.name, Leg.WHOLE, now)
            else:
                self._send(flight, first.worker.name, Leg.PREFILL, now)

    def _settle(self, router: Router, now: float) -> None:
        if not self._queued:
            return
        for ticket, answer in list(router.due(now)):  # a placement can free more slots
            self._placed(self._queued.pop(ticket), answer, now)

    def _send(self, flight: RequestFlight, name: str, leg: Leg, now: float) -> None:
        request = flight.request
        job = Job(
            flight.id,
            request.prompt_tokens,
            request.output_tokens,
            flight.number,
            request.shared,
            leg,
            request.klass,
            request.tenant,
            flight.priority,
        )
        engine, front_s = self.engines[name], self.models[name].front_s

        def arrive(at: float) -> None:
            if flight.id in self._flights:
                engine.submit(job, at)
                self._plan(name)

        if front_s:
            self._queue.at(now + front_s, arrive, rank=ARRIVAL_RANK)
        else:
            arrive(now)

    # Engine events

    def _plan(self, name: str) -> None:
        at = self.engines[name].next_at()
        if at < self._planned[name]:
            self._planned[name] = at
            self._queue.at(at, lambda now: self._step(name, at, now), rank=STEP_RANK)

    def _step(self, name: str, planned: float, now: float) -> None:
        if self._planned[name] != planned:
            return  # superseded by an earlier event
        self._planned[name] = inf
        for event in self.engines[name].advance(now):
            flight = self._flights.get(event.job_id)
            if flight is not None and flight.lease is not None:
                self._happened(flight, flight.lease, event, now)
        self._plan(name)

    def _happened(self, flight: RequestFlight, lease: Lease, event: Event, now: float) -> None:
        first = lease.prefill
        if first is not None and not first.released:
            if event.finished:
                self._handed_over(flight, lease, event, now)
            return
        if event.fetched:
            self._let_go(flight, now)
        outcome, router = flight.outcome, flight.router
        if event.tokens:
            if not outcome.ticks:
                router.leases.first_token(lease, event.at)
                flight.cached_tokens = event.cached_tokens
                if first is None:
                    outcome.cached_tokens = event.cached_tokens
            outcome.ticks.append(event.at)
            outcome.completed += event.tokens
            router.leases.tokens(lease, event.tokens)
        if event.finished:
            self._let_go(flight, now)
            usage = core.Usage(
                flight.request.prompt_tokens, outcome.completed, flight.cached_tokens
            )
            router.leases.finish(lease, now, core.Outcome.DONE, usage)
            self._over(flight, now)

    def _handed_over(self, flight: RequestFlight, lease: Lease, event: Event, now: float) -> None:
        first = lease.prefill
        if first is None:
            return
        router, flight.held_by = flight.router, first.worker.name
        flight.outcome.cached_tokens = event.cached_tokens
        usage = core.Usage(flight.request.prompt_tokens, 1, event.cached_tokens)
        router.leases.prefilled(lease, now, usage)
        if router.leases.reconsider(lease, now, may_move=True):
            flight.outcome.worker = pair = f"{flight.held_by}>{lease.worker.name}"
            self._transfers[pair] += 1
            self._send(flight, lease.worker.name, Leg.DECODE, now)
        else:  # no decode worker is available: restart the request
            self._let_go(flight, now)
            avoid = lease.worker if router.leases.has_another(lease) else first.worker
            outcome = core.Outcome.MOOT
            anew = router.retry(lease, now, outcome, avoid=avoid, after=lease, free=True)
            self._placed(flight, anew, now)
        self._settle(router, now)

    def _let_go(self, flight: RequestFlight, now: float) -> None:
        if flight.held_by:
            self.engines[flight.held_by].release(flight.id, now)
            self._plan(flight.held_by)
            flight.held_by = ""

    # Ends

    def _over(self, flight: RequestFlight, now: float, *, pause_s: float = 0.0) -> None:
        del self._flights[flight.id]
        self._last = max(self._last, now)
        if flight.ended is not None:
            # Scheduled, so that this request is removed before the next arrives. Without a pause
            # after a refusal, time would stand still.
            self._queue.at(now + pause_s, flight.ended, rank=ARRIVAL_RANK)
        self._settle(flight.router, now)

    def _give_up(self, now: float) -> None:
        """Abort requests after the client timeout."""
        while self._deadlines and self._deadlines[0][0] <= now:
            if (flight := self._flights.get(self._deadlines.popleft()[1])) is None:
                continue
            flight.outcome.error = f"no complete response within {self._timeout_s:g} s"
            if flight.ticket is not None:
                del self._queued[flight.ticket]
                flight.router.withdraw(flight.ticket, now)
            elif flight.lease is not None:
                name = flight.lease.under_way.worker.name
                self.engines[name].abort(flight.id, now)
                self._plan(name)
                self._let_go(flight, now)
                flight.router.leases.finish(flight.lease, now, core.Outcome.CLIENT_GONE)
            self._over(flight, now)

    # Probes

    def _look(self, router: Router, now: float) -> None:
        for name, engine in self.engines.items():
            model, seen = self.models[name], engine.gauges(now)
            extra: dict[str, float] = {QUEUED_GAUGE: seen.waiting - seen.fetching}
            if model.policies:  # only our schedulers report a backlog
                extra["backlog"] = seen.backlog_tokens
                extra["backlog_long"] = seen.backlog_long_tokens
            router.fleet.health.set_gauges(
                name,
                Gauges(
                    now,
                    seen.running,
                    seen.waiting,
                    seen.kv_usage,
                    model.kv_tokens,
                    preemptions_total=seen.preemptions,
                    extra=extra,
                ),
            )
        self._give_up(now)
        self._settle(router, now)
        self._queue.at(now + self._probe_s, partial(self._look, router), rank=STEP_RANK)

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

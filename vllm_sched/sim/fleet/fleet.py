"""A whole fleet in virtual time: the real router core in front of simulated workers.

    fleet = SimulatedFleet(config, models, ExactEngine)
    played = fleet.play(schedule)        # outcomes, as `bench` has them

What is real: who is chosen, who waits and who is refused, hand-overs, all that the router learns,
and its charges. What is assumed: every worker is up, connected and known to be so; a page of
metrics is read from each every `probe.interval_s`; nobody's network loses anything; a request's
size in tokens is known; in a closed loop a client that was refused asks again when it was told to
(`Retry-After`), or `MIN_RETRY_PAUSE_S` later.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any, Final

from proxy.config import FleetConfig
from proxy.core.fleet.charges import Fleet
from proxy.core.fleet.leases import Lease
from proxy.core.fleet.slots import QUEUED
from proxy.core.model import types as core
from proxy.core.model.specs import Gauges
from proxy.core.router import Router
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.traffic.schedule import MIN_RETRY_PAUSE_S, Schedule
from vllm_sched.bench.traffic.types import Request
from vllm_sched.errors import UsageError
from vllm_sched.sim.fleet.as_ask import apart, ask_of, priority_of
from vllm_sched.sim.fleet.events import EventQueue
from vllm_sched.sim.types import Engine, Event, Job, Leg, MakeEngine, WorkerModel

TIMEOUT_S: Final = 600.0
# Of one moment: what comes is heard before anybody steps.
COMES, STEPS = 0, 1


@dataclass(slots=True, eq=False)
class RequestFlight:
    """A request under way."""

    request: Request
    number: int
    outcome: Outcome
    ended: Callable[[float], None] | None  # whom to tell: a closed loop
    lease: Lease | None = None
    ticket: core.Ticket | None = None
    cached_tokens: int = 0
    priority: int = 0
    held_by: str = ""  # the worker that keeps its prefill's KV

    @property
    def id(self) -> str:
        """Its name in engines."""
        return str(self.number)


@dataclass(slots=True)
class CoarseStream(Outcome):
    """One of which the first token and the end are all that was told: its gaps are not known."""

    @property
    def itls(self) -> list[float]:
        """Leave out what would pass for a gap."""
        return []


@dataclass(frozen=True)
class PlayedFleet:
    """A finished simulation, or the part of one until the user had enough."""

    outcomes: tuple[Outcome, ...]
    duration: float  # virtual, until the last answer ended
    cut: int  # requests cut to what the fleet holds
    facts: Mapping[str, Any] = field(default_factory=dict)
    interrupted: bool = False


class SimulatedFleet:
    """Plays one schedule; see the module's text."""

    def __init__(
        self,
        config: FleetConfig,
        models: Mapping[str, WorkerModel],
        make: MakeEngine,
        *,
        seed: int = 0,
        timeout_s: float = TIMEOUT_S,
        coarse: bool = False,
    ) -> None:
        """Put a fleet together; `coarse` if its engines don't tell each token."""
        from proxy.app import router_settings, specs
        from proxy.setup.tenancy import take_tenants

        self.models = models
        self.engines: dict[str, Engine] = {}
        for name, model in models.items():
            try:
                self.engines[name] = make(model, seed=seed)
            except UsageError as error:
                raise UsageError(f"worker {name}: {error}") from None
        self.router = Router(router_settings(config), Fleet())
        for spec in specs(config):
            self.router.fleet.add(spec)
            self.router.fleet.probe_ok(spec.name, now=0.0)
            self.router.fleet.set_served(spec.name, (spec.model,), models[spec.name].max_model_len)
        take_tenants(self.router.tenants, config, {})
        self._model = config.model
        # Of the model, as clients are told; not looked up with each request, for workers are many.
        self.longest = self.router.fleet.contexts().get(config.model) or 0
        self._probe_s = config.router.probe.interval_s
        self._timeout_s = timeout_s
        self._outcome = CoarseStream if coarse else Outcome
        self._agenda = EventQueue()
        self._planned = dict.fromkeys(self.engines, inf)
        self._flights: dict[str, RequestFlight] = {}
        self._queued: dict[core.Ticket, RequestFlight] = {}
        self._deadlines: deque[tuple[float, str]] = deque()
        self._outcomes: list[Outcome] = []
        self._more = False  # whether requests are still to come
        self._cut = 0
        self._last = 0.0
        self._transfers: Counter[str] = Counter()

    def play(
        self,
        schedule: Schedule,
        told: Callable[[float, int, int], None] | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> PlayedFleet:
        """Play a schedule to its end, or until somebody has `stopped` it.

        `told` hears of time, requests sent and requests ended.
        """
        self._more = True
        if schedule.concurrency is None:
            self._open(iter(schedule))
        else:
            self._closed(schedule, schedule.concurrency)
        self._look(0.0)
        agenda = self._agenda
        steps = 0
        while self._more or self._flights:
            agenda.step()
            steps += 1
            if told is not None and not steps & 0x3FF:
                sent = len(self._outcomes)
                told(agenda.now, sent, sent - len(self._flights))
            if stopped is not None and not steps & 0x3F and stopped():
                return self._broken_off(agenda.now)
        return PlayedFleet(tuple(self._outcomes), self._last, self._cut, self._facts())

    def _broken_off(self, now: float) -> PlayedFleet:
        for flight in self._flights.values():
            flight.outcome.interrupted = True
        outcomes = tuple(self._outcomes)
        return PlayedFleet(outcomes, now, self._cut, self._facts(), interrupted=True)

    # Who comes when

    def _open(self, requests: Iterator[Request]) -> None:
        request = next(requests, None)
        if request is None:
            self._more = False
            return
        coming = request

        def come(now: float) -> None:
            self._comes(coming, now, None)
            self._open(requests)

        self._agenda.at(coming.at, come, rank=COMES)

    def _closed(self, schedule: Schedule, concurrency: int) -> None:
        requests = iter(schedule)
        head = next(requests, None)
        requests = chain([head] if head is not None else [], requests)
        end = schedule.ends_after_s

        def following(now: float) -> None:
            request = next(requests, None) if end is None or now < end else None
            if request is None:
                self._more = False
            else:
                self._comes(request, now, following)

        for _ in range(concurrency):
            self._agenda.at(0.0, following, rank=COMES)

    def _comes(self, request: Request, now: float, ended: Callable[[float], None] | None) -> None:
        fitted = request.fitted(self.longest)
        self._cut += fitted is not request
        fitted = apart(self.router, fitted)
        number = len(self._outcomes)
        outcome = self._outcome(
            now, fitted.klass, fitted.prompt_tokens, fitted.output_tokens, fitted.tenant, now
        )
        self._outcomes.append(outcome)
        flight = RequestFlight(fitted, number, outcome, ended)
        self._flights[flight.id] = flight
        self._deadlines.append((now + self._timeout_s, flight.id))
        router = self.router
        hashed = router.settings.prefix_affinity and bool(fitted.shared)
        ask = ask_of(router, self._model, fitted, number, hashed=hashed)
        self._placed(flight, router.submit(ask, now), now)

    def _placed(
        self, flight: RequestFlight, answer: Lease | core.Ticket | core.Refusal, now: float
    ) -> None:
        if isinstance(answer, core.Refusal):
            flight.outcome.error = answer.message
            self._over(flight, now, pause_s=max(answer.retry_after_s or 0.0, MIN_RETRY_PAUSE_S))
        elif isinstance(answer, core.Ticket):
            flight.ticket = answer
            self._queued[answer] = flight
            self._agenda.at(answer.deadline, self._settle, rank=COMES)
        else:
            flight.ticket, flight.lease = None, answer
            flight.priority = priority_of(self.router, answer.ask)
            flight.outcome.worker = answer.decision.route
            first = answer.prefill
            if first is None:
                self._send(flight, answer.worker.name, Leg.WHOLE, now)
            else:
                self._send(flight, first.worker.name, Leg.PREFILL, now)

    def _settle(self, now: float) -> None:
        """Send off those that may leave the queue."""
        if not self._queued:
            return
        for ticket, answer in list(self.router.due(now)):  # placing one may make room for more
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
            self._agenda.at(now + front_s, arrive, rank=COMES)
        else:
            arrive(now)

    # What engines do

    def _plan(self, name: str) -> None:
        """Be there when an engine has something to tell."""
        at = self.engines[name].next_at()
        if at < self._planned[name]:
            self._planned[name] = at
            self._agenda.at(at, lambda now: self._step(name, at, now), rank=STEPS)

    def _step(self, name: str, planned: float, now: float) -> None:
        if self._planned[name] != planned:
            return  # it was planned anew, for sooner
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
        outcome, router = flight.outcome, self.router
        if event.tokens:
            if not outcome.ticks:
                router.first_token(lease, event.at)
                flight.cached_tokens = event.cached_tokens
            outcome.ticks.append(event.at)
            outcome.completed += event.tokens
            router.tokens(lease, event.tokens)
        if event.finished:
            self._let_go(flight, now)
            usage = core.Usage(
                flight.request.prompt_tokens, outcome.completed, flight.cached_tokens
            )
            router.finish(lease, now, core.Outcome.DONE, usage)
            self._over(flight, now)

    def _handed_over(self, flight: RequestFlight, lease: Lease, event: Event, now: float) -> None:
        first = lease.prefill
        if first is None:
            return
        router, flight.held_by = self.router, first.worker.name
        usage = core.Usage(flight.request.prompt_tokens, 1, event.cached_tokens)
        router.prefilled(lease, now, usage)
        if router.reconsider(lease, now, may_move=True):
            flight.outcome.worker = pair = f"{flight.held_by}>{lease.worker.name}"
            self._transfers[pair] += 1
            self._send(flight, lease.worker.name, Leg.DECODE, now)
        else:  # nobody is good for the rest: it is begun anew
            self._let_go(flight, now)
            tried = frozenset({lease.worker if router.has_another(lease) else first.worker})
            outcome = core.Outcome.MOOT
            anew = router.retry(lease, now, outcome, tried=tried, after=lease, free=True)
            self._placed(flight, anew, now)
        self._settle(now)

    def _let_go(self, flight: RequestFlight, now: float) -> None:
        """Free what a prefill worker keeps for a request."""
        if flight.held_by:
            self.engines[flight.held_by].release(flight.id, now)
            self._plan(flight.held_by)
            flight.held_by = ""

    # Ends

    def _over(self, flight: RequestFlight, now: float, *, pause_s: float = 0.0) -> None:
        del self._flights[flight.id]
        self._last = max(self._last, now)
        if flight.ended is not None:
            # Not now: who comes next must not be placed before this one is forgotten.
            # And not without a pause after a refusal: time would stand still, and all be refused.
            self._agenda.at(now + pause_s, flight.ended, rank=COMES)
        self._settle(now)

    def _give_up(self, now: float) -> None:
        """Have clients leave that have waited too long."""
        while self._deadlines and self._deadlines[0][0] <= now:
            if (flight := self._flights.get(self._deadlines.popleft()[1])) is None:
                continue
            flight.outcome.error = f"no whole answer within {self._timeout_s:g} s"
            if flight.ticket is not None:
                del self._queued[flight.ticket]
                self.router.withdraw(flight.ticket, now)
            elif flight.lease is not None:
                name = flight.lease.under_way.worker.name
                self.engines[name].abort(flight.id, now)
                self._plan(name)
                self._let_go(flight, now)
                self.router.finish(flight.lease, now, core.Outcome.CLIENT_GONE)
            self._over(flight, now)

    # What the router hears of its workers

    def _look(self, now: float) -> None:
        for name, engine in self.engines.items():
            model, seen = self.models[name], engine.gauges(now)
            extra: dict[str, float] = {QUEUED: seen.waiting - seen.fetching}
            if model.policies:  # our schedulers alone tell that
                extra["backlog"] = seen.backlog_tokens
                extra["backlog_long"] = seen.backlog_long_tokens
            self.router.fleet.set_gauges(
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
        self._settle(now)
        self._agenda.at(now + self._probe_s, self._look, rank=STEPS)

    def _facts(self) -> dict[str, Any]:
        reasons: Counter[str] = Counter()
        for (_, reason), count in self.router.decisions.items():
            reasons[str(reason)] += count
        handovers: Counter[str] = Counter()
        for (_, why), count in self.router.handovers.items():
            handovers[why] += count
        return {
            "workers": {name: dict(engine.facts()) for name, engine in self.engines.items()},
            "decisions": dict(sorted(reasons.items())),
            "handovers": dict(sorted(handovers.items())),
            "transfers": dict(sorted(self._transfers.items())),
        }

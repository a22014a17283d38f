"""Requests on their way through the real router core and simulated workers, in virtual time.

Real: placement, queueing, refusals, hand-overs, learned estimates and charges. Assumed: every
worker is up; metrics are read every `probe_s`; the network is perfect; prompt sizes are known.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf

from proxy.core.fleet.leases import Lease, LegFailure
from proxy.core.fleet.slots import QUEUED_GAUGE
from proxy.core.model import types as core
from proxy.core.model.specs import Gauges
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router
from vllm_sched.bench.results.outcome import Outcome
from vllm_sched.bench.traffic.schedule import MIN_RETRY_PAUSE_S
from vllm_sched.bench.traffic.types import Request
from vllm_sched.sim.fleet.events import ARRIVAL_RANK, STEP_RANK, EventQueue
from vllm_sched.sim.fleet.request_info import priority_of, request_info_of
from vllm_sched.sim.types import Engine, Event, Job, Leg


@dataclass(slots=True, eq=False)
class RequestFlight:
    request: Request
    number: int
    id: str  # the number
    router: Router
    outcome: Outcome
    ended: Callable[[float], None] | None  # called at the end, in a closed loop
    lease: Lease | None = None
    ticket: Ticket | None = None
    cached_tokens: int = 0
    priority: int = 0
    kv_worker: str = ""  # with unreleased KV of the prefill leg
    longest_gap: float = 0.0  # between tokens, if the engine tells


class BaseSimulatedFleet:
    """A router in front of engines; a subclass says which requests arrive and what is kept."""

    def __init__(
        self,
        router: Router,
        engines: Mapping[str, Engine],
        model: str,
        *,
        probe_s: float = 1.0,
        timeout_s: float = inf,
    ) -> None:
        self.engines = engines
        self.router = router
        self.routers = [router]
        self._model = model
        self._probe_s = probe_s
        self._timeout_s = timeout_s
        self._queue = EventQueue()
        self._planned_at = dict.fromkeys(engines, inf)
        self._flights: dict[str, RequestFlight] = {}
        self._queued: dict[Ticket, RequestFlight] = {}
        self._deadlines: deque[tuple[float, str]] = deque()
        self._num_arrived = 0
        self._last_end = 0.0
        self._transfers: Counter[str] = Counter()

    # Arrivals

    def _enter(
        self,
        request: Request,
        outcome: Outcome,
        router: Router,
        now: float,
        ended: Callable[[float], None] | None,
    ) -> None:
        number = self._num_arrived
        self._num_arrived += 1
        flight = RequestFlight(request, number, str(number), router, outcome, ended)
        self._flights[flight.id] = flight
        if self._timeout_s < inf:
            self._deadlines.append((now + self._timeout_s, flight.id))
        hashed = router.settings.prefix_affinity and bool(request.shared)
        info = request_info_of(router, self._model, request, number, hashed=hashed)
        self._handle_placement(flight, router.submit(info, now), now)

    def _handle_placement(
        self, flight: RequestFlight, placement: Lease | Ticket | core.Refusal, now: float
    ) -> None:
        if isinstance(placement, core.Refusal):
            flight.outcome.error = placement.message
            self._end_request(
                flight, now, pause_s=max(placement.retry_after_s or 0.0, MIN_RETRY_PAUSE_S)
            )
        elif isinstance(placement, Ticket):
            flight.ticket = placement
            self._queued[placement] = flight
            dispatch = partial(self._dispatch_queued, flight.router)
            self._queue.schedule(placement.deadline, dispatch, rank=ARRIVAL_RANK)
        else:
            flight.ticket, flight.lease = None, placement
            flight.priority = priority_of(flight.router, placement.info)
            flight.outcome.worker = placement.decision.route
            if (prefill := placement.prefill) is None:
                self._send(flight, placement.worker.name, Leg.WHOLE, now)
            else:
                self._send(flight, prefill.worker.name, Leg.PREFILL, now)

    def _dispatch_queued(self, router: Router, now: float) -> None:
        if not self._queued:
            return
        for ticket, placement in list(router.pop_due(now)):  # a placement can free more slots
            self._handle_placement(self._queued.pop(ticket), placement, now)

    def _send(self, flight: RequestFlight, name: str, leg: Leg, now: float) -> None:
        request = flight.request
        job = Job(
            flight.id,
            request.prompt_tokens,
            request.output_tokens,
            text=flight.number,
            shared=request.shared,
            leg=leg,
            klass=request.klass,
            priority=flight.priority,
        )
        if front_s := self.engines[name].model.front_s:
            submit = partial(self._deliver, flight, name, job)
            self._queue.schedule(now + front_s, submit, rank=ARRIVAL_RANK)
        else:
            self._deliver(flight, name, job, now)

    def _deliver(self, flight: RequestFlight, name: str, job: Job, now: float) -> None:
        if flight.id in self._flights:
            self.engines[name].submit(job, now)
            self._schedule_engine(name)

    # Engine events

    def _schedule_engine(self, name: str) -> None:
        at = self.engines[name].next_at()
        if at < self._planned_at[name]:
            self._planned_at[name] = at
            self._queue.schedule(at, partial(self._advance_engine, name, at), rank=STEP_RANK)

    def _advance_engine(self, name: str, planned: float, now: float) -> None:
        if self._planned_at[name] != planned:
            return  # superseded by an earlier event
        self._planned_at[name] = inf
        for event in self.engines[name].advance(now):
            flight = self._flights.get(event.job_id)
            if flight is not None and flight.lease is not None:
                self._report_event(flight, flight.lease, event, now)
        self._schedule_engine(name)

    def _report_event(self, flight: RequestFlight, lease: Lease, event: Event, now: float) -> None:
        prefill = lease.prefill
        if prefill is not None and not prefill.released:
            if event.finished:
                self._start_decode(flight, lease, prefill, event, now)
            return
        if event.fetched:
            self._release_prefill(flight, now)
        outcome, router = flight.outcome, flight.router
        if event.tokens:
            if not outcome.ticks:
                router.leases.record_first_token(lease, event.at)
                flight.cached_tokens = event.cached_tokens
                if prefill is None:
                    outcome.cached_tokens = event.cached_tokens
            outcome.ticks.append(event.at)
            outcome.completed += event.tokens
            router.leases.record_tokens(lease, event.tokens)
        if event.finished:
            self._release_prefill(flight, now)
            usage = core.Usage(
                flight.request.prompt_tokens, outcome.completed, flight.cached_tokens
            )
            router.leases.finish(lease, now, core.Outcome.DONE, usage)
            self._end_request(flight, now)

    def _start_decode(
        self, flight: RequestFlight, lease: Lease, prefill: Lease, event: Event, now: float
    ) -> None:
        router, flight.kv_worker = flight.router, prefill.worker.name
        flight.outcome.cached_tokens = event.cached_tokens
        usage = core.Usage(flight.request.prompt_tokens, 1, event.cached_tokens)
        router.leases.end_prefill(lease, now, usage)
        if router.leases.recheck_decode_worker(lease, now, may_move=True):
            flight.outcome.worker = pair = f"{flight.kv_worker}>{lease.worker.name}"
            self._transfers[pair] += 1
            self._send(flight, lease.worker.name, Leg.DECODE, now)
        else:  # no decode worker is available: restart the request
            self._release_prefill(flight, now)
            avoid = lease.worker if router.leases.has_other_worker(lease) else prefill.worker
            failure = LegFailure(core.Outcome.MOOT, avoid, free=True)
            self._handle_placement(flight, router.retry(lease, now, failure), now)
        self._dispatch_queued(router, now)

    def _release_prefill(self, flight: RequestFlight, now: float) -> None:
        if flight.kv_worker:
            self.engines[flight.kv_worker].release(flight.id, now)
            self._schedule_engine(flight.kv_worker)
            flight.kv_worker = ""

    # Ends

    def _end_request(self, flight: RequestFlight, now: float, *, pause_s: float = 0.0) -> None:
        del self._flights[flight.id]
        self._last_end = max(self._last_end, now)
        if flight.ended is not None:
            # Scheduled, so that this request is removed before the next arrives. Without a pause
            # after a refusal, time would stand still.
            self._queue.schedule(now + pause_s, flight.ended, rank=ARRIVAL_RANK)
        self._dispatch_queued(flight.router, now)

    def _abort_timed_out(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            if (flight := self._flights.get(self._deadlines.popleft()[1])) is None:
                continue
            flight.outcome.error = f"no complete response within {self._timeout_s:g} s"
            if flight.ticket is not None:
                del self._queued[flight.ticket]
                flight.router.withdraw(flight.ticket, now)
            elif flight.lease is not None:
                name = flight.lease.running_leg.worker.name
                self.engines[name].abort(flight.id, now)
                self._schedule_engine(name)
                self._release_prefill(flight, now)
                flight.router.leases.finish(flight.lease, now, core.Outcome.CLIENT_GONE)
            self._end_request(flight, now)

    # Probes

    def _read_gauges(self, router: Router, now: float) -> None:
        for name, engine in self.engines.items():
            model, seen = engine.model, engine.gauges(now)
            extra: dict[str, float] = {QUEUED_GAUGE: seen.waiting - seen.fetching}
            if model.policies:  # only our schedulers report a backlog
                extra["backlog"] = seen.backlog_tokens
                extra["backlog_long"] = seen.backlog_long_tokens
            router.fleet.health.set_gauges(
                name,
                Gauges(
                    now, seen.running, seen.waiting, seen.kv_usage, model.kv_tokens, extra=extra
                ),
            )
        self._abort_timed_out(now)
        self._dispatch_queued(router, now)
        self._queue.schedule(
            now + self._probe_s, partial(self._read_gauges, router), rank=STEP_RANK
        )

"""One request from its arrival to the end of its response.

`state` defines the phases. An exchange owns the body, the ticket in the queue, the retries and the
end. Each placement makes a new `Attempt`, which handles the worker.

A request uses callbacks only: no task, timer or future. Every exit calls `close` once. Each lease
is finished once, and each ticket is withdrawn or placed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial
from math import inf

from proxy.core.fleet.leases import Lease, LegFailure
from proxy.core.fleet.worker import Worker
from proxy.core.lifecycle import billing
from proxy.core.model import refusals
from proxy.core.model.refusals import RefusedError
from proxy.core.model.route_table import PromptFields, Route
from proxy.core.model.types import Outcome, Reason, Refusal, RequestInfo
from proxy.core.queue.ticket import Ticket
from proxy.core.request.continuable import ENDS, HANDOVER, NO_WORKER, WAITS
from proxy.core.request.json_body import LargeBody
from proxy.core.request.json_edit import edit_members
from proxy.core.request.json_limits import LARGE_BODY_BYTES
from proxy.core.request.response_owners import OWNER_WAIT_S, OwnerWait
from proxy.core.tenants.limits import LimitExceeded, PendingDecision
from proxy.http.local_responses import refuse
from proxy.http.request import Request
from proxy.http.response_parser import ResponseHead
from proxy.metrics.registry import CLIENT_GONE
from proxy.wire.context import WireContext
from proxy.wire.exchange.attempt import Attempt
from proxy.wire.exchange.continuation import Obstacle, record_not_continued
from proxy.wire.exchange.moves import SETTLE_S, move_request
from proxy.wire.exchange.owner import AttemptOwner
from proxy.wire.exchange.progress import break_off
from proxy.wire.exchange.state import COUNTING, DONE, LIMITING, QUEUED
from proxy.wire.exchange.targets import read_request
from proxy.wire.exchange.tokenize import TokenizeRequest
from proxy.wire.extension import Client
from proxy.wire.large_body_queue import LargeBodyReader
from proxy.wire.worker.connection import WorkerError

logger = logging.getLogger(__name__)

FORM = PromptFields.FORM
NOT_CONTINUED = "not_continued"
UNFAILED = WorkerError.DRAINED, WorkerError.LATE_TOKENS


class Exchange(AttemptOwner):
    def __init__(
        self,
        wire: WireContext,
        client: Client,
        request: Request,
        route: Route,
        arrived_at: float = inf,
    ) -> None:
        """Create an exchange; the time limit starts at `arrived_at`."""
        super().__init__(wire, client, request, route)
        limit_s = wire.settings.request_s
        self._limit_s = inf if limit_s is None else limit_s
        self.deadline = arrived_at + self._limit_s
        self._reader: LargeBodyReader | None = None
        self._owner_wait: OwnerWait | None = None  # also once it is over
        self._pending_decision: PendingDecision | None = None
        self._tokenize_request: TokenizeRequest | None = None
        self._ticket: Ticket | None = None
        self._attempt: Attempt | None = None
        self._held_bytes = 0  # kept for retries
        self._account: str | None = None

    def __repr__(self) -> str:
        return f"<Exchange {self.request.id.decode('latin-1')} {self.route.name} {self.state.name}>"

    # To a worker

    def start(self, now: float) -> None:
        wire, request = self.wire, self.request
        self.record.begin(now, request, wire.metrics)
        wire.exchanges.add(self)
        if (refusal := self._reserve_memory(now)) is not None:
            self.refuse(now, refusal)
        elif len(request.body) > LARGE_BODY_BYTES and self.route.shape is not FORM:
            self._reader = wire.large_bodies.add(request.body, self._read, self.end_for_shutdown)
        else:
            self._read(now)

    def _reserve_memory(self, now: float) -> Refusal | None:
        """Reserve the body's size; return a refusal, also if the tenant's limits are spent."""
        wire, tenant = self.wire, self.request.head.tenant
        if tenant is not None and (spent := wire.router.refusal_if_spent(tenant, now)) is not None:
            return spent
        budget, size = wire.body_budget, len(self.request.body)
        self._account = budget.account(tenant)
        try:
            budget.reserve(size, self._account)
        except RefusedError as error:
            return error.refusal
        self._held_bytes = size
        return None

    def _read(self, now: float, large: LargeBody | None = None) -> None:
        may_wait = self._owner_wait is None and self.wire.router.shares_responses
        request, info = self.request, read_request(self, now, large, may_wait=may_wait)
        if info is None:
            self._owner_wait = OwnerWait(now + OWNER_WAIT_S, partial(self._read_again, large=large))
            self.wire.add_short_wait(self._owner_wait)
            return
        if isinstance(info, Refusal):
            self.refuse(now, info)
            return
        self.info = self.record.info = info
        if info.edits is not None:
            request.body = edit_members(request.body, info.edits, known_members=info.found_members)
        self._pending_decision = billing.ask_other_hosts(info, self._admission_decided)
        if self._pending_decision is None:
            self._admit(now, info)
        else:
            self.set_state(LIMITING)

    def _read_again(self, now: float, *, large: LargeBody | None) -> None:
        if self._owner_wait is not None:
            self.wire.short_waits.discard(self._owner_wait)
        self._read(now, large)

    def _admission_decided(self, _: LimitExceeded | None) -> None:
        self._pending_decision = None
        if self.info is None:
            return
        now = self.wire.clock()
        try:
            self._admit(now, self.info)
        except Exception:  # others wait for the same answer
            logger.exception("cannot place a request: %r", self)
            self.end_for_shutdown(now)

    def _admit(self, now: float, info: RequestInfo) -> None:
        wire, request = self.wire, self.request
        counter = wire.router.counter_for(info)
        if counter is None:
            self._place(now, info)
            return
        if (refusal := wire.router.enter(info, now)) is not None:
            self.refuse(now, refusal)
            return
        self.set_state(COUNTING)
        self._tokenize_request = wire.make_tokenize_request(now, self._tokens_counted)
        pool = wire.pools.pool_for(counter)
        self._tokenize_request.ask(now, pool, request.body, request.head.authorization)

    def _tokens_counted(self, now: float, tokens: int | None) -> None:
        request, info = self._tokenize_request, self.info
        if request is None or info is None:
            return
        self._tokenize_request = None
        self.wire.short_waits.discard(request)
        if tokens is not None:
            self.wire.router.apply_count(info, tokens)
        self._place(now, info)

    def _place(self, now: float, info: RequestInfo) -> None:
        self._wait_or_run(now, self.wire.router.submit(info, now))

    def _wait_or_run(self, now: float, placement: Lease | Ticket | Refusal) -> None:
        """Wait in the queue, run on a worker, or end."""
        if not isinstance(placement, Ticket):
            self.placement_decided(now, placement)
            return
        self.set_state(QUEUED)
        self._ticket = placement
        self._attempt = None
        self.wire.queue(placement, self)

    def placement_decided(self, now: float, placed: Lease | Refusal) -> None:
        if (ticket := self._ticket) is not None:
            self.record.queue_s += now - ticket.since
            self._ticket = None
        if isinstance(placed, Refusal):
            self.refuse(now, placed)
            return
        self.record.place(now, placed.decision)
        attempt = self._attempt = Attempt(self, placed)
        attempt.start(now, placed)

    def try_another(
        self, now: float, outcome: Outcome, error: WorkerError, head: ResponseHead | None = None
    ) -> Refusal | None:
        """Send the request to another worker; return a refusal if none is left.

        `head`: the response that reports the failure.
        """
        attempt, wire = self._attempt, self.wire
        lease = None if attempt is None else attempt.lease
        if attempt is None or lease is None:
            return self.last_refusal
        worker, unfailed = lease.running_leg.worker, error in UNFAILED
        # The worker is well, or has done nothing.
        free = unfailed or outcome is Outcome.REFUSED or error is WorkerError.CONNECT
        self.suspect = None
        if (handover := attempt.handover) is not None:
            worker, outcome = handover.end_failed(now, outcome, error)
            self.suspect = handover if handover.is_suspect else None
            free = free or handover.is_free
        free = free or (self.begun_response is not None and outcome is Outcome.BUSY)
        attempt.handover = attempt.lease = None
        failure = LegFailure(
            outcome,
            avoid=None if unfailed else worker,
            retry_after_s=None if head is None else head.retry_after_s,
            free=free,
            dropped=error is WorkerError.RESET and not (attempt.response or self.begun_response),
            why=error.value if head is None else str(head.status),
        )
        placed = wire.router.retry(lease, now, failure)
        if not isinstance(placed, Refusal):
            wire.metrics.count_retry(worker.name, error.value)
            attempt.drop_connection()
            self._wait_or_run(now, placed)
        wire.dispatch_queued(now)
        return placed if isinstance(placed, Refusal) else None

    # Off a worker that is drained

    def uses(self, worker: Worker) -> bool:
        lease = None if self._attempt is None else self._attempt.lease
        if lease is None or self.state is DONE:
            return False
        return worker in (lease.worker, lease.running_leg.worker)

    def move(self, now: float) -> str:
        attempt = self._attempt
        if attempt is None or attempt.lease is None:
            return ENDS
        if attempt.handover is not None:
            return HANDOVER
        settled = now - attempt.journal_awaited_since >= SETTLE_S
        why = move_request(self, now, attempt.lease, attempt.response, settled=settled)
        if why == WAITS:
            attempt.journal_awaited_since = min(attempt.journal_awaited_since, now)
            attempt.pause()
        elif why:
            self.release(now)
        return why

    def release(self, now: float) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.journal_awaited_since != inf:
            attempt.journal_awaited_since = inf
            if self.client.writable:
                attempt.resume(now)

    def leave_workers(self, now: float, workers: Collection[Worker]) -> None:
        if self._attempt is not None:
            self._attempt.leave_workers(now, workers)

    # To the client

    def refuse(self, now: float, refusal: Refusal) -> None:
        if self.begun_response is not None:
            if failed := self.failed_worker:  # the stream did not go on since
                record_not_continued(self, now, Obstacle(NO_WORKER, refusal.message), failed)
            break_off(self, now, self.begun_response, refusal.message, NOT_CONTINUED, refusal)
            return
        keep_alive = self.request.head.keep_alive and not self.wire.leaving
        if refusal.reason is Reason.ROUTER_FULL:
            keep_alive = False  # the connection's file is needed
        response = refuse(refusal, self.request, keep_alive=keep_alive)
        self.record.sent_bytes += len(response)
        self.close(now, refusal.status, refusal.reason)
        self.client.write(response)
        self.client.end_response(now, keep_alive=keep_alive)

    def pause(self) -> None:
        if self._attempt is not None:
            self._attempt.pause()

    def resume(self, now: float) -> None:
        if self._attempt is not None:
            self._attempt.resume(now)

    # The end

    def client_left(self, now: float) -> None:
        self._stop(now)
        self.close(now, CLIENT_GONE)
        self.wire.dispatch_queued(now)

    def end_for_shutdown(self, now: float) -> None:
        self._end_early(now, refusals.draining(), "The router was stopped.", "router_stopped")

    def expire(self, now: float) -> None:
        refusal = refusals.request_timeout(self._limit_s)
        self._end_early(now, refusal, refusal.message, "time_limit", refusal)
        self.wire.dispatch_queued(now)

    def _end_early(
        self, now: float, refusal: Refusal, message: str, code: str, why: Refusal | None = None
    ) -> None:
        """Refuse the request, or break its response off with a message and a code."""
        attempt = self._attempt
        if attempt is not None and attempt.end_complete_stream(now):
            return
        self._stop(now)
        response = None if attempt is None else attempt.response
        if response is None or not response.has_begun:
            self.refuse(now, refusal)
        else:
            break_off(self, now, response, message, code, why)

    def _stop(self, now: float) -> None:
        wire = self.wire
        if self._reader is not None:
            self._reader.drop()
        if self._owner_wait is not None:
            wire.short_waits.discard(self._owner_wait)
        if self._pending_decision is not None:
            self._pending_decision.drop()
            self._pending_decision = None
        if (request := self._tokenize_request) is not None:
            self._tokenize_request = None
            wire.short_waits.discard(request)
            request.drop()
            if self.info is not None:
                wire.router.leave(self.info, now)
        if (ticket := self._ticket) is not None:
            self.record.queue_s += now - ticket.since
            del wire.queued[ticket]
            wire.router.withdraw(ticket, now)
        if self._attempt is not None:
            self._attempt.stop(now, Outcome.CLIENT_GONE)

    def forget_body(self) -> None:
        self.request.body = b""
        if self._held_bytes:
            self.wire.body_budget.release(self._held_bytes, self._account)
            self._held_bytes = 0

    def close(self, now: float, status: int, reason: Reason | None = None) -> None:
        self.set_state(DONE)
        self.forget_body()
        self.wire.remove_exchange(self)
        self.record.close(now, self.wire.metrics, self.route.name, status, reason)

"""One attempt at a request: a worker, or two for a hand-over, and the response as it arrives.

An attempt passes the response on, or fails and lets its exchange try another worker.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model import refusals
from proxy.core.model.types import Outcome, Refusal
from proxy.http.response_parser import OK, ResponseHead
from proxy.wire.exchange.continuation import (
    REFUSED_TOO,
    attempts_elsewhere,
    broken_message,
    continue_after_failure,
    expect_repeated,
    is_silent,
    move_stream,
    remove_repeated,
)
from proxy.wire.exchange.owner import AttemptOwner
from proxy.wire.exchange.progress import (
    break_off,
    count_tokens,
    end_stream,
    fast_path,
    finish,
    may_pass_at_once,
    pass_at_once,
    record_first_bytes,
    writer_for,
)
from proxy.wire.exchange.response_writer import ResponseWriter
from proxy.wire.exchange.state import PREFILLING, SENT
from proxy.wire.exchange.stream_fast_path import StreamFastPath
from proxy.wire.exchange.targets import body_with_targets
from proxy.wire.exchange.worker_errors import (
    MAX_ERROR_BYTES,
    fails_at_once,
    is_too_long,
    missing_route,
    must_be_read,
    refuses_our_key,
)
from proxy.wire.handover.first_token import begins_with_error
from proxy.wire.handover.two_legs import TwoLegExchange
from proxy.wire.timeouts import MAX_WAIT_FACTOR, extra_timeout_s, is_only_slow, response_timeout_s
from proxy.wire.worker.connection import WorkerConnection, WorkerError
from proxy.wire.worker.request_bytes import to_worker

BAD_REQUEST, BAD_GATEWAY, GATEWAY_TIMEOUT = 400, 502, 504
TOO_MANY_REQUESTS, SERVER_ERROR, UNAVAILABLE = 429, 500, 503
# Any other 5xx counts as a worker failure.
OUTCOMES = {
    TOO_MANY_REQUESTS: Outcome.BUSY,
    UNAVAILABLE: Outcome.BUSY,
    SERVER_ERROR: Outcome.ERRED,
}
# The worker does not support the request: not a failure.
NOT_SUPPORTED = frozenset([501, 505])


class Attempt:
    __slots__ = (
        "_error_body", "_exchange", "_fast_path", "_head", "_wire", "connection", "handover",
        "journal_awaited_since", "lease", "response", "timeout_s",
    )  # fmt: skip

    def __init__(self, exchange: AttemptOwner, lease: Lease) -> None:
        self.connection: WorkerConnection | None = None
        self.timeout_s = inf
        self.lease: Lease | None = lease  # None once the attempt has failed
        self.handover: TwoLegExchange | None = None
        self.journal_awaited_since = inf  # not read while the journal catches up
        self._exchange = exchange
        self._wire = exchange.wire
        self._head: ResponseHead | None = None  # held until the first body bytes
        self.response: ResponseWriter | None = None
        self._fast_path: StreamFastPath | None = None
        self._error_body: bytes | None = None  # of an error that must be read

    # To the worker

    def start(self, now: float, lease: Lease) -> None:
        exchange, wire, request = self._exchange, self._wire, self._exchange.request
        if lease.prefill is not None:
            exchange.set_state(PREFILLING)
            self.handover = TwoLegExchange(wire, request, lease, lease.prefill.worker)
            self.handover.prefill(now, self, body_with_targets(exchange, now))
            return
        exchange.set_state(SENT)
        self.timeout_s = response_timeout_s(lease, wire.settings.first_byte_s)
        pool = wire.pools.pool_for(lease.worker)
        pool.send(now, self, to_worker(request, pool, body_with_targets(exchange, now), request.id))

    def prefill_ended(self, now: float, response: bytes) -> None:
        handover, exchange = self.handover, self._exchange
        if handover is None:
            return
        exchange.record.prefilled_at = now
        if handover.decode(now, self, response):
            exchange.set_state(SENT)
        elif refusal := exchange.try_another(now, Outcome.MOOT, WorkerError.CONNECT):
            exchange.refuse(now, refusal)
        self._wire.dispatch_queued(now)

    # From the worker

    def response_begun(self, now: float, head: ResponseHead) -> None:
        """Start the response or a retry."""
        exchange, handover, status = self._exchange, self.handover, head.status
        begun = exchange.begun_response
        self._head = self._error_body = None
        if status == OK and begun is not None and head.length is None:
            self.response = expect_repeated(exchange, begun)
            if not exchange.client.writable:
                self.pause()
            return
        if status == OK and begun is None and handover is None:
            self._head = head  # the body may be one piece
            return
        if status >= BAD_REQUEST and self._retry_after_error(now, head):
            return
        if begun is not None:
            self._end_with(now, Outcome.REFUSED, exchange.last_refusal or REFUSED_TOO)
            return
        if handover is not None and status >= BAD_REQUEST:  # the connector did not see it
            handover.release_unfetched(now, healthy=True)
        if must_be_read(exchange, self.lease, status):
            self._error_body = b""
        cached_tokens = None if handover is None else handover.cached_tokens
        self.response = writer_for(exchange, head, cached_tokens)

    def _retry_after_error(self, now: float, head: ResponseHead) -> bool:
        """Retry after an error. Return False if the error goes to the client."""
        exchange, handover = self._exchange, self.handover
        prefilling = handover if handover is not None and handover.is_prefilling else None
        keyless = prefilling is None and refuses_our_key(exchange, self.lease, head.status)
        outcome = Outcome.FAILED if keyless else outcome_of(head)
        if outcome is not None:
            refusal = exchange.try_another(now, outcome, WorkerError.STATUS, head)
        elif prefilling is not None:
            # The prefill leg's limits differ from the client's.
            prefilling.handle_refused_prefill(now, head.status)
            refusal = exchange.try_another(now, Outcome.REFUSED, WorkerError.STATUS)
        else:
            return False
        if refusal is None:
            return True
        exchange.last_refusal = refusal
        if keyless:
            self._end_with(now, Outcome.FAILED, refusal)
        return keyless

    def body_received(self, now: float, body: bytes, ended: bool) -> None:
        """Pass on a piece of the response, unless another worker takes over."""
        exchange, response = self._exchange, self.response
        if response is None:
            response = self._begin_response(now, body, ended)
            if response is None:
                return
        if exchange.repeated is not None:
            new = self._new_part(now, body, ended)
            if new is None:
                return
            body = new
        if ended:
            if exchange.repeated is not None or response.is_truncated(exchange.route.name, body):
                self.connection_failed(now, WorkerError.RESET)
                return
            self.connection = None
        if continue_after_failure(exchange, self.lease, now, response, body):
            return
        if self.handover or self._error_body is not None or fails_at_once(response, body):
            checked = self._check_beginning(now, response, body, ended)
            if checked is None:
                return
            body = checked
        self._pass_on(now, response, body, ended)

    def _pass_on(self, now: float, response: ResponseWriter, body: bytes, ended: bool) -> None:
        exchange, had_begun = self._exchange, response.has_begun
        data = response.feed(body, ended)
        if response.has_begun and not had_begun:
            if not exchange.client.writable:
                self.pause()  # paused before the connection existed
            if self.handover is not None:  # a head alone proves no transfer
                self.handover.record_fetched()
            record_first_bytes(exchange, self.lease, now, response, data)
        if response.tokens:
            count_tokens(exchange, self.lease, now, response.tokens)
        if data:
            exchange.record.sent_bytes += len(data)
            exchange.client.write(data)
        if ended:
            finish(exchange, self.lease, now, response)
        elif response.tokens:
            self._open_fast_path(response)
        elif response.holds_opening and self.lease is not None and self.connection is not None:
            self.connection.deadline = self.lease.charged_at + self.timeout_s

    def _begin_response(self, now: float, body: bytes, ended: bool) -> ResponseWriter | None:
        """Return the writer for a response; None if all of it has been passed on."""
        head, self._head = self._head, None
        if head is None:
            return None
        if ended and self.lease is not None and may_pass_at_once(self._exchange, head):
            self.connection = None
            pass_at_once(self._exchange, self.lease, now, head, body)
            return None
        self.response = writer_for(self._exchange, head)
        return self.response

    def _new_part(self, now: float, body: bytes, ended: bool) -> bytes | None:
        """Return what is new of a stream that another worker repeats; None if there is nothing."""
        rest = remove_repeated(self._exchange, self.lease, now, body)
        if isinstance(rest, Refusal):
            self._end_with(now, Outcome.UNFINISHED, rest)
            return None
        return rest if rest or ended else None

    def _check_beginning(
        self, now: float, response: ResponseWriter, body: bytes, ended: bool
    ) -> bytes | None:
        """Return the bytes to pass on; None while a response does not show whether to retry."""
        handover = self.handover
        if handover is not None and handover.is_fetch_pending and response.status == OK:
            first = handover.first_pieces(body, ended, self.connection)
            if first is None:
                return None
            if begins_with_error(first) and self._retry_held_back(now, Outcome.ERRED):
                return None
            body = first
        elif fails_at_once(response, body) and self._retry_held_back(now, Outcome.ERRED):
            return None
        if self._error_body is None:
            return body
        return self._read_error(now, self._error_body + body, ended)

    def _open_fast_path(self, response: ResponseWriter) -> None:
        connection, lease, stream = self.connection, self.lease, response.unchanged_stream
        if connection is not None and lease is not None and stream is not None:
            if self._fast_path is None:
                self._fast_path = fast_path(self._exchange, lease, response, stream)
            connection.open_fast_path(self._fast_path)

    def _retry_held_back(self, now: float, outcome: Outcome) -> bool:
        """Retry after a response that was held back. Return False if no worker is left."""
        failed, self.response = self.response, None
        refusal = self._exchange.try_another(now, outcome, WorkerError.STATUS)
        if refusal is None:
            return True
        self.response, self._exchange.last_refusal = failed, refusal
        return False

    def _read_error(self, now: float, error_body: bytes, ended: bool) -> bytes | None:
        """Collect an error, and retry if the request was too long; else return the error."""
        self._error_body = error_body
        if not ended and len(error_body) <= MAX_ERROR_BYTES:
            return None
        self._error_body, lease, exchange = None, self.lease, self._exchange
        if ended and (refusal := missing_route(exchange, error_body)) is not None:
            self.response = None
            self._end_with(now, Outcome.REFUSED, refusal)
            return None
        if lease is None or not is_too_long(error_body):
            return error_body
        exchange.info = exchange.record.info = self._wire.router.leases.enlarge_request(lease)
        return None if self._retry_held_back(now, Outcome.REFUSED) else error_body

    def extra_wait_s(self, now: float) -> float:
        lease, handover = self.lease, self.handover
        if lease is None:
            return 0.0
        late_at = inf if handover is None else handover.late_at
        return extra_timeout_s(lease, now, self._wire.settings.first_byte_s, late_at)

    def leave_workers(self, now: float, workers: Collection[Worker]) -> None:
        lease, handover, exchange = self.lease, self.handover, self._exchange
        begun = self.response is not None and self.response.has_begun
        if lease is None or exchange.last_refusal or (begun and not is_silent(exchange, now)):
            return
        if lease.running_leg.worker not in workers:
            return
        attempts = attempts_elsewhere(exchange, lease) if begun else lease.attempts
        connection = self.connection
        if handover is not None and handover.is_prefilling:
            connection = handover.prefill_connection
        if connection is not None and self._wire.router.may_retry(lease, now, attempts):
            connection.fail(now, WorkerError.TIMEOUT)

    def connection_failed(self, now: float, error: WorkerError) -> None:
        """Retry, or break off a response that has begun."""
        exchange, wire = self._exchange, self._wire
        connection, self.connection = self.connection, None
        if error is WorkerError.OURS:
            wire.handle_local_failure(now)
            self._end_with(now, Outcome.MOOT, refusals.router_full())
            return
        lease, response = self.lease, self.response
        was_sent = connection is not None and connection.is_open
        silent = was_sent and not (self.handover or self._head or response)
        if error is WorkerError.TIMEOUT and silent and lease and is_only_slow(lease, now):
            refusal = refusals.response_timeout(MAX_WAIT_FACTOR * wire.settings.first_byte_s)
            self._end_with(now, Outcome.UNFINISHED, refusal)
            return
        if response is None or not response.has_begun or exchange.repeated is not None:
            self._retry_or_refuse(now, error)
            return
        if self.end_complete_stream(now) or move_stream(exchange, self.lease, now, response, error):
            return
        if self.lease is not None:
            wire.router.leases.finish(self.lease, now, Outcome.FAILED, why=error.value)
        break_off(exchange, now, response, broken_message(exchange), f"worker_{error}")

    def _retry_or_refuse(self, now: float, error: WorkerError) -> None:
        exchange, self.response = self._exchange, None
        refusal = exchange.last_refusal or exchange.try_another(now, Outcome.FAILED, error)
        if refusal is None:
            return
        if refusal.status == BAD_GATEWAY and error is WorkerError.TIMEOUT:
            refusal = Refusal(GATEWAY_TIMEOUT, refusal.reason, refusal.message, "timeout")
        exchange.refuse(now, refusal)

    def _end_with(self, now: float, outcome: Outcome, refusal: Refusal) -> None:
        self.stop(now, outcome)
        self._exchange.refuse(now, refusal)
        self._wire.dispatch_queued(now)

    def end_complete_stream(self, now: float) -> bool:
        """End a stream if the client has all of it. Return whether it was ended."""
        response = self.response
        end = None if response is None else response.missing_end(self._exchange.info)
        if response is None or end is None:
            return False
        self.drop_connection()
        end_stream(self._exchange, self.lease, now, response, end)
        return True

    def drop_connection(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.drop()

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def resume(self, now: float) -> None:
        if self.connection is not None and self.journal_awaited_since == inf:
            self.connection.resume(now)

    def stop(self, now: float, outcome: Outcome) -> None:
        connection, self.connection = self.connection, None
        if self.handover is not None:
            self.handover.stop(now, connection)
            if outcome is Outcome.CLIENT_GONE and self.lease is not None:
                self._wire.metrics.count_left_handover(self.lease)
        elif connection is not None:
            connection.drop()
        if self.lease is not None:
            self._wire.router.leases.finish(self.lease, now, outcome)


def outcome_of(head: ResponseHead) -> Outcome | None:
    """Return how a worker failed by an error response; None if the request is at fault."""
    status = head.status
    if status in NOT_SUPPORTED or (status < SERVER_ERROR and status != TOO_MANY_REQUESTS):
        return None
    if status == SERVER_ERROR and head.retry_after_s is not None:
        return Outcome.FAILED  # the worker reports a fault of its own
    return OUTCOMES.get(status, Outcome.FAILED)

"""One request on its way: read, placed, sent to a worker, answered; whatever happens in between.

    start -> (a worker counts) -> (waits in the queue) -> (prefill) -> sent -> answering -> done
                                       ^                      |         |
                                       +--- another worker ---+---------+  until the client
                                                                           got a byte

A hand-over sends two legs, one after the other: see `handing`. A decode leg that fails is never
repeated, but begun anew with a prefill, or done without one.

Callbacks only: a request costs no task, no timer and no future. Each way out goes through `_books`,
once; each lease is finished once, each ticket withdrawn or placed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from math import inf
from typing import TYPE_CHECKING

from proxy.core.fleet.leases import Lease
from proxy.core.model import refusals
from proxy.core.model.types import Outcome, Reason, Refusal
from proxy.core.queue.ticket import Ticket
from proxy.core.request.client_fields import OPTIONS
from proxy.core.request.json_edit import spliced
from proxy.http.headers import RefusedError
from proxy.http.local_responses import refuse
from proxy.http.response_parser import OK
from proxy.metrics.registry import CLIENT_GONE
from proxy.wire.exchange.request_record import RequestRecord
from proxy.wire.exchange.response_writer import ResponseWriter, response_id_in, usage_of
from proxy.wire.exchange.stream_fast_path import StreamFastPath
from proxy.wire.exchange.tokenize import TokenizeRequest
from proxy.wire.handover.first_token import says_failed
from proxy.wire.handover.two_legs import TwoLegExchange
from proxy.wire.timeouts import MOST, answer_patience_s, is_only_slow, more_patience_s
from proxy.wire.worker.connection import WorkerError
from proxy.wire.worker.request_bytes import to_worker

if TYPE_CHECKING:
    from proxy.core.fleet.worker import Worker
    from proxy.core.model.types import RequestInfo
    from proxy.core.request.routes import Route
    from proxy.http.request import Request
    from proxy.http.response_parser import ResponseHead
    from proxy.wire.context import WireContext
    from proxy.wire.extension import Client
    from proxy.wire.worker.connection import WorkerConnection

BAD_REQUEST, BAD_GATEWAY, GATEWAY_TIMEOUT = 400, 502, 504
TOO_MANY, SERVER_ERROR, UNAVAILABLE = 429, 500, 503
# Any other 5xx: it failed.
OUTCOMES = {
    TOO_MANY: Outcome.BUSY,
    UNAVAILABLE: Outcome.BUSY,
    SERVER_ERROR: Outcome.ERRED,
}
CANNOT = frozenset([501, 505])  # what a worker can't do at all is not its failure
# How vLLM says that a request exceeds the worker's context; and how much of a 400 is looked at.
TOO_LONG = re.compile(rb"maximum (?:context|model) length")
MOST_SAID = 1 << 16
STORING = "responses"  # the route whose answers may be asked for again


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_answering",
        "_ask",
        "_client",
        "_count",
        "_handing",
        "_head",
        "_held",
        "_last_refusal",
        "_lease",
        "_limit_s",
        "_passage",
        "_request",
        "_route",
        "_said",
        "_suspect",
        "_ticket",
        "_tried",
        "_whose",
        "_wire",
        "connection",
        "deadline",
        "patience_s",
        "record",
    )

    def __init__(
        self,
        wire: WireContext,
        client: Client,
        request: Request,
        route: Route,
        came_at: float = inf,
    ) -> None:
        """Prepare it; `came_at`: when its first byte came, for the limit on its time."""
        self.connection: WorkerConnection | None = None
        self.patience_s = inf
        limit_s = wire.settings.request_s
        self._limit_s = inf if limit_s is None else limit_s
        self.deadline = came_at + self._limit_s  # for its end
        self._wire = wire
        self._client = client
        self._request = request
        self._route = route
        self._ask: RequestInfo | None = None
        self._count: TokenizeRequest | None = None
        self._ticket: Ticket | None = None
        self._lease: Lease | None = None
        self._handing: TwoLegExchange | None = None
        self._suspect: TwoLegExchange | None = None  # that may have failed by its transfer
        self._head: ResponseHead | None = None  # of an answer of which no more is there
        self._answering: ResponseWriter | None = None
        self._passage: StreamFastPath | None = None  # for the pieces of its stream
        self._last_refusal: Refusal | None = None  # of another try, while an error passes on
        self._said: bytes | None = None  # of a 400, while a larger worker may be asked instead
        self._tried: frozenset[Worker] = frozenset()
        self._held = 0  # bytes of the body, which lies in memory while another may be asked
        self._whose: str | None = None  # in whose part of what is held they are counted
        self.record = RequestRecord()

    # To a worker

    def start(self, now: float) -> None:
        """Read the body, and find out where it goes."""
        self.record.begin(now, self._request, self._wire.metrics)
        self._wire.exchange_began(self)
        request, router = self._request, self._wire.router
        head = request.head
        if head.tenant is not None and (spent := router.spent(head.tenant, now)) is not None:
            self._refuse(now, spent)
            return
        collecting, size = self._wire.collecting, len(request.body)
        self._whose = collecting.account(head.tenant)
        try:
            collecting.take(size, self._whose)
        except RefusedError as error:
            self._refuse(now, error.refusal)
            return
        self._held = size
        content_type = head.special.get(b"content-type", b"")
        request_id = request.id.decode("latin-1")
        ask = router.read(
            self._route, request.body, content_type, request_id, head.tenant, batch=head.batch
        )
        if isinstance(ask, Refusal):
            router.was_read(head.tenant, now)
            self._refuse(now, ask)
            return
        self._ask = self.record.ask = ask
        if ask.fields is not None:
            request.body = spliced(request.body, ask.fields, found=ask.found)
        counter = router.counter_for(ask)
        if counter is None:
            self._place(now, ask)
            return
        if (refusal := router.enter(ask, now)) is not None:
            self._refuse(now, refusal)
            return
        self._count = self._wire.count(now, self._counted)
        pool = self._wire.pools.of(counter)
        body = router.tokenize_body(ask, request.body)
        self._count.ask(now, pool, body, pool.authorization or request.head.authorization)

    def _counted(self, now: float, tokens: int | None) -> None:
        count, ask = self._count, self._ask
        if count is None or ask is None:
            return
        self._count = None
        self._wire.counting.discard(count)
        if tokens is not None:
            self._wire.router.counted(ask, tokens)
        self._place(now, ask)

    def _place(self, now: float, ask: RequestInfo) -> None:
        explain = self._request.head.explain
        placed = self._wire.router.submit(ask, now, tried=self._tried, explain=explain)
        if isinstance(placed, Ticket):
            self._wait(placed)
        else:
            self.placed(now, placed)

    def _wait(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._wire.queue(ticket, self)

    def placed(self, now: float, placed: Lease | Refusal) -> None:
        """Go to the worker that has room, or hear that none will."""
        if (ticket := self._ticket) is not None:
            self.record.queue_s += now - ticket.since
            self._ticket = None
        if isinstance(placed, Refusal):
            self._refuse(now, placed)
            return
        self._lease = placed
        self.record.place(now, placed.decision)
        if placed.prefill is not None:
            first = placed.prefill.worker
            handing = self._handing = TwoLegExchange(self._wire, self._request, placed, first)
            handing.prefill(now, self)
            return
        self.patience_s = answer_patience_s(placed, self._wire.settings.first_byte_s)
        pool = self._wire.pools.of(placed.worker)
        request = self._request
        pool.send(now, self, to_worker(request, pool, request.body, request.id))

    def prefilled(self, now: float, answer: bytes) -> None:
        """Have the rest decoded."""
        handing = self._handing
        if handing is None:
            return
        self.record.prefilled_at = now
        if not handing.decode(now, self, answer):
            refusal = self._try_another(now, Outcome.MOOT, WorkerError.CONNECT)
            if refusal is not None:
                self._refuse(now, refusal)
        self._wire.settle(now)

    # From the worker

    def begun(self, now: float, head: ResponseHead) -> None:
        """Pass the answer on, unless it says that another worker should be asked."""
        status, handing = head.status, self._handing
        self._head = self._said = None
        if status == OK and handing is None:
            self._head = head  # until some of the body is there: that may be all of it
            return
        if (status >= SERVER_ERROR or status == TOO_MANY) and status not in CANNOT:
            retry_after_s = head.retry_after_s
            outcome = OUTCOMES.get(status, Outcome.FAILED)
            if outcome is Outcome.ERRED and retry_after_s is not None:
                outcome = Outcome.FAILED  # it knows that it is at fault
            refusal = self._try_another(
                now, outcome, WorkerError.STATUS, retry_after_s, why=str(status)
            )
            if refusal is None:
                return
            self._last_refusal = refusal
        elif handing is not None and handing.prefills and status >= BAD_REQUEST:
            # The prefill's limits are not the client's words. A decode worker has the last one.
            handing.refused(now, status, again=bool(self._tried))
            refusal = self._try_another(now, Outcome.REFUSED, WorkerError.STATUS)
            if refusal is None:
                return
            self._last_refusal = refusal
        handing = self._handing  # none any more, perhaps
        cached_tokens = None
        if handing is not None:
            cached_tokens = handing.cached_tokens
            if status >= BAD_REQUEST:  # the connector hears nothing of what is refused for its form
                handing.give_back(now, well=True)
        lease = self._lease
        if status == BAD_REQUEST and lease is not None and self._wire.router.has_larger(lease):
            self._said = b""
        self._answering = self._answer(head, cached_tokens)

    def _answer(self, head: ResponseHead, cached_tokens: int | None = None) -> ResponseWriter:
        request = self._request
        keep_alive = request.head.keep_alive and not self._wire.leaving
        changed = None if self._ask is None else self._ask.fields
        return ResponseWriter(
            request,
            head,
            self.record.decision,
            keep_alive=keep_alive,
            cached_tokens=cached_tokens,
            hides_usage=changed is not None and OPTIONS in changed,
        )

    def received(self, now: float, body: bytes, ended: bool) -> None:
        """Pass on a piece of the answer."""
        answering = self._answering
        if answering is None:
            head, self._head = self._head, None
            if head is None or (ended and self._pass_whole(now, head, body)):
                return
            answering = self._answering = self._answer(head)
        if ended:
            if answering.is_cut(self._route.name, body):
                self.lost(now, WorkerError.RESET)
                return
            self.connection = None
        handing = self._handing
        if handing is not None and handing.waits and answering.status == OK:
            first = handing.first_of(body, ended, self.connection)
            if first is None or (says_failed(first) and not self._failed_first(now)):
                return
            body = first
        if self._said is not None:
            whole = self._of_its_size(now, self._said + body, ended)
            if whole is None:
                return
            body = whole
        had_begun = answering.has_begun
        data = answering.take(body, ended)
        if not had_begun and answering.has_begun:
            self._first_bytes(now, data)
        if answering.tokens:
            self._saw_tokens(now, answering.tokens)
        if data:
            self.record.sent_bytes += len(data)
            self._client.write(data)
        if ended:
            self._finish(now, answering)
        elif answering.tokens:
            self._open_passage(answering)

    def _pass_whole(self, now: float, head: ResponseHead, body: bytes) -> bool:
        """Pass on a good answer that is all there, if it is as nearly all of them are."""
        request, lease, wire = self._request, self._lease, self._wire
        asked, length = request.head, head.length
        if (
            length is None
            or lease is None
            or wire.leaving
            or asked.explain
            or asked.http_1_0
            or not asked.keep_alive
            or self._suspect is not None
            or self._route.name == STORING
        ):
            return False
        self.connection = None
        self._forget_body()
        data = b"%bX-Request-Id: %b\r\nContent-Length: %b\r\n\r\n%b" % (
            head.top, request.id, length, body,
        )  # fmt: skip
        router = wire.router
        if not lease.ask.generates:
            router.first_token(lease, now)
        self.record.sent_bytes += len(data)
        self._client.write(data)
        usage = usage_of(head, body) if router.wants_usage(lease, now) else None
        router.finish(lease, now, Outcome.DONE, usage)
        self._books(now, OK)
        self._client.done(now, keep_alive=True)
        wire.settle(now)
        return True

    def _open_passage(self, answering: ResponseWriter) -> None:
        """Let what else comes of a stream pass by here."""
        connection, lease, wire = self.connection, self._lease, self._wire
        stream = answering.flowing
        if connection is None or lease is None or stream is None:
            return
        if (passage := self._passage) is None:
            passage = self._passage = StreamFastPath(
                wire.router,
                lease,
                wire.metrics,
                self.record,
                stream,
                self._client.write,
                recounts=answering.recounts,
            )
        connection.open_passage(passage)

    def _failed_first(self, now: float) -> bool:
        """Have a transfer that failed made good, as after a 500; whether that can't be."""
        failed, self._answering = self._answering, None
        refusal = self._try_another(now, Outcome.ERRED, WorkerError.STATUS)
        if refusal is None:
            return False
        self._answering, self._last_refusal = failed, refusal
        return True

    def _of_its_size(self, now: float, said: bytes, ended: bool) -> bytes | None:
        """Read a 400 to its end: one that was sent where it has no room is placed once more.

        That is the router's mistake, whose estimate was too low, and not the client's. None if
        there is nothing for the client in it, or not yet.
        """
        self._said = said
        if not ended and len(said) <= MOST_SAID:
            return None
        self._said, lease = None, self._lease
        if lease is None or not TOO_LONG.search(said, 0, MOST_SAID):
            return said
        self._wire.router.outgrew(lease)
        refused, self._answering = self._answering, None
        refusal = self._try_another(now, Outcome.REFUSED, WorkerError.STATUS, free=True)
        if refusal is None:
            return None
        self._answering, self._last_refusal = refused, refusal
        return said

    def late(self, now: float) -> float:
        """Wait on for a worker that is only slow."""
        lease, handing = self._lease, self._handing
        if lease is None:
            return 0.0
        late_at = inf if handing is None else handing.late_at
        return more_patience_s(lease, now, self._wire.settings.first_byte_s, late_at)

    def forsake(self, now: float, workers: Collection[Worker]) -> None:
        """Wait no longer for one of these workers, unless its answer has begun or it is the last.

        An error that passes on is as good as begun.
        """
        lease, answering, handing = self._lease, self._answering, self._handing
        if lease is None or self._last_refusal or (answering and answering.has_begun):
            return
        if lease.under_way.worker not in workers:
            return
        connection = self.connection
        if handing is not None and handing.prefills:
            connection = handing.prefill_connection
        if connection is not None and self._wire.router.may_go_over(lease, now, self._tried):
            connection.fail(now, WorkerError.TIMEOUT)

    def lost(self, now: float, trouble: WorkerError) -> None:
        """Try another worker; where the client has part of an answer already, show that it ends."""
        connection, self.connection = self.connection, None
        if trouble is WorkerError.OURS:
            # No worker has failed, and for no other would there be room.
            self._wire.short_of_room(now)
            self._stop(now, Outcome.MOOT)
            self._refuse(now, refusals.router_full())
            self._wire.settle(now)
            return
        if trouble is WorkerError.TIMEOUT and self._is_only_slow(now, connection):
            self._stop(now, Outcome.UNFINISHED)
            self._refuse(now, refusals.response_timeout(MOST * self._wire.settings.first_byte_s))
            self._wire.settle(now)
            return
        answering = self._answering
        if answering is None or not answering.has_begun:
            self._answering = None
            refusal = self._last_refusal or self._try_another(now, Outcome.FAILED, trouble)
            if refusal is None:
                return
            if refusal.status == BAD_GATEWAY and trouble is WorkerError.TIMEOUT:
                refusal = _timed_out(refusal)
            self._refuse(now, refusal)
            return
        if self._ends_whole(now):
            return
        if self._lease is not None:
            self._wire.router.finish(self._lease, now, Outcome.FAILED, why=trouble.value)
        self._break_off(now, answering, "The worker failed while it answered.", f"worker_{trouble}")

    def _is_only_slow(self, now: float, connection: WorkerConnection | None) -> bool:
        """Whether its answer has not begun because it takes long: so it would on another worker."""
        lease = self._lease
        if lease is None or self._handing is not None or self._head or self._answering:
            return False
        return connection is not None and connection.is_open and is_only_slow(lease, now)

    def _try_another(
        self,
        now: float,
        outcome: Outcome,
        trouble: WorkerError,
        retry_after_s: float | None = None,
        *,
        free: bool = False,
        why: str = "",
    ) -> Refusal | None:
        """Give up on this worker; a refusal if no other is to be asked.

        `free`: it costs no retry. `why`: the trouble in more words than its name.
        """
        lease, wire = self._lease, self._wire
        if lease is None:
            return self._last_refusal
        failed = lease.under_way
        worker = failed.worker
        self._suspect = None  # what fails whole too was not the transfer's fault
        if (handing := self._handing) is not None:
            worker, outcome = handing.failed(now, outcome, trouble)
            self._suspect = handing if handing.is_suspect else None
            free = free or handing.is_free
        self._handing = self._lease = None
        self._tried |= {worker}
        placed = wire.router.retry(
            lease,
            now,
            outcome,
            retry_after_s,
            tried=self._tried,
            after=failed,
            free=free,
            dropped=trouble is WorkerError.RESET,
            explain=self._request.head.explain,
            why=why or trouble.value,
        )
        if not isinstance(placed, Refusal):
            wire.metrics.retried(worker.name, trouble.value)
            connection, self.connection = self.connection, None
            if connection is not None:
                connection.drop()
            if isinstance(placed, Ticket):
                self._wait(placed)
            else:
                self.placed(now, placed)
        wire.settle(now)
        return placed if isinstance(placed, Refusal) else None

    def _first_bytes(self, now: float, data: bytes) -> None:
        """No other worker will be asked from here on."""
        if not self._client.writable:
            self.pause()  # since before there was a connection that could have been paused
        self._forget_body()
        if self._handing is not None:  # a head alone says nothing: a stream's comes too early
            self._handing.fetched()
        lease, answering = self._lease, self._answering
        if lease is None or answering is None or answering.status != OK:
            return
        if self._suspect is not None:
            self._suspect.blame(now)
        if not lease.ask.generates:
            self._wire.router.first_token(lease, now)
        elif lease.ask.tenant is not None:
            self._wire.router.began(lease, now)
        if self._route.name == STORING and (response_id := response_id_in(data)):
            self._wire.router.remember(response_id, lease.worker.name, lease.ask.tenant)

    def _forget_body(self) -> None:
        self._request.body = b""
        if self._held:
            self._wire.collecting.give(self._held, self._whose)
            self._held = 0

    def _saw_tokens(self, now: float, tokens: int) -> None:
        record, lease, router = self.record, self._lease, self._wire.router
        if lease is not None:
            if record.first_token_at is None:
                if lease.prefill is not None:
                    self._wire.metrics.handovers.transferred(lease, now)
                router.first_token(lease, now)
            router.tokens(lease, tokens)
        record.saw_tokens(now, self._wire.metrics, tokens)

    # To the client

    def _finish(self, now: float, answering: ResponseWriter) -> None:
        wire, status = self._wire, answering.status
        if (lease := self._lease) is not None:
            done = status < BAD_REQUEST
            if done and lease.sent and lease.prefill and self.record.first_token_at is None:
                wire.metrics.handovers.arrived(lease)
            outcome = Outcome.DONE if done else Outcome.REFUSED
            # To read it takes a microsecond or two, and of many requests few are to teach anything.
            usage = answering.usage() if wire.router.wants_usage(lease, now) else None
            wire.router.finish(lease, now, outcome, usage)
        self._books(now, status)
        self._client.done(now, keep_alive=answering.keep_alive)
        wire.settle(now)

    def _ends_whole(self, now: float) -> bool:
        """End a stream whose last event the client has; False if the client does not have it."""
        answering = self._answering
        if answering is None or not answering.is_whole:
            return False
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.drop()
        self.record.sent_bytes += len(answering.end)
        self._client.write(answering.end)
        self._finish(now, answering)
        return True

    def _break_off(
        self,
        now: float,
        answering: ResponseWriter,
        message: str,
        code: str,
        status: int = BAD_GATEWAY,
        reason: Reason | None = None,
    ) -> None:
        """End an answer that is not whole so that the client notices.

        An error event and the end of the framing leave the connection fit for another request.
        """
        last_words = answering.last_words(message, code)
        self.record.sent_bytes += len(last_words or b"")
        self._books(now, status, reason)
        if last_words is None:
            self._client.break_off()
        else:
            self._client.write(last_words)
            self._client.done(now, keep_alive=answering.keep_alive)
        self._wire.settle(now)

    def _refuse(self, now: float, refusal: Refusal) -> None:
        keep_alive = self._request.head.keep_alive and not self._wire.leaving
        answer = refuse(refusal, self._request, keep_alive=keep_alive)
        self.record.sent_bytes += len(answer)
        self._books(now, refusal.status, refusal.reason)
        self._client.write(answer)
        self._client.done(now, keep_alive=keep_alive)

    def pause(self) -> None:
        """Take no more from the worker: the client does not keep up."""
        if self.connection is not None:
            self.connection.pause()

    def resume(self, now: float) -> None:
        """Go on."""
        if self.connection is not None:
            self.connection.resume(now)

    def gone(self, now: float) -> None:
        """Hear that nobody wants the answer any more."""
        self._stop(now)
        self._books(now, CLIENT_GONE)
        self._wire.settle(now)

    def cut(self, now: float) -> None:
        """End it, because the router does."""
        if self._ends_whole(now):
            return
        self._stop(now)
        answering = self._answering
        if answering is None or not answering.has_begun:
            self._refuse(now, refusals.draining())
        else:
            self._break_off(now, answering, "The router was stopped.", "router_stopped")

    def expire(self, now: float) -> None:
        """End it, because it has taken as long as a request may."""
        if self._ends_whole(now):
            return
        self._stop(now)
        refusal, answering = refusals.request_timeout(self._limit_s), self._answering
        if answering is None or not answering.has_begun:
            self._refuse(now, refusal)
            self._wire.settle(now)
        else:
            status, reason = refusal.status, refusal.reason
            self._break_off(now, answering, refusal.message, "time_limit", status, reason)

    def _stop(self, now: float, outcome: Outcome = Outcome.CLIENT_GONE) -> None:
        """Stop everything that is done for the client."""
        wire = self._wire
        if (count := self._count) is not None:
            self._count = None
            wire.counting.discard(count)
            count.drop()
            if self._ask is not None:
                wire.router.leave(self._ask, now)
        if (ticket := self._ticket) is not None:
            self.record.queue_s += now - ticket.since
            wire.unqueue(ticket)
            wire.router.withdraw(ticket, now)
        connection, self.connection = self.connection, None
        if self._handing is not None:
            self._handing.left(now, connection)
            if outcome is Outcome.CLIENT_GONE and self._lease is not None:
                wire.metrics.handover_left(self._lease)
        elif connection is not None:
            connection.drop()
        if self._lease is not None:
            wire.router.finish(self._lease, now, outcome)

    def _books(self, now: float, status: int, reason: Reason | None = None) -> None:
        """Count the request, whichever way it ended."""
        self._forget_body()
        self._wire.exchange_over(self)
        self.record.close(now, self._wire.metrics, self._route.name, status, reason)


def _timed_out(refusal: Refusal) -> Refusal:
    return Refusal(GATEWAY_TIMEOUT, refusal.reason, refusal.message, "timeout")

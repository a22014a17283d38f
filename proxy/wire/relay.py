"""One request on its way: read, placed, sent to a worker, answered; whatever happens in between.

    start -> (a worker counts) -> (waits in the queue) -> (prefill) -> sent -> answering -> done
                                       ^                      |         |
                                       +--- another worker ---+---------+  until the client
                                                                           got a byte

A hand-over sends two legs, one after the other. What the first brought is for one use: a decode leg
that fails is never repeated, but begun anew with a prefill, or done without one; and what nobody
fetched is given back.

Callbacks only: a request costs no task, no timer and no future. Each way out goes through `_books`,
once; each lease is finished once, each ticket withdrawn or placed.
"""

from __future__ import annotations

import re
from math import inf
from typing import TYPE_CHECKING

from proxy.core import refusals
from proxy.core.types import Lease, Outcome, Reason, Refusal, Ticket
from proxy.transfer.legs import decode_body, prefill_body
from proxy.transfer.types import Pair, Taken, usage_of
from proxy.wire.answering import Answering, response_id_in
from proxy.wire.counting import TokenCount
from proxy.wire.own_answers import refuse
from proxy.wire.prefill_leg import PrefillLeg
from proxy.wire.record import Record
from proxy.wire.release import Orphan, read, release
from proxy.wire.response import OK
from proxy.wire.worker_connection import Trouble

if TYPE_CHECKING:
    from proxy.core.routes import Route
    from proxy.core.types import Ask
    from proxy.core.worker import Worker
    from proxy.wire.client import ClientConnection
    from proxy.wire.request import Request
    from proxy.wire.response import Head
    from proxy.wire.server import Wire
    from proxy.wire.upstream import Pool
    from proxy.wire.worker_connection import WorkerConnection

CLIENT_GONE = 499  # as nginx calls it; in metrics alone
BAD_REQUEST, BAD_GATEWAY, GATEWAY_TIMEOUT = 400, 502, 504
TOO_MANY, SERVER_ERROR, UNAVAILABLE = 429, 500, 503
# Any other 5xx: it failed.
OUTCOMES = {
    TOO_MANY: Outcome.BUSY,
    UNAVAILABLE: Outcome.BUSY,
    SERVER_ERROR: Outcome.ERRED,
}
CANNOT = frozenset([501, 505])  # what a worker can't do at all is not its failure
# Why a request is served whole after all.
FAILED_TRANSFER, REFUSED_PREFILL = "failed_transfer", "refused_prefill"
STORING = "responses"  # the route whose answers may be asked for again
LATE = 4.0  # times what was predicted, a prefill is
# How a stream whose head was a 200 says that its transfer failed. vLLM's chat names the role before
# it, at the same moment.
ROLE = rb'data: [^\n]*"role": ?"assistant", ?"content": ?(?:""|null)[^\n]*\n\n'
ROLE_ALONE = re.compile(ROLE)
FAILED_EVENT = re.compile(rb'(?:%b)?(?:event: error\n)?data: \{"(?:error"|type": ?"error")' % ROLE)
# Bodies up to this size are sent in one piece with their head.
SMALL = 1 << 16


class Exchange:
    """One request and its answer."""

    __slots__ = (
        "_answering",
        "_ask",
        "_client",
        "_count",
        "_early",
        "_last_refusal",
        "_lease",
        "_leg",
        "_pair",
        "_record",
        "_request",
        "_route",
        "_taken",
        "_ticket",
        "_tried",
        "_wire",
        "connection",
        "once",
    )
    patience_s = inf

    def __init__(
        self, wire: Wire, client: ClientConnection, request: Request, route: Route
    ) -> None:
        self.connection: WorkerConnection | None = None
        self.once = False
        self._wire = wire
        self._client = client
        self._request = request
        self._route = route
        self._ask: Ask | None = None
        self._count: TokenCount | None = None
        self._ticket: Ticket | None = None
        self._lease: Lease | None = None
        self._leg: PrefillLeg | None = None
        self._pair: Pair | None = None
        self._taken: Taken | None = None  # by the prefill, and not yet by the decode worker
        self._answering: Answering | None = None
        self._early = b""  # of a decode leg's stream, what says nothing yet
        self._last_refusal: Refusal | None = None  # of another try, while an error passes on
        self._tried: frozenset[str] = frozenset()
        self._record = Record()

    # To a worker

    def start(self, now: float) -> None:
        """Read the body, and find out where it goes."""
        self._record.started = now
        self._wire.exchanges.add(self)
        request, router = self._request, self._wire.router
        content_type = request.head.special.get(b"content-type", b"")
        request_id = request.id.decode("latin-1")
        ask = router.read(self._route, request.body, content_type, request_id)
        if isinstance(ask, Refusal):
            self._refuse(now, ask)
            return
        self._ask = self._record.ask = ask
        counter = router.counter_for(ask)
        if counter is None:
            self._place(now, ask)
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

    def _place(self, now: float, ask: Ask) -> None:
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
            self._record.queue_s += now - ticket.since
            self._ticket = None
        if isinstance(placed, Refusal):
            self._refuse(now, placed)
            return
        self._lease = placed
        self._record.decision = placed.decision
        if placed.prefill is not None:
            self._hand_over(now, placed, placed.prefill.worker)
            return
        self.once = False
        pool = self._wire.pools.of(placed.worker)
        pool.send(now, self, self._to_worker(pool, self._request.body, self._request.id))

    def _hand_over(self, now: float, lease: Lease, first: Worker) -> None:
        """Have the prompt prefilled."""
        wire = self._wire
        connector = wire.connector
        if connector is None:
            raise RuntimeError("a hand-over without a connector")
        pool = wire.pools.of(first)
        number = wire.new_id().decode()
        pair = self._pair = Pair(pool.side, wire.pools.of(lease.worker).side, number)
        body = prefill_body(connector, pair, lease.ask, self._request.body)
        request_id = connector.request_id(pair) or self._request.id
        leg = self._leg = PrefillLeg(self, patience_s(lease, wire.settings.prefill_s))
        leg.send(now, pool, self._to_worker(pool, body, request_id))

    def prefilled(self, now: float, answer: bytes) -> None:
        """Have the rest decoded."""
        wire, lease, pair, connector = self._wire, self._lease, self._pair, self._wire.connector
        self._leg = None
        if lease is None or pair is None or connector is None:
            return
        fields = read(answer)
        taken = self._taken = connector.take(pair, fields)
        self.once = taken.params is not None
        halves = lease.decision.handover
        learns = halves is not None and halves.cached_tokens > 0
        wire.router.prefilled(lease, now, usage_of(fields) if learns else None)
        bare = connector.needs_params and taken.params is None
        wire.metrics.handovers.prefilled(lease, now, bare=bare)
        if bare and halves is not None:
            halves.tokens = 0  # the decode worker's prefill is no transfer
        body = decode_body(connector, pair, taken, self._request.body)
        request_id = connector.request_id(pair) or self._request.id
        pool = wire.pools.of(lease.worker)
        pool.send(now, self, self._to_worker(pool, body, request_id))
        wire.settle(now)

    def _give_back(self, now: float, *, well: bool) -> None:
        """Have the blocks freed that the decode worker has not fetched, or may not have."""
        taken, self._taken = self._taken, None
        if taken is not None and self._lease is not None:
            who = self._request.head.authorization
            release(self._wire, now, self._lease.worker, taken, who, well=well)

    def _to_worker(self, pool: Pool, body: bytes, request_id: bytes) -> tuple[bytes, ...]:
        """Write the request as this worker is to get it."""
        head = self._request.head
        authorization = pool.authorization or head.authorization
        own = b"X-Request-Id: %b\r\n\r\n" % request_id
        if body or head.method != "GET":
            own = b"Content-Length: %d\r\n%b" % (len(body), own)
        if len(body) > SMALL:
            return b"".join((head.start, pool.host, authorization, head.lines, own)), body
        return (b"".join((head.start, pool.host, authorization, head.lines, own, body)),)

    # From the worker

    def begun(self, now: float, head: Head) -> None:
        """Pass the answer on, unless it says that another worker should be asked."""
        status = head.status
        if (status >= SERVER_ERROR or status == TOO_MANY) and status not in CANNOT:
            retry_after_s = head.retry_after_s
            outcome = OUTCOMES.get(status, Outcome.FAILED)
            if outcome is Outcome.ERRED and retry_after_s is not None:
                outcome = Outcome.FAILED  # it knows that it is at fault
            refusal = self._try_another(now, outcome, Trouble.STATUS, retry_after_s)
            if refusal is None:
                return
            self._last_refusal = refusal
        elif self._leg is not None and self._ask is not None and status >= BAD_REQUEST:
            # The prefill's limits are not the client's words. A decode worker is asked for all of
            # it, and has the last word.
            self._ask.whole = REFUSED_PREFILL
            refusal = self._try_another(now, Outcome.REFUSED, Trouble.STATUS)
            if refusal is None:
                return
            self._last_refusal = refusal
        keep_alive = self._request.head.keep_alive and not self._wire.draining
        taken = self._taken
        if status >= BAD_REQUEST:  # what is refused for its form is not heard of by the connector
            self._give_back(now, well=True)
        self._answering = Answering(
            self._request,
            head,
            self._record.decision,
            keep_alive=keep_alive,
            cached_tokens=None if taken is None else taken.cached_tokens,
        )

    def received(self, now: float, body: bytes, ended: bool) -> None:
        """Pass on a piece of the answer."""
        answering = self._answering
        if answering is None:
            return
        if ended:
            self.connection = None
        if self._taken is not None and answering.status == OK:
            self._early += body
            if not ended and ROLE_ALONE.fullmatch(self._early):
                return
            body, self._early = self._early, b""
            if FAILED_EVENT.match(body) and not self._failed_first(now):
                return
        had_begun = answering.has_begun
        data = answering.take(body, ended)
        if not had_begun and answering.has_begun:
            self._first_bytes(now, data)
        if answering.tokens:
            self._saw_tokens(now, answering.tokens)
        if data:
            self._client.write(data)
        if ended:
            self._finish(now, answering)

    def _failed_first(self, now: float) -> bool:
        """Have a transfer that failed made good, as after a 500; whether that can't be."""
        failed, self._answering = self._answering, None
        refusal = self._try_another(now, Outcome.ERRED, Trouble.STATUS)
        if refusal is None:
            return False
        self._answering, self._last_refusal = failed, refusal
        return True

    def lost(self, now: float, trouble: Trouble) -> None:
        """Try another worker; where the client has part of an answer already, show that it ends."""
        self.connection = None
        answering = self._answering
        if answering is None or not answering.has_begun:
            self._answering = None
            refusal = self._last_refusal or self._try_another(now, Outcome.FAILED, trouble)
            if refusal is None:
                return
            if refusal.status == BAD_GATEWAY and trouble is Trouble.TIMEOUT:
                refusal = _timed_out(refusal)
            self._refuse(now, refusal)
            return
        if self._lease is not None:
            self._wire.router.finish(self._lease, now, Outcome.FAILED)
        what = "The worker failed while it answered."
        self._break_off(now, answering.last_words(what, f"worker_{trouble}"))

    def _try_another(
        self,
        now: float,
        outcome: Outcome,
        trouble: Trouble,
        retry_after_s: float | None = None,
    ) -> Refusal | None:
        """Give up on this worker; a refusal if no other is to be asked."""
        lease, ask, wire = self._lease, self._ask, self._wire
        if lease is None or ask is None:
            return self._last_refusal
        name = lease.under_way.worker.name
        if lease.prefill is not None:
            wire.metrics.handover_failed(lease)
            if self._taken is not None:
                stale = trouble is Trouble.STALE
                self._give_back(now, well=stale or trouble is Trouble.STATUS)
                if stale or outcome is Outcome.ERRED:
                    # It may be the transfer that failed, or the worker be well and its connection
                    # old: then nobody need be left out for it.
                    ask.whole, outcome = FAILED_TRANSFER, Outcome.MOOT
                    name = lease.prefill.worker.name
        self._leg = self._lease = None
        self._early = b""
        wire.router.finish(lease, now, outcome, None, retry_after_s)
        self._tried |= {name}
        explain, free = self._request.head.explain, not lease.sent
        placed = wire.router.submit(ask, now, tried=self._tried, free=free, explain=explain)
        if not isinstance(placed, Refusal):
            wire.metrics.retried(name, trouble.value)
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
        self._request.body = b""
        self._taken = None  # a head alone says nothing: a stream's comes before the transfer
        lease, answering = self._lease, self._answering
        if lease is None or answering is None or answering.status != OK:
            return
        if not lease.ask.generates:
            self._wire.router.first_token(lease, now)
        if self._route.name == STORING and (response_id := response_id_in(data)):
            self._wire.router.remember(response_id, lease.worker.name)

    def _saw_tokens(self, now: float, tokens: int) -> None:
        record, lease, router = self._record, self._lease, self._wire.router
        if lease is not None:
            if record.first_token_at is None:
                if lease.prefill is not None:
                    self._wire.metrics.handovers.transferred(lease, now)
                router.first_token(lease, now)
            router.tokens(lease, tokens)
        record.saw_tokens(now, self._wire.metrics, tokens)

    # To the client

    def _finish(self, now: float, answering: Answering) -> None:
        wire, status = self._wire, answering.status
        if (lease := self._lease) is not None:
            done = status < BAD_REQUEST
            if done and lease.sent and lease.prefill and self._record.first_token_at is None:
                wire.metrics.handovers.arrived(lease)
            outcome = Outcome.DONE if done else Outcome.REFUSED
            # To read it takes a microsecond or two, and of many requests few are to teach anything.
            usage = answering.usage() if wire.router.may_learn(lease, now) else None
            wire.router.finish(lease, now, outcome, usage)
        self._books(now, status)
        self._client.done(now, keep_alive=answering.keep_alive)
        wire.settle(now)

    def _break_off(self, now: float, last_words: bytes | None) -> None:
        """End an answer that will never be whole, so that it can be seen."""
        self._books(now, BAD_GATEWAY)
        if last_words is None:
            self._client.break_off()
        else:
            self._client.write(last_words)
            self._client.done(now, keep_alive=False)
        self._wire.settle(now)

    def _refuse(self, now: float, refusal: Refusal) -> None:
        keep_alive = self._request.head.keep_alive and not self._wire.draining
        self._books(now, refusal.status, refusal.reason)
        self._client.write(refuse(refusal, self._request, keep_alive=keep_alive))
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
        self._stop(now)
        answering = self._answering
        if answering is None or not answering.has_begun:
            self._refuse(now, refusals.draining())
        else:
            self._break_off(now, answering.last_words("The router was stopped.", "router_stopped"))

    def _stop(self, now: float) -> None:
        """Stop everything that is done for the client."""
        wire = self._wire
        if (count := self._count) is not None:
            self._count = None
            wire.counting.discard(count)
            count.drop()
        if (ticket := self._ticket) is not None:
            del wire.queued[ticket]
            wire.router.withdraw(ticket, now)
        if (leg := self._leg) is not None:
            self._leg = None
            self._abandon(leg)
        if self.connection is not None:
            connection, self.connection = self.connection, None
            sent, well = connection.has_sent(now), connection.is_open
            connection.drop()
            if not sent:
                self._give_back(now, well=well)
        if self._lease is not None:
            if self._lease.prefill is not None:
                wire.metrics.handover_left(self._lease)
            wire.router.finish(self._lease, now, Outcome.CLIENT_GONE)

    def _abandon(self, leg: PrefillLeg) -> None:
        """Let the prefill stop; if it is done already, hear where its blocks are to free them."""
        lease, pair = self._lease, self._pair
        if lease is not None and pair is not None and leg.is_answering:
            authorization = self._request.head.authorization
            leg.leave_to(Orphan(self._wire, pair, lease.worker, authorization))
        else:
            leg.drop()

    def _books(self, now: float, status: int, reason: Reason | None = None) -> None:
        """Count the request, whichever way it ended."""
        self._wire.exchange_over(self)
        self._record.close(now, self._wire.metrics, self._route.name, status, reason)


def patience_s(lease: Lease, least_s: float) -> float:
    """Tell how long a prefill worker may take: one that hangs is not to cost ten minutes.

    Nobody knows how long a worker takes that has prefilled nothing yet.
    """
    first, halves = lease.prefill, lease.decision.handover
    if first is None or halves is None or not first.worker.pace.prefills:
        return inf
    return least_s + LATE * halves.prefill_s


def _timed_out(refusal: Refusal) -> Refusal:
    return Refusal(GATEWAY_TIMEOUT, refusal.reason, refusal.message, "timeout")

"""The server of the data path: listens, keeps deadlines and drains.

    wire = WireServer(router, WireSettings(), Metrics(router))
    await wire.start("127.0.0.1", 8000)
    ...
    await wire.drain(30.0)

One timer serves all deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count
from math import inf
from typing import Any

from proxy.core.model import refusals
from proxy.core.model.finished_request import FinishedRequest
from proxy.core.model.route_table import Route
from proxy.core.model.types import NONE, Refusal
from proxy.core.queue.ticket import Ticket
from proxy.core.request.client_fields import has_address
from proxy.core.request.route_lookup import find
from proxy.core.router import Router
from proxy.http.body_budget import BodyBudget
from proxy.http.request import Request, RequestHead
from proxy.metrics.page import write_page
from proxy.metrics.registry import Metrics
from proxy.transfer.types import Connector
from proxy.wire import extension
from proxy.wire.client import local_endpoints
from proxy.wire.client.auth import identify
from proxy.wire.client.connection import ClientConnection
from proxy.wire.client.origin_check import page_refusal
from proxy.wire.context import Expiring, ServedClient, ServedExchange
from proxy.wire.exchange.continuation_log import ContinuationLog
from proxy.wire.exchange.exchange import Exchange
from proxy.wire.exchange.failover import Failover
from proxy.wire.exchange.moves import Moves
from proxy.wire.exchange.request_record import RequestRecord
from proxy.wire.exchange.tokenize import TokenizeRequest
from proxy.wire.extension import Conversation, Extension
from proxy.wire.large_body_queue import LargeBodyQueue
from proxy.wire.listener import Listener
from proxy.wire.settings import WireSettings
from proxy.wire.ticks import Ticks
from proxy.wire.worker.pool import ConnectionPools
from proxy.wire.write_batch import WriteBatch

logger = logging.getLogger(__name__)

IDENTITY = b"identity"
LOG_INTERVAL_S, CLOSING_INTERVAL_S = 60.0, 1.0
MIN_IDLE_S = 1.0  # of clients that are closed because files lack
MIN_CLOSE_S = 1.0  # minimum time to send written responses


class WireServer:
    """The data path between clients and workers."""

    def __init__(
        self,
        router: Router,
        settings: WireSettings,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        connector: Connector | None = None,
    ) -> None:
        self.router = router
        self.connector = connector
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        self.port = 0  # set by `start`
        self.leaving = False  # ends keep-alive connections
        self.draining = False  # refuses new requests
        self.clients: set[ServedClient] = set()
        self.unread: set[ServedClient] = set()  # with paused reading
        self.exchanges: set[ServedExchange] = set()
        self.tls: ssl.SSLContext | None = None  # set before `start`
        self.extension: Extension | None = None  # set before `start`
        self.local_requests: set[Conversation] = set()
        # Writes the metrics page of all processes, as OpenMetrics or not.
        self.write_metrics: Callable[[bool], Awaitable[tuple[bytes, str]]]
        self.write_metrics = partial(write_page, metrics)
        self.queued: dict[Ticket, ServedExchange] = {}
        self.short_waits: set[Expiring] = set()
        self.releases: set[Expiring] = set()
        self.write_batch = WriteBatch()
        self.pools = ConnectionPools(settings, clock, self.write_batch)
        max_bytes, largest = settings.max_collected_bytes, settings.max_body_bytes
        self.large_bodies = LargeBodyQueue(clock)
        self.body_budget = BodyBudget(max_bytes, router.tenants, largest)
        self._failover = Failover()
        self.moves = Moves(router.fleet.roster, self.exchanges, clock)
        self.continuations = ContinuationLog()
        self._listener = Listener(lambda: ClientConnection(self))
        self.ticks = Ticks(self._check_deadlines, self._needs_short_ticks, clock, metrics.loop_lag)
        self._next_log = self._next_closing = 0.0
        self._quiet: asyncio.Future[None] | None = None
        self._ids = count(1)
        self._id_prefix = os.urandom(8).hex().encode()
        metrics.upstream_connections = self.pools.counts
        metrics.under_way = self._records_in_flight

    async def start(self, host: str, port: int, *, sock: socket.socket | None = None) -> None:
        where: dict[str, Any] = {"host": host, "port": port} if sock is None else {"sock": sock}
        self.port = await self._listener.open(where, self._tls())
        self.ticks.start()

    def _tls(self) -> dict[str, Any]:
        """Return TLS arguments with the time limits of clear-text connections."""
        if self.tls is None:
            return {}
        settings = self.settings
        return {
            "ssl": self.tls,
            "ssl_handshake_timeout": settings.client_header_s,
            "ssl_shutdown_timeout": settings.idle_s,
        }

    async def drain(self, deadline_s: float) -> None:
        """Refuse new requests, finish the old until the deadline, then close.

        For `drain_notice_s` before that, /ready fails and responses end their connections.
        """
        give_up = self.clock() + deadline_s
        self.leaving = True
        if notice_s := min(self.settings.drain_notice_s, deadline_s):
            await self._wait_until(lambda: False, self.clock() + notice_s)
        self._stop_listening()
        for client in list(self.clients):
            client.close_if_idle(self.clock())
        await self._wait_until(lambda: not self.exchanges and not self.local_requests, give_up)
        await self.close(give_up)

    async def close(self, deliver_by: float = -inf) -> None:
        """End all requests with errors that clients have a second to read."""
        self._stop_listening()
        now = self.clock()
        if self.exchanges:
            logger.warning("%d unfinished requests are ended", len(self.exchanges))
        for conversation in [*self.exchanges, *self.local_requests]:
            conversation.end_for_shutdown(now)
        for client in list(self.clients):
            client.close_for_drain(now)
        await self._wait_until(lambda: not self.clients, max(deliver_by, now + MIN_CLOSE_S))
        await self._wait_until(lambda: not self.releases, self.clock() + MIN_CLOSE_S)
        for client in list(self.clients):
            client.abort()
        await self._wait_until(lambda: not self.clients, self.clock() + MIN_CLOSE_S)
        self.pools.close()
        self.router.fleet.start_due_decodes(self.clock())
        self.ticks.stop()

    def _stop_listening(self) -> None:
        self.leaving = self.draining = True
        self._listener.close()

    def reconfigure(self, settings: WireSettings) -> None:
        self.settings = settings
        self.body_budget.limit(settings.max_collected_bytes, settings.max_body_bytes)
        self.pools.reconfigure(settings)
        for client in self.clients:
            client.limit(settings)

    # For clients and exchanges

    def check_head(self, head: RequestHead) -> None:
        if has_address(head.id) and not self.router.settings.allow_client_kv_transfer:
            head.id = b""
        head.route = None
        head.refusal = identify(self.router.tenants, head)
        if head.refusal is None and self.settings.refuses_pages and self.router.tenants.open:
            head.refusal = page_refusal(head)
        encoding = head.special.get(b"content-encoding", IDENTITY)
        if head.refusal is None and encoding.lower() != IDENTITY:
            head.refusal = refusals.encoded_body(encoding.decode("latin-1"))
        if head.refusal is not None:
            return
        if local_endpoints.is_local(head.path):
            head.refusal = local_endpoints.local_refusal(head)
            return
        route = find(head.method, head.path)
        if isinstance(route, Refusal):
            own = self.extension
            refusal = extension.refuse_disabled(head) if own is None else own.find(head)
            route = refusal or route
        if isinstance(route, Refusal):
            head.refusal = route
        else:
            head.route = route

    def begin(
        self, client: ServedClient, request: Request, route: Route, arrived_at: float
    ) -> Conversation:
        if self.extension is not None and route.name in extension.BATCH_ROUTES:
            return self.extension.begin(client, request)
        return Exchange(self, client, request, route, arrived_at)

    def make_tokenize_request(
        self, now: float, on_done: Callable[[float, int | None], None]
    ) -> TokenizeRequest:
        request = TokenizeRequest(now + self.settings.count_s, on_done)
        self.add_short_wait(request)
        return request

    def add_short_wait(self, wait: Expiring) -> None:
        self.short_waits.add(wait)
        self.ticks.shorten()

    def queue(self, ticket: Ticket, exchange: ServedExchange) -> None:
        self.queued[ticket] = exchange
        self.ticks.shorten()

    def has_same_id(self, request: Request) -> bool:
        others = (exchange.record.request for exchange in self.exchanges)
        return any(o is not request and o is not None and o.id == request.id for o in others)

    def dispatch_queued(self, now: float) -> None:
        if not self.queued:
            return
        for ticket, placed in self.router.pop_due(now):
            exchange = self.queued.pop(ticket)
            try:
                exchange.placement_decided(now, placed)
            except Exception:  # the others are already charged
                logger.exception("cannot send a queued request to its worker")
                exchange.end_for_shutdown(now)

    def handle_local_failure(
        self, now: float, what: str = "cannot open a connection to a worker"
    ) -> None:
        """Count a lack of local resources, log it once a minute, and close idle connections."""
        self.metrics.connects_failed += 1
        if now >= self._next_closing:
            self._next_closing = now + CLOSING_INTERVAL_S
            self.pools.close_idle()
            for client in list(self.clients):
                client.close_if_idle(now, MIN_IDLE_S)
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL_S
            logger.error(
                "%s (%d failures so far): raise the limit on open files (ulimit -n), or the range "
                "of local ports",
                what,
                self.metrics.connects_failed,
            )

    def count_refused(
        self,
        refusal: Refusal,
        response: bytes,
        request: Request | None = None,
        request_id: bytes = b"",
    ) -> None:
        finished = FinishedRequest(NONE, refusal.status, refusal.reason, 0.0)
        self.count_answered(finished, request, len(response), request_id)

    def count_answered(
        self,
        finished: FinishedRequest,
        request: Request | None,
        sent_bytes: int,
        request_id: bytes = b"",
    ) -> None:
        now = self.clock()
        self.metrics.count_request(finished)
        for callback in self.metrics.at_end:
            record = RequestRecord()
            record.started = now - finished.duration_s
            record.request, record.sent_bytes = request, sent_bytes
            record.unread_id = request_id
            callback(record, now, finished.route, finished.status, finished.reason)

    def remove_exchange(self, exchange: ServedExchange) -> None:
        self.exchanges.discard(exchange)
        if not self.exchanges:
            self._wake()

    def remove_local_request(self, request: Conversation) -> None:
        self.local_requests.discard(request)
        if not self.local_requests:
            self._wake()

    def remove_release(self, release: Expiring) -> None:
        self.releases.discard(release)
        if not self.releases:
            self._wake()

    def add_client(self, client: ServedClient, file: int) -> None:
        """Add a client; `file`: its number, the lowest that was free."""
        self.clients.add(client)
        self.metrics.client_connections = len(self.clients)
        if self._lacks_files(file) and not self._listener.is_paused:
            self._listener.pause()
            self.handle_local_failure(self.clock(), "clients have to wait for free files")

    def _lacks_files(self, lowest: float) -> bool:
        """Return whether files would lack if all clients had requests."""
        limit = self._listener.max_files
        return 2 * lowest > limit and lowest + len(self.clients) - self.pools.busy() > limit

    def remove_client(self, client: ServedClient) -> None:
        self.clients.discard(client)
        self.metrics.client_connections = len(self.clients)
        if not self.clients:
            self._wake()

    def _records_in_flight(self) -> Iterator[RequestRecord]:
        return (exchange.record for exchange in self.exchanges)

    def new_id(self) -> bytes:
        return b"%s-%x" % (self._id_prefix, next(self._ids))

    def _wake(self) -> None:
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    async def _wait_until(self, over: Callable[[], bool], give_up: float) -> None:
        while not over() and (left := give_up - self.clock()) > 0:
            self._quiet = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._quiet], timeout=left)
        self._quiet = None

    def _needs_short_ticks(self) -> bool:
        return bool(self.queued or self.short_waits)

    def _check_deadlines(self, now: float, sweep: bool) -> None:
        for wait in [wait for wait in self.short_waits if wait.deadline < now]:
            wait.expire(now)
        self.dispatch_queued(now)
        if not sweep:
            return
        for exchange in [exchange for exchange in self.exchanges if exchange.deadline < now]:
            if exchange in self.exchanges:  # may have ended since
                exchange.expire(now)
        for client in [client for client in self.clients if client.deadline < now]:
            client.expire(now)
        for client in list(self.unread):
            client.close_if_gone()
        for release in [release for release in self.releases if release.deadline < now]:
            release.expire(now)
        self.pools.sweep(now)
        if self._listener.is_paused and not self._lacks_files(self._listener.lowest_free_file()):
            self._listener.resume()
        for exchange in self.exchanges:
            exchange.condense_text()
        self._failover.retry_overdue(now, self.router.fleet.roster, self.exchanges)
        self.moves.step(now)
        self.router.fleet.start_due_decodes(now)

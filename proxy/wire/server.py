"""The server of the data path: listens, keeps deadlines and drains.

    wire = Wire(router, WireSettings(), Metrics(router))
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
from typing import TYPE_CHECKING, Any

from proxy.core.model.types import NONE, Reason, Refusal
from proxy.core.queue.ticket import Ticket
from proxy.core.request.routes import find
from proxy.http.body_budget import BodyBudget
from proxy.metrics.scrape import write_page
from proxy.transfer.p2p_nccl import is_steering
from proxy.wire import extension
from proxy.wire.client import endpoints
from proxy.wire.client.auth import identify
from proxy.wire.client.connection import ClientConnection
from proxy.wire.client.origin_check import page_refusal
from proxy.wire.exchange.exchange import Exchange
from proxy.wire.exchange.failover import Failover
from proxy.wire.exchange.request_record import RequestRecord
from proxy.wire.exchange.tokenize import TokenizeRequest
from proxy.wire.settings import WireSettings
from proxy.wire.worker.pool import ConnectionPools
from proxy.wire.write_batch import WriteBatch

if TYPE_CHECKING:
    from proxy.core.model.route_table import Route
    from proxy.core.router import Router
    from proxy.http.request import Request, RequestHead
    from proxy.metrics.registry import Metrics
    from proxy.transfer.types import Connector
    from proxy.wire.context import Expiring, ServedClient, ServedExchange
    from proxy.wire.extension import Conversation, Extension

logger = logging.getLogger(__name__)

BACKLOG = 4096
# The short tick is only for the queue and token counts: an idle router's tick costs 150 us.
SWEEP_INTERVAL_S = 0.2
SHORT_TICK_S = 0.05
# A tick this late means a suspended process or machine.
SUSPENDED_LAG_S = 1.0
LOG_INTERVAL_S = 60.0
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
        self.desk: Extension | None = None  # set before `start`
        self.visits: set[Conversation] = set()
        # Writes the metrics page of all processes.
        self.pages: Callable[[bool], Awaitable[tuple[bytes, str]]] = partial(write_page, metrics)
        self.queued: dict[Ticket, ServedExchange] = {}
        self.counting: set[TokenizeRequest] = set()
        self.releases: set[Expiring] = set()
        self.outbox = WriteBatch()
        self.pools = ConnectionPools(settings, clock, self.outbox)
        most, largest = settings.max_collected_bytes, settings.max_body_bytes
        self.collecting = BodyBudget(most, router.tenants, largest)
        self._failover = Failover()
        self._servers: list[asyncio.Server] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # monotonic time
        self._uses_short_tick = False  # the timer uses TICK_S
        self._skipped_tick = False
        self._next_sweep = 0.0
        self._next_log = 0.0
        self._quiet: asyncio.Future[None] | None = None
        self._ids = count(1)
        self._id_prefix = os.urandom(8).hex().encode()
        metrics.upstream_connections = self.pools.counts
        metrics.under_way = self._under_way

    async def start(self, host: str, port: int, *, sock: socket.socket | None = None) -> None:
        """Listen on `sock` or a new socket."""
        loop = asyncio.get_running_loop()

        def client() -> ClientConnection:
            return ClientConnection(self)

        if sock is not None:
            server = await loop.create_server(client, sock=sock, backlog=BACKLOG, **self._tls())
        else:
            server = await loop.create_server(client, host, port, backlog=BACKLOG, **self._tls())
        self._servers.append(server)
        self.port = int(server.sockets[0].getsockname()[1])
        if self._timer is None:
            self._set_timer(SWEEP_INTERVAL_S)

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

        For `notice_s` before that, /ready fails and responses end their connections.
        """
        give_up = self.clock() + deadline_s
        self.leaving = True
        if notice_s := min(self.settings.notice_s, deadline_s):
            await self._until(lambda: False, self.clock() + notice_s)
        self.draining = True
        for server in self._servers:
            server.close()
        for client in list(self.clients):
            client.part_if_idle(self.clock())
        await self._until(lambda: not self.exchanges and not self.visits, give_up)
        now = self.clock()
        for conversation in [*self.exchanges, *self.visits]:
            conversation.cut(now)
        for client in list(self.clients):
            client.dismiss(now)
        await self._until(lambda: not self.clients, max(give_up, now + MIN_CLOSE_S))
        await self._until(lambda: not self.releases, self.clock() + MIN_CLOSE_S)
        await self.close()

    async def close(self) -> None:
        """Close all connections now."""
        self.leaving = self.draining = True
        for server in self._servers:
            server.close()
        for client in list(self.clients):
            client.abort()
        await self._until(lambda: not self.clients, self.clock() + MIN_CLOSE_S)
        self.pools.close()
        self.router.fleet.settle(self.clock())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reconfigure(self, settings: WireSettings) -> None:
        """Apply new limits to later requests."""
        self.settings = settings
        self.collecting.limit(settings.max_collected_bytes, settings.max_body_bytes)
        self.pools.reconfigure(settings)
        for client in self.clients:
            client.limit(settings)

    # For clients and exchanges

    def judge(self, head: RequestHead) -> None:
        """Set the route or the refusal of a request."""
        if is_steering(head.id) and not self.router.settings.allow_client_kv_transfer:
            head.id = b""
        head.route = None
        head.refusal = identify(self.router.tenants, head)
        if head.refusal is None and self.settings.refuses_pages and self.router.tenants.open:
            head.refusal = page_refusal(head)
        if head.refusal is not None:
            return
        if endpoints.is_local(head.path):
            head.refusal = endpoints.local_refusal(head)
            return
        route = find(head.method, head.path)
        if isinstance(route, Refusal):
            extension_route = extension.absent(head) if self.desk is None else self.desk.find(head)
            route = extension_route or route
        if isinstance(route, Refusal):
            head.refusal = route
        else:
            head.route = route

    def begin(
        self, client: ServedClient, request: Request, route: Route, came_at: float
    ) -> Conversation:
        """Return a conversation."""
        if self.desk is not None and route.name in extension.ROUTES:
            return self.desk.begin(client, request)
        return Exchange(self, client, request, route, came_at)

    def count(self, now: float, done: Callable[[float, int | None], None]) -> TokenizeRequest:
        """Return a new /tokenize request."""
        counter = TokenizeRequest(now + self.settings.count_s, done)
        self.counting.add(counter)
        self._tick_sooner()
        return counter

    def queue(self, ticket: Ticket, exchange: ServedExchange) -> None:
        """Queue an exchange."""
        self.queued[ticket] = exchange
        self._tick_sooner()

    def unqueue(self, ticket: Ticket) -> None:
        """Forget a ticket."""
        del self.queued[ticket]

    def settle(self, now: float) -> None:
        """Send queued requests that have room."""
        if not self.queued:
            return
        for ticket, placed in self.router.due(now):
            exchange = self.queued.pop(ticket)
            try:
                exchange.placed(now, placed)
            except Exception:  # the others are already charged
                logger.exception("cannot send a queued request to its worker")
                exchange.cut(now)

    def short_of_room(self, now: float) -> None:
        """Count a lack of local resources, and log it once a minute."""
        self.metrics.connects_failed += 1
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL_S
            logger.error(
                "cannot open a connection to a worker (%d failures so far): raise the limit on "
                "open files (ulimit -n), or the range of local ports",
                self.metrics.connects_failed,
            )

    def refused(self, refusal: Refusal, answer: bytes, request: Request | None = None) -> None:
        """Count a request refused by its head."""
        self.answered(NONE, refusal.status, refusal.reason, request, self.clock(), len(answer))

    def answered(
        self,
        route: str,
        status: int,
        reason: Reason,
        request: Request | None,
        began: float,
        sent_bytes: int,
    ) -> None:
        """Count a request that reached no worker."""
        metrics, now = self.metrics, self.clock()
        metrics.request_done(route, "", NONE, reason, status, None, now - began, 0.0)
        for tell in metrics.at_end:
            record = RequestRecord()
            record.started, record.request, record.sent_bytes = began, request, sent_bytes
            tell(record, now, route, status, reason)

    def exchange_began(self, exchange: ServedExchange) -> None:
        """Keep an exchange."""
        self.exchanges.add(exchange)

    def exchange_over(self, exchange: ServedExchange) -> None:
        """Forget an exchange."""
        self.exchanges.discard(exchange)
        if not self.exchanges:
            self._wake()

    def visit_began(self, visit: Conversation) -> None:
        """Keep a visit."""
        self.visits.add(visit)

    def visit_over(self, visit: Conversation) -> None:
        """Forget a visit."""
        self.visits.discard(visit)
        if not self.visits:
            self._wake()

    def release_began(self, release: Expiring) -> None:
        """Keep a block release."""
        self.releases.add(release)

    def release_over(self, release: Expiring) -> None:
        """Forget a block release."""
        self.releases.discard(release)
        if not self.releases:
            self._wake()

    def client_came(self, client: ServedClient) -> None:
        """Keep a connection."""
        self.clients.add(client)
        self.metrics.client_connections = len(self.clients)

    def client_left(self, client: ServedClient) -> None:
        """Forget a connection."""
        self.clients.discard(client)
        self.metrics.client_connections = len(self.clients)
        if not self.clients:
            self._wake()

    def reading_paused(self, client: ServedClient) -> None:
        """Check the client regularly."""
        self.unread.add(client)

    def reading_resumed(self, client: ServedClient) -> None:
        """Stop these checks."""
        self.unread.discard(client)

    @property
    def encrypted(self) -> bool:
        """True if clients connect by TLS."""
        return self.tls is not None

    def _under_way(self) -> Iterator[RequestRecord]:
        return (exchange.record for exchange in self.exchanges)

    def new_id(self) -> bytes:
        """Return a request id."""
        return b"%s-%x" % (self._id_prefix, next(self._ids))

    def _wake(self) -> None:
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)

    async def _until(self, over: Callable[[], bool], give_up: float) -> None:
        while not over() and (left := give_up - self.clock()) > 0:
            self._quiet = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._quiet], timeout=left)
        self._quiet = None

    def _tick_sooner(self) -> None:
        if not self._uses_short_tick and self._timer is not None:
            self._timer.cancel()
            self._uses_short_tick = True
            self._set_timer(SHORT_TICK_S)

    def _set_timer(self, pause_s: float) -> None:
        self._due = time.monotonic() + pause_s
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._tick)

    def _tick(self) -> None:
        late_s = max(time.monotonic() - self._due, 0.0)
        self.metrics.loop_lag.observe(late_s)
        self._uses_short_tick = bool(self.queued or self.counting)
        self._set_timer(SHORT_TICK_S if self._uses_short_tick else SWEEP_INTERVAL_S)
        # Data that arrived during a suspension is unread: skip one tick's deadlines. Never skip two
        # in a row, or an overloaded process would enforce none.
        self._skipped_tick = late_s > SUSPENDED_LAG_S and not self._skipped_tick
        if self._skipped_tick:
            return
        now = self.clock()
        for counter in [q for q in self.counting if q.deadline < now]:
            counter.expire(now)
        self.settle(now)
        if not self._uses_short_tick or now >= self._next_sweep:
            self._next_sweep = now + SWEEP_INTERVAL_S
            for exchange in [e for e in self.exchanges if e.deadline < now]:
                if exchange in self.exchanges:  # may have ended since
                    exchange.expire(now)
            for client in [c for c in self.clients if c.deadline < now]:
                client.expire(now)
            for client in list(self.unread):
                client.close_if_gone()
            for release in [r for r in self.releases if r.deadline < now]:
                release.expire(now)
            self.pools.sweep(now)
            self._failover.retry_overdue(now, self.router.fleet, self.exchanges)
            self.router.fleet.settle(now)

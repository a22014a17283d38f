"""Protocols of the server, so that no module of the data path imports the server."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Collection
from math import inf
from typing import Protocol

from proxy.core.fleet.leases import Lease
from proxy.core.fleet.worker import Worker
from proxy.core.model.route_table import Route
from proxy.core.model.types import Refusal
from proxy.core.queue.ticket import Ticket
from proxy.core.router import Router
from proxy.http.body_budget import BodyBudget
from proxy.http.request import Request, RequestHead
from proxy.metrics.registry import Metrics
from proxy.transfer.types import Connector
from proxy.wire.exchange.continuation_log import ContinuationLog
from proxy.wire.exchange.request_record import RequestRecord
from proxy.wire.exchange.tokenize import TokenizeRequest
from proxy.wire.extension import Client, Conversation
from proxy.wire.large_body_queue import LargeBodyQueue
from proxy.wire.settings import WireSettings
from proxy.wire.worker.pool import ConnectionPools
from proxy.wire.write_batch import WriteBatch


class Expiring(Protocol):
    deadline: float

    def expire(self, now: float) -> None: ...


class ServedClient(Client, Expiring, Protocol):
    def limit(self, settings: WireSettings) -> None:
        """Apply new limits to later requests."""

    def close_if_gone(self) -> None:
        """Close the connection if the client has left."""

    def close_if_idle(self, now: float, min_idle_s: float = -inf) -> None:
        """Close a connection that has been idle for this long."""

    def close_for_drain(self, now: float) -> None: ...

    def abort(self) -> None: ...


class ServedExchange(Conversation, Expiring, Protocol):
    record: RequestRecord

    def placement_decided(self, now: float, placed: Lease | Refusal) -> None:
        """Handle the end of queueing."""

    def leave_workers(self, now: float, workers: Collection[Worker]) -> None:
        """Leave these workers if possible."""

    def uses(self, worker: Worker) -> bool:
        """Return whether the worker has a part of the request."""

    def move(self, now: float) -> str:
        """Go to another worker if one has room; return why not, or nothing."""

    def release(self, now: float) -> None:
        """Go on with a stream that was held for a move."""

    def condense_text(self) -> None:
        """Count the text that was sent, and forget it."""


class WireContext(Protocol):
    router: Router
    connector: Connector | None
    settings: WireSettings
    metrics: Metrics
    clock: Callable[[], float]
    leaving: bool
    draining: bool
    tls: ssl.SSLContext | None  # of clients
    unread: set[ServedClient]  # checked regularly
    exchanges: set[ServedExchange]
    queued: dict[Ticket, ServedExchange]
    local_requests: set[Conversation]  # that no worker serves
    releases: set[Expiring]  # of KV blocks
    write_metrics: Callable[[bool], Awaitable[tuple[bytes, str]]]
    short_waits: set[Expiring]  # checked at short ticks
    write_batch: WriteBatch
    pools: ConnectionPools
    body_budget: BodyBudget
    large_bodies: LargeBodyQueue
    continuations: ContinuationLog

    def new_id(self) -> bytes: ...

    def check_head(self, head: RequestHead) -> None:
        """Set the route or the refusal of a request."""

    def begin(
        self, client: ServedClient, request: Request, route: Route, arrived_at: float
    ) -> Conversation: ...

    def count_refused(
        self,
        refusal: Refusal,
        response: bytes,
        request: Request | None = None,
        request_id: bytes = b"",
    ) -> None:
        """Count a request refused by its head."""

    def add_client(self, client: ServedClient, file: int) -> None: ...

    def remove_client(self, client: ServedClient) -> None: ...

    def remove_exchange(self, exchange: ServedExchange) -> None: ...

    def remove_local_request(self, request: Conversation) -> None: ...

    def remove_release(self, release: Expiring) -> None: ...

    def add_short_wait(self, wait: Expiring) -> None: ...

    def make_tokenize_request(
        self, now: float, on_done: Callable[[float, int | None], None]
    ) -> TokenizeRequest: ...

    def queue(self, ticket: Ticket, exchange: ServedExchange) -> None: ...

    def has_same_id(self, request: Request) -> bool:
        """Return whether another request in flight has this id."""

    def dispatch_queued(self, now: float) -> None:
        """Send queued requests that have room."""

    def handle_local_failure(self, now: float) -> None:
        """Count a lack of local resources, and make room."""

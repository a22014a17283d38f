"""The server as the connections, exchanges and legs of the data path see it.

They depend on these protocols, so that none of their modules imports the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Protocol

from proxy.wire.extension import Client, Conversation

if TYPE_CHECKING:
    from proxy.core.fleet.leases import Lease
    from proxy.core.fleet.worker import Worker
    from proxy.core.model.route_table import Route
    from proxy.core.model.types import Reason, Refusal
    from proxy.core.queue.ticket import Ticket
    from proxy.core.router import Router
    from proxy.http.body_budget import BodyBudget
    from proxy.http.request import Request, RequestHead
    from proxy.metrics.registry import Metrics
    from proxy.transfer.types import Connector
    from proxy.wire.exchange.request_record import RequestRecord
    from proxy.wire.exchange.tokenize import TokenizeRequest
    from proxy.wire.settings import WireSettings
    from proxy.wire.worker.pool import ConnectionPools
    from proxy.wire.write_batch import WriteBatch


class Expiring(Protocol):
    """A part of the data path that the server ends at its deadline."""

    deadline: float

    def expire(self, now: float) -> None:
        """End it: its deadline has passed."""


class ServedClient(Client, Expiring, Protocol):
    """A client's connection as the server keeps it."""

    def limit(self, settings: WireSettings) -> None:
        """Take new limits for the requests to come."""

    def look(self) -> None:
        """Check whether a client whose socket is not read has gone."""

    def part_if_idle(self, now: float) -> None:
        """Close the connection unless a request is under way on it."""

    def dismiss(self, now: float) -> None:
        """Close the connection once the client has what was written."""

    def abort(self) -> None:
        """Close the connection now."""


class ServedExchange(Conversation, Expiring, Protocol):
    """A request on its way as the server keeps it."""

    record: RequestRecord

    def placed(self, now: float, placed: Lease | Refusal) -> None:
        """Go on after the queue: to a worker, or with a refusal."""

    def forsake(self, now: float, workers: Collection[Worker]) -> None:
        """Give up on these workers unless the response has begun."""


class WireContext(Protocol):
    """The parts of the server that the data path uses."""

    router: Router
    connector: Connector | None
    settings: WireSettings
    metrics: Metrics
    clock: Callable[[], float]
    leaving: bool
    draining: bool
    pages: Callable[[bool], Awaitable[tuple[bytes, str]]]
    counting: set[TokenizeRequest]
    outbox: WriteBatch
    pools: ConnectionPools
    collecting: BodyBudget

    @property
    def encrypted(self) -> bool:
        """True if clients connect by TLS."""

    @property
    def visits(self) -> AbstractSet[Conversation]:
        """The requests that an extension or the metrics page serves."""

    def new_id(self) -> bytes:
        """Return an id for a request that came without one."""

    def judge(self, head: RequestHead) -> None:
        """Set the route of a request from its head, or the refusal."""

    def begin(
        self, client: ServedClient, request: Request, route: Route, came_at: float
    ) -> Conversation:
        """Return the conversation that serves a request."""

    def refused(self, refusal: Refusal, answer: bytes, request: Request | None = None) -> None:
        """Count a request that was refused by its head."""

    def answered(
        self,
        route: str,
        status: int,
        reason: Reason,
        request: Request | None,
        began: float,
        sent_bytes: int,
    ) -> None:
        """Count a request that no worker was asked for."""

    def client_came(self, client: ServedClient) -> None:
        """Keep a connection."""

    def client_left(self, client: ServedClient) -> None:
        """Forget a connection."""

    def reading_paused(self, client: ServedClient) -> None:
        """Look at a client now and then while its socket is not read."""

    def reading_resumed(self, client: ServedClient) -> None:
        """Stop looking at a client: its socket is read again."""

    def exchange_began(self, exchange: ServedExchange) -> None:
        """Keep an exchange."""

    def exchange_over(self, exchange: ServedExchange) -> None:
        """Forget an exchange."""

    def visit_began(self, visit: Conversation) -> None:
        """Keep a visit."""

    def visit_over(self, visit: Conversation) -> None:
        """Forget a visit."""

    def release_began(self, release: Expiring) -> None:
        """Keep a request that frees KV blocks."""

    def release_over(self, release: Expiring) -> None:
        """Forget a request that frees KV blocks."""

    def count(self, now: float, done: Callable[[float, int | None], None]) -> TokenizeRequest:
        """Return a new request to a worker's /tokenize."""

    def queue(self, ticket: Ticket, exchange: ServedExchange) -> None:
        """Call `placed` of the exchange once its ticket leaves the queue."""

    def unqueue(self, ticket: Ticket) -> None:
        """Forget a ticket."""

    def settle(self, now: float) -> None:
        """Send the queued requests that have room now."""

    def short_of_room(self, now: float) -> None:
        """Count a connection to a worker that this machine had no room for."""

"""A request as metrics, logs, traces and the status page see it, and the recorder of that page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from proxy.core.fleet.leases import Decision
    from proxy.core.model.types import Reason, RequestInfo
    from proxy.core.tenants.tenants import Tenant
    from proxy.http.trace import Trace


class ObservedRequest(Protocol):
    """A request as the data path keeps it."""

    ask: RequestInfo | None
    decision: Decision | None
    prompt: bytes
    started: float
    queue_s: float
    sent_bytes: int
    placed_at: float | None
    prefilled_at: float | None
    first_token_at: float | None
    opening: int
    tokens: int
    number: int
    ticks: list[float] | None

    @property
    def id(self) -> str:
        """The client's name for it, or else ours."""

    @property
    def tenant(self) -> Tenant | None:
        """Whose it is, be it read or not."""

    @property
    def in_the_gaps(self) -> bool:
        """Whether it is of those that wait for room that nobody else wants."""

    @property
    def trace(self) -> Trace | None:
        """Its own part of that trace, where requests are traced."""

    @property
    def trace_id(self) -> str:
        """The trace that it belongs to, if any."""


class Recorder(Protocol):
    """What the status page records of requests while it is open."""

    def saw_tokens(self, seen: ObservedRequest, now: float) -> None:
        """Record the time of tokens."""

    def ended(self, seen: ObservedRequest, now: float, status: int, reason: Reason) -> None:
        """Record the end of a request."""

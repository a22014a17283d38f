"""The request and the recorder as metrics, logs, traces and the status page see them."""

from __future__ import annotations

from typing import Protocol

from proxy.core.fleet.leases import Decision
from proxy.core.model.types import Reason, RequestInfo
from proxy.core.tenants.tenants import Tenant
from proxy.http.trace import Trace


class ObservedRequest(Protocol):
    info: RequestInfo | None
    decision: Decision | None
    prompt: bytes
    started: float
    queue_s: float
    sent_bytes: int
    placed_at: float | None
    prefilled_at: float | None
    first_token_at: float | None
    number: int
    ticks: list[float] | None

    @property
    def id(self) -> str:
        """The client's request id, or a generated one."""

    @property
    def tenant(self) -> Tenant | None:
        """The request's tenant."""

    @property
    def is_batch(self) -> bool:
        """True for a request of the batch class, which only uses spare capacity."""

    @property
    def output_tokens(self) -> int: ...

    @property
    def trace(self) -> Trace | None:
        """The request's span, if it is traced."""

    @property
    def trace_id(self) -> str:
        """The trace id; empty without a trace."""


class Recorder(Protocol):
    """Records requests for the status page while it is open."""

    def record_tokens(self, seen: ObservedRequest, now: float) -> None:
        """Record the time of tokens."""

    def record_end(self, seen: ObservedRequest, now: float, status: int, reason: Reason) -> None:
        """Record the end of a request."""

"""One attempt at a batch line: a data-path request with the scheduler as its client."""

from __future__ import annotations

from collections.abc import Callable

from proxy.batches.storage.rows import error_result, new_id
from proxy.batches.types import LineJob, LineResult
from proxy.core.model.route_table import ROUTES
from proxy.core.tenants.tenants import Tenant
from proxy.http.request import Request, RequestHead
from proxy.http.response_parser import ResponseParser
from proxy.wire.exchange.exchange import Exchange
from proxy.wire.server import WireServer

# Error codes of lines without a response.
WORKER_FAILED, ANSWER_TOO_LARGE = "worker_failed", "answer_too_large"
TEMPORARY_REFUSALS = (429, 503)  # they say nothing about the line
SERVER_ERROR = 500
# Router errors that are not retried: a response over its time limit on a healthy worker, or two
# workers that closed without responding.
FINAL_ERRORS = {504: b'"code":"unfinished"', 502: b'"code":"request_dropped"'}


class LineRequest:
    """One attempt at a line. `on_end` is called at its end unless it was cancelled."""

    __slots__ = (
        "_exchange", "_on_end", "_reader", "_request", "_size", "_wire", "broken", "job",
    )  # fmt: skip
    writable = True

    def __init__(
        self,
        wire: WireServer,
        job: LineJob,
        endpoint: str,
        tenant: Tenant | None,
        on_end: Callable[[LineRequest], None],
    ) -> None:
        self.job = job
        self.broken = False
        self._wire = wire
        self._on_end = on_end
        self._reader = ResponseParser()
        self._size = 0
        self._exchange: Exchange | None = None
        self._request = request_of(job, endpoint)
        self._request.head.tenant = tenant

    def start(self, now: float) -> None:
        request = self._request
        route = request.head.route
        if route is None:
            raise RuntimeError(f"{request.head.path} has no route")
        self._exchange = Exchange(self._wire, self, request, route)
        self._exchange.start(now)

    def cancel(self, now: float) -> None:
        """Cancel the attempt without calling `on_end`."""
        self._on_end = _ignore
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_left(now)

    def write(self, data: bytes, /) -> None:
        """Collect response bytes up to the size limit."""
        self._reader.feed(data)
        self._size += len(data)
        if self.too_large:
            self._reader.pieces = []

    def end_response(self, now: float, *, keep_alive: bool) -> None:  # noqa: ARG002
        self._exchange = None
        self._on_end(self)

    def break_off(self) -> None:
        """Handle a response that cannot be completed."""
        self.broken = True
        self._exchange = None
        self._on_end(self)

    @property
    def too_large(self) -> bool:
        """True if the response exceeds `max_body_bytes`."""
        return self._size > self._wire.settings.max_body_bytes

    @property
    def status(self) -> int:
        """The response's status; 0 without a response."""
        head = self._reader.head
        return 0 if head is None or self.broken else head.status

    @property
    def is_refused_for_now(self) -> bool:
        return self.status in TEMPORARY_REFUSALS

    @property
    def worker_failed(self) -> bool:
        """True if another worker may succeed."""
        if self.broken:
            return True
        is_error = self.status >= SERVER_ERROR and not self.is_refused_for_now
        return is_error and not self.is_final

    @property
    def is_final(self) -> bool:
        """True if the router reports that another attempt would end the same way."""
        code = FINAL_ERRORS.get(self.status)
        return code is not None and code in b"".join(self._reader.pieces)

    @property
    def retry_after_s(self) -> float:
        """The response's `Retry-After`, in seconds; 0 if absent."""
        head = self._reader.head
        return (head.retry_after_s if head is not None else None) or 0.0

    def result(self) -> LineResult:
        job = self.job
        request_id = self._request.id.decode()
        if self.broken:
            message = "The worker failed during the response."
            return error_result(job, WORKER_FAILED, message, request_id)
        if self.too_large:
            message = f"The response exceeds {self._wire.settings.max_body_bytes} bytes."
            return error_result(job, ANSWER_TOO_LARGE, message, request_id)
        body = b"".join(self._reader.pieces)
        return LineResult(job.batch, job.number, job.custom_id, request_id, self.status, body)


def request_of(job: LineJob, endpoint: str) -> Request:
    """Build a line's request, with a new id for each attempt."""
    head = RequestHead()
    head.target = endpoint.encode()
    head.add(b"Host", b"batch")
    head.add(b"Content-Type", b"application/json")
    head.add(b"Content-Length", b"%d" % len(job.body))
    head.add(b"X-Request-Id", new_id("batch_req_").encode())
    head.complete("POST", "1.1", len(job.body))
    head.route = ROUTES.get(endpoint)
    head.batch = True
    return Request(head, job.body)


def _ignore(_: LineRequest) -> None:
    pass

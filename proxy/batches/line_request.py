"""A line on its way: to the data path it is a request like any other, whose client is the lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.batches.storage.rows import new_id
from proxy.batches.types import LineJob, LineResult
from proxy.core.model.route_table import ROUTES
from proxy.http.request import Request, RequestHead
from proxy.http.response_parser import ResponseParser
from proxy.wire.exchange.exchange import Exchange

if TYPE_CHECKING:
    from proxy.core.tenants.tenants import Tenant
    from proxy.wire.server import WireServer

# The batch's own codes for lines that got no answer.
BROKEN, TOO_LARGE = "worker_failed", "answer_too_large"
# The router's own answers that end a line: its answer takes longer than it may on a worker that is
# well, or two workers closed the connection instead of answering.
FINAL = {504: b'"code":"unfinished"', 502: b'"code":"request_dropped"'}


class LineRequest:
    """One try at a line. `over` hears of its end, unless it was dropped."""

    __slots__ = (
        "_exchange", "_over", "_reader", "_request", "_size", "_wire", "broken", "job",
    )  # fmt: skip
    writable = True

    def __init__(
        self,
        wire: WireServer,
        job: LineJob,
        endpoint: str,
        tenant: Tenant | None,
        over: Callable[[LineRequest], None],
    ) -> None:
        self.job = job
        self.broken = False
        self._wire = wire
        self._over = over
        self._reader = ResponseParser()
        self._size = 0
        self._exchange: Exchange | None = None
        self._request = request_of(job, endpoint)
        self._request.head.tenant = tenant

    def start(self, now: float) -> None:
        """Send it on its way."""
        request = self._request
        route = request.head.route
        if route is None:
            raise RuntimeError(f"{request.head.path} is no route")
        self._exchange = Exchange(self._wire, self, request, route)
        self._exchange.start(now)

    def drop(self, now: float) -> None:
        """Have it stop; nothing will be heard of it."""
        self._over = _nobody
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.gone(now)

    # As the data path's client

    def write(self, data: bytes, /) -> None:
        """Collect the answer, within bounds."""
        self._reader.feed(data)
        self._size += len(data)
        if self.too_large:
            self._reader.pieces = []

    def done(self, now: float, *, keep_alive: bool) -> None:  # noqa: ARG002
        """Hear that the answer is whole."""
        self._exchange = None
        self._over(self)

    def break_off(self) -> None:
        """Hear that it can't be completed."""
        self.broken = True
        self._exchange = None
        self._over(self)

    # What came of it

    @property
    def too_large(self) -> bool:
        """Whether the answer is beyond what a request may be."""
        return self._size > self._wire.settings.max_body_bytes

    @property
    def status(self) -> int:
        """The answer's; 0 where there is none."""
        head = self._reader.head
        return 0 if head is None or self.broken else head.status

    @property
    def is_final(self) -> bool:
        """Whether the router says that another try would end in the same way."""
        code = FINAL.get(self.status)
        return code is not None and code in b"".join(self._reader.pieces)

    @property
    def retry_after_s(self) -> float:
        """For how long whoever refused it asks to be left alone."""
        head = self._reader.head
        return (head.retry_after_s if head is not None else None) or 0.0

    def result(self) -> LineResult:
        """Say what became of the line."""
        job = self.job
        request_id = self._request.id.decode()
        if self.broken:
            message = "The worker failed while it answered."
            return _without(job, request_id, BROKEN, message)
        if self.too_large:
            message = f"The answer is larger than {self._wire.settings.max_body_bytes} bytes."
            return _without(job, request_id, TOO_LARGE, message)
        body = b"".join(self._reader.pieces)
        return LineResult(job.batch, job.number, job.custom_id, request_id, self.status, body)


def _without(job: LineJob, request_id: str, code: str, message: str) -> LineResult:
    return LineResult(
        job.batch, job.number, job.custom_id, request_id, code=code, message=message
    )  # fmt: skip


def request_of(job: LineJob, endpoint: str) -> Request:
    """Write the request of a line, with an id of its own for each try."""
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


def _nobody(_: LineRequest) -> None:
    """Hear nothing."""

"""Requests for the metrics page."""

from __future__ import annotations

import asyncio
import logging

from proxy.core.model.types import Reason, Refusal
from proxy.http.local_responses import refuse, respond
from proxy.http.request import Request
from proxy.wire.context import WireContext
from proxy.wire.extension import Recipient

logger = logging.getLogger(__name__)

OPENMETRICS = b"application/openmetrics-text"
WrittenPage = asyncio.Task[tuple[bytes, str]]


class MetricsRequest:
    """One request for the metrics page; a `Conversation`."""

    def __init__(self, wire: WireContext, client: Recipient, request: Request) -> None:
        self._wire = wire
        self._client = client
        self._request = request
        self._writing: WrittenPage | None = None

    def start(self, now: float) -> None:  # noqa: ARG002
        self._wire.local_requests.add(self)
        openmetrics = OPENMETRICS in self._request.head.special.get(b"accept", b"")
        self._writing = asyncio.ensure_future(self._wire.write_metrics(openmetrics))
        self._writing.add_done_callback(self._respond)

    def _respond(self, written: WrittenPage) -> None:
        if written.cancelled():
            return
        error = written.exception()
        if self not in self._wire.local_requests:  # the client has left
            return
        self._wire.remove_local_request(self)
        request = self._request
        keep_alive = request.head.keep_alive and not self._wire.leaving
        if error:
            logger.warning("cannot write the metrics page: %s", repr(error))
            refusal = Refusal(
                503, Reason.NO_WORKER, "not all router processes responded", retry_after_s=1.0
            )
            self._client.write(refuse(refusal, request, keep_alive=keep_alive))
        else:
            body, kind = written.result()
            headers = [(b"X-Request-Id", request.id)]
            bodiless = request.head.method == "HEAD"
            page = respond(
                200, body, kind.encode(), headers=headers, keep_alive=keep_alive, bodiless=bodiless
            )
            self._client.write(page)
        self._client.end_response(self._wire.clock(), keep_alive=keep_alive)

    def pause(self) -> None:
        """Do nothing: the page is sent in one write."""

    def resume(self, now: float) -> None:
        """Do nothing."""

    def client_left(self, now: float) -> None:  # noqa: ARG002
        if self._writing is not None:
            self._writing.cancel()
        self._wire.remove_local_request(self)

    def end_for_shutdown(self, now: float) -> None:
        self.client_left(now)
        self._client.break_off()

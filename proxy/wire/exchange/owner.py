"""The part of an exchange that attempts use."""

from __future__ import annotations

from typing import NamedTuple

from proxy.core.fleet.worker import Worker
from proxy.core.model.route_table import Route
from proxy.core.model.types import Outcome, Reason, Refusal, RequestInfo
from proxy.core.request.continued_text import TextSoFar
from proxy.http.request import Request
from proxy.http.response_parser import ResponseHead
from proxy.http.sent_text import RestOfText, SentText
from proxy.wire.context import WireContext
from proxy.wire.exchange.request_record import RequestRecord
from proxy.wire.exchange.response_writer import ResponseWriter
from proxy.wire.exchange.state import READING, ExchangeState, may_follow
from proxy.wire.extension import Client
from proxy.wire.handover.two_legs import TwoLegExchange
from proxy.wire.worker.connection import WorkerError

MAX_PIECES = 32  # of a stream's text that is not counted yet


class TokensSource(NamedTuple):
    """The worker with the journal of a stream's tokens."""

    worker: Worker
    since: float
    number: int  # of tokens


class AttemptOwner:
    def __init__(self, wire: WireContext, client: Client, request: Request, route: Route) -> None:
        self.wire = wire
        self.client = client
        self.request = request
        self.route = route
        self.info: RequestInfo | None = None
        self.record = RequestRecord()
        self.state = READING
        self.last_refusal: Refusal | None = None  # of a failed retry
        # Of a stream that another worker may continue, or continues.
        self.sent_text: SentText | None = None
        self.begun_response: ResponseWriter | None = None  # before it failed
        self.repeated: RestOfText | None = None  # while another worker repeats it
        self.failed_worker = ""  # until the stream goes on
        self.why_not_continued = ""
        self.whole_body = b""  # without the output of another worker
        # From one of these, another worker goes on.
        self.text_so_far: TextSoFar | None = None
        self.tokens_source: TokensSource | None = None
        # A failed hand-over; its link is counted as failed if the next attempt succeeds.
        self.suspect: TwoLegExchange | None = None

    def set_state(self, state: ExchangeState) -> None:
        if not may_follow(self.state, state):
            raise RuntimeError(f"no transition from {self.state} to {state}")
        self.state = state

    def condense_text(self) -> None:
        if self.sent_text is not None and len(self.sent_text.pieces) > MAX_PIECES:
            self.sent_text.condense()

    def try_another(
        self, now: float, outcome: Outcome, error: WorkerError, head: ResponseHead | None = None
    ) -> Refusal | None:
        """Retry, or return a refusal."""
        raise NotImplementedError

    def refuse(self, now: float, refusal: Refusal) -> None:
        raise NotImplementedError

    def close(self, now: float, status: int, reason: Reason | None = None) -> None:
        raise NotImplementedError

    def forget_body(self) -> None:
        raise NotImplementedError

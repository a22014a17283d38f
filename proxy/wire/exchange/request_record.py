"""Records of requests, for metrics and logs."""

from __future__ import annotations

from math import inf

from proxy.core.fleet.leases import Decision
from proxy.core.model.finished_request import FinishedRequest
from proxy.core.model.types import Reason, RequestInfo
from proxy.core.tenants.tenants import Rank, Tenant
from proxy.http.request import Request
from proxy.http.trace import Trace, id_in
from proxy.metrics.histogram import Histogram
from proxy.metrics.registry import Metrics, class_of

BATCH = Rank.BATCH
TRACE = b"traceparent"


class RequestRecord:
    """The times and the outcome of one request."""

    __slots__ = (
        "_gaps", "decision", "first_token_at", "first_tokens", "info", "last_token_at",
        "later_tokens", "left_workers", "number", "placed_at", "prefilled_at", "prompt", "queue_s",
        "request", "sent_bytes", "started", "ticks", "unread_id",
    )  # fmt: skip

    def __init__(self) -> None:
        self.request: Request | None = None
        self.unread_id = b""  # without `request`
        self.prompt = b""  # the whole body, if prompts are logged
        self.info: RequestInfo | None = None
        self.decision: Decision | None = None
        self.started = 0.0
        self.queue_s = 0.0
        self.placed_at: float | None = None
        self.prefilled_at: float | None = None  # end of the prefill leg
        self.sent_bytes = 0
        self.number = 0  # on the status page
        self.ticks: list[float] | None = None  # token times since the last status update
        self.first_token_at: float | None = None
        self.first_tokens = 0  # in the first piece
        self.later_tokens = 0
        self.last_token_at = 0.0
        self.left_workers: tuple[str, ...] = ()  # from which the stream went on elsewhere
        self._gaps: Histogram | None = None

    @property
    def id(self) -> str:
        request_id = self.unread_id if self.request is None else self.request.id
        return request_id.decode("latin-1")

    @property
    def tenant(self) -> Tenant | None:
        """The tenant that the API key names."""
        return None if self.request is None else self.request.head.tenant

    @property
    def is_batch(self) -> bool:
        tenant = self.tenant
        of_batch = self.request is not None and self.request.head.batch
        return of_batch or (tenant is not None and tenant.spec.rank is BATCH)

    @property
    def output_tokens(self) -> int:
        return self.first_tokens + self.later_tokens

    @property
    def trace_id(self) -> str:
        if (trace := self.trace) is not None:
            return trace.id
        return "" if self.request is None else id_in(self.request.head.special.get(TRACE))

    @property
    def trace(self) -> Trace | None:
        return None if self.request is None else self.request.trace

    def begin(self, now: float, request: Request, metrics: Metrics) -> None:
        self.started = now
        self.request = request
        if metrics.begin_trace is not None:
            head = request.head
            request.trace = metrics.begin_trace(traceparent := head.special.get(TRACE))
            if traceparent is not None:
                head.withhold((TRACE,))
        if metrics.keeps_prompts:
            self.prompt = request.body

    def place(self, now: float, decision: Decision) -> None:
        self.decision = decision
        self.placed_at = now
        self.prefilled_at = None

    def record_tokens(self, now: float, metrics: Metrics, tokens: int = 1) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
            self.first_tokens = tokens
            if self.decision is not None:
                self._gaps = metrics.gaps_of(self.decision.worker.role, class_of(self.info))
        else:
            self.later_tokens += tokens
            if self._gaps is not None:
                self._gaps.observe(now - self.last_token_at)
        self.last_token_at = now
        if (live := metrics.live) is not None:
            live.record_tokens(self, now)

    def close(
        self, now: float, metrics: Metrics, route: str, status: int, reason: Reason | None
    ) -> None:
        """Count the request; `reason` is set if the router refused it."""
        info, decision = self.info, self.decision
        if reason is None:  # without a decision, the client left before the placement
            reason = Reason.FLEET_FULL if decision is None else decision.reason
        finished = FinishedRequest(route, status, reason, now - self.started)
        self._describe(finished)
        metrics.count_request(finished)
        if info is not None:
            settings = metrics.router.settings.admission
            if settings is not None or info.deadline < inf or info.tenant is not None:
                finished.target_s = metrics.targets.count(info, finished, settings, self.started)
        if (tenant := self.tenant) is not None:
            metrics.tenants.count(tenant, status, finished.ttft_s, self.queue_s)
        if (trace := self.trace) is not None and trace.sampled and finished.ttft_s is not None:
            metrics.attach_trace(finished, trace.id)
        if (live := metrics.live) is not None:
            live.record_end(self, now, status, reason)
        for callback in metrics.at_end:
            callback(self, now, route, status, reason)
        if info is not None:
            metrics.recent.add(info, decision, finished)

    def _describe(self, finished: FinishedRequest) -> None:
        info, first_at = self.info, self.first_token_at
        finished.queue_s, finished.left_workers = self.queue_s, self.left_workers
        finished.size = class_of(info)
        if info is not None:
            finished.model = info.model
            finished.stream = info.stream if info.needs_engine else None
        if first_at is not None:
            finished.ttft_s = first_at - self.started
            if first_at and self.later_tokens:
                finished.tpot_s = (self.last_token_at - first_at) / self.later_tokens
        if self.decision is not None:
            self._describe_placement(finished, self.decision)

    def _describe_placement(self, finished: FinishedRequest, decision: Decision) -> None:
        finished.worker, finished.pool = decision.worker.name, decision.worker.role
        predicted = decision.predicted_ttft_s
        if (placed_at := self.placed_at) is not None:
            finished.placed_s = placed_at - self.started
            if predicted is not None:
                # The measured TTFT includes the time before the last placement.
                predicted += finished.placed_s
            if self.prefilled_at is not None:
                finished.leg_s = self.prefilled_at - placed_at
        finished.predicted_ttft_s = predicted
        if (handover := decision.handover) is not None:
            if self.prefilled_at is None:
                finished.leg = handover.prefill.name, handover.prefill.role
            finished.fetched = handover.tokens > 0

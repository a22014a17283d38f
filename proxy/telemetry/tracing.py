"""OpenTelemetry spans of requests, made from the times that were recorded anyway.

A request has a span, with spans for its wait in the queue, for each leg, and for the time before
and after the first token. vLLM's spans are below the legs. A thread exports the spans; if
its queue of 2,048 is full, spans are dropped.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from proxy.config.telemetry import TracingConfig
from proxy.core.model.types import Reason
from proxy.errors import ProxyError
from proxy.http.trace import Trace, WorkerSpan, new_id
from proxy.metrics.observed import ObservedRequest
from proxy.metrics.registry import class_of

logger = logging.getLogger(__name__)

SERVER_ERROR = 500
CLOSE_TIMEOUT_S = 3.0
EXPORT_TIMEOUT_S = 5.0
PREFILL = "prefill"
MISSING = (
    "router.tracing: OpenTelemetry is not installed; pip install 'vllm-sched[otel]', or remove "
    "router.tracing"
)


class Span(NamedTuple):
    name: str
    id: int
    parent: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


class FirstMessage(logging.Handler):
    """Keeps the first message of an export: the cause of its failure."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


class LoggedExporter:
    """Exports spans, and logs when the collector stops and begins to accept them."""

    def __init__(self, exporter: Any, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._accepted = True
        self._messages = FirstMessage()
        # It would log each batch that fails.
        self._logger = logging.getLogger("opentelemetry.exporter")
        self._logger.setLevel(logging.WARNING)
        self._logger.propagate = False
        self._logger.addHandler(self._messages)

    def export(self, spans: Sequence[Any]) -> Any:
        self._messages.text = ""
        result = self._exporter.export(spans)
        before, self._accepted = self._accepted, result.name == "SUCCESS"
        if before and not self._accepted:
            logger.warning(
                "router.tracing: %s does not accept spans, which are dropped until it does: %s",
                self._endpoint,
                self._messages.text,
            )
        elif self._accepted and not before:
            logger.info("router.tracing: %s accepts spans again", self._endpoint)
        return result

    def shutdown(self) -> None:
        self._logger.removeHandler(self._messages)
        self._exporter.shutdown()


class Tracing:
    def __init__(self, config: TracingConfig, chance: Callable[[], float] = random.random) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ProxyError(MISSING) from None
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._share = config.sample
        self._chance = chance
        self._resource = Resource.create({"service.name": config.service})
        exporter = OTLPSpanExporter(endpoint=config.endpoint, timeout=EXPORT_TIMEOUT_S)
        self._processor = BatchSpanProcessor(LoggedExporter(exporter, config.endpoint))  # type: ignore[arg-type]

    def begin(self, traceparent: bytes | None) -> Trace:
        """Return a new trace, or continue the client's."""
        return Trace.begin(traceparent, sample=self._chance() < self._share)

    def export_request(
        self, seen: ObservedRequest, now: float, route: str, status: int, reason: Reason
    ) -> None:
        trace = seen.trace
        if trace is None or not trace.sampled:
            return
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        flags = TraceFlags(TraceFlags.SAMPLED)
        legs = {leg.span for leg in trace.legs}
        for span in spans_of(seen, trace, now, route, reason):
            whole = span.id == trace.span
            kind = SpanKind.CLIENT if span.id in legs else SpanKind.INTERNAL
            if whole:
                kind = SpanKind.SERVER
                span.attributes["http.response.status_code"] = status
            failed = whole and status >= SERVER_ERROR
            above = SpanContext(trace.trace, span.parent, is_remote=whole, trace_flags=flags)
            self._processor.on_end(
                ReadableSpan(
                    name=span.name,
                    context=SpanContext(trace.trace, span.id, is_remote=False, trace_flags=flags),
                    parent=above if span.parent else None,
                    resource=self._resource,
                    attributes={k: v for k, v in span.attributes.items() if v is not None},
                    kind=kind,
                    status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
                    start_time=span.start_ns,
                    end_time=max(span.end_ns, span.start_ns),
                )
            )

    def close(self) -> None:
        """Export queued spans within a time limit."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def spans_of(
    seen: ObservedRequest, trace: Trace, now: float, route: str, reason: Reason
) -> Iterator[Span]:
    # Metrics and logs took some time since `now`; the legs have exact times.
    wall = time.time_ns() - round((time.monotonic() - now) * 1e9)

    def ns(at: float) -> int:
        return wall - round((now - at) * 1e9)

    info, decision, first = seen.info, seen.decision, seen.first_token_at
    yield Span(
        f"router {route}", trace.span, trace.parent or 0, ns(seen.started), wall,
        {
            "proxy.request_id": seen.id,
            "proxy.reason": reason.value,
            "proxy.worker": None if decision is None else decision.worker.name,
            "gen_ai.request.model": None if info is None else info.model,
            "proxy.class": None if info is None else class_of(info),
            "proxy.prompt_tokens": None if info is None else info.prompt_tokens,
            "gen_ai.usage.output_tokens": None if first is None else seen.output_tokens,
        },
    )  # fmt: skip
    if seen.placed_at is not None or seen.queue_s:
        # The time on a worker that failed belongs to its leg, not to the queue.
        waited_until = seen.started + seen.queue_s
        yield Span("queue", new_id(64), trace.span, ns(seen.started), ns(waited_until), {})
    # Without a leg, `ends` still has one item: the request was refused, or the client left.
    ends = [*(leg.at_ns for leg in trace.legs[1:]), wall]
    role_before = ""
    for leg, end in zip(trace.legs, ends, strict=False):
        attributes = {"proxy.worker": leg.worker}
        yield Span(_name(leg, role_before), leg.span, trace.span, leg.at_ns, end, attributes)
        role_before = leg.role
    if first is None or not trace.legs:
        return
    last = trace.legs[-1]
    before = "transfer" if seen.prefilled_at is not None else "prefill"
    yield Span(before, new_id(64), last.span, last.at_ns, ns(first), {})
    yield Span("decode", new_id(64), last.span, ns(first), wall, {})


def _name(leg: WorkerSpan, role_before: str) -> str:
    if leg.role == PREFILL:
        return "prefill leg"
    return "decode leg" if role_before == PREFILL else "serve"

"""A collector of OpenTelemetry spans."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Span:
    """A received span."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    began_ns: int
    ended_ns: int


class Collector:
    """A span collector that listens in its own thread while it is entered."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def take(self, body: bytes) -> None:
        """Record a batch of spans."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            [service] = (
                attribute.value.string_value
                for attribute in resource_spans.resource.attributes
                if attribute.key == "service.name"
            )
            self.spans += [
                Span(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                )
                for scope in resource_spans.scope_spans
                for span in scope.spans
            ]

    def of(self, trace: str) -> list[Span]:
        """Return the spans of a trace."""
        return [span for span in self.spans[:] if span.trace == trace]

    def __enter__(self) -> Collector:
        """Start to listen."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

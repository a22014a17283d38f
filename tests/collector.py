"""Who is sent the spans of a router and of its workers, as an OpenTelemetry collector is."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True, slots=True)
class Span:
    """What is told of one."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    began_ns: int
    ended_ns: int


class Collector:
    """Listens in a thread of its own, for as long as it is entered."""

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
        """Take a batch."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            [service] = (
                said.value.string_value
                for said in each.resource.attributes
                if said.key == "service.name"
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
                for scope in each.scope_spans
                for span in scope.spans
            ]

    def of(self, trace: str) -> list[Span]:
        """Return what is known of a trace."""
        return [span for span in self.spans[:] if span.trace == trace]

    def __enter__(self) -> Collector:
        """Listen."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

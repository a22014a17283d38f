"""The blocks `router.logs` and `router.tracing`."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from proxy.config.types import Block, Name

Level = Literal["debug", "info", "warning", "error"]


class LogsConfig(Block):
    """The router's log on standard error."""

    format: Literal["text", "json"] = "text"
    """Format of a line; json writes one object per line"""
    level: Level = "info"
    """Lowest level of the router's own lines"""
    requests: bool = False
    """Write one line per request, at its end"""
    prompts: bool = False
    """Include the whole request body in these lines. Readers of the log then see users' prompts"""


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("write it as http://collector:4318/v1/traces")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            "credentials, a query and a fragment would be visible in the printed configuration; "
            "set OTEL_EXPORTER_OTLP_HEADERS instead"
        )
    return url


class TracingConfig(Block):
    """OpenTelemetry traces; requires the extra `otel`."""

    endpoint: Annotated[str, AfterValidator(_endpoint)]
    """URL of a collector that accepts OTLP over HTTP, as in http://collector:4318/v1/traces"""
    sample: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of requests that are traced. A request with a traceparent header follows the
    sampling decision in the header"""
    service: Name = "vllm-sched-router"
    """Service name in the traces"""

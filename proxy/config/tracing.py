"""The block `router.tracing`: where traces are sent, and the share of requests that is traced."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from proxy.config.types import Block, Name


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

    endpoint: Annotated[str, AfterValidator(_endpoint)] = Field(
        description="URL of a collector that accepts OTLP over HTTP, as in "
        "http://collector:4318/v1/traces"
    )
    sample: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1,
        description="Share of requests that are traced. A request with a traceparent header "
        "follows the sampling decision in the header",
    )
    service: Name = Field("vllm-sched-router", description="Service name in the traces")

"""The block `router.tracing`: where traces are sent, and of how many requests."""

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
            "credentials in it, or anything from ? or # on, would be shown where the configuration "
            "is; set OTEL_EXPORTER_OTLP_HEADERS instead"
        )
    return url


class TracingConfig(Block):
    """OpenTelemetry, which takes the extra `otel`."""

    endpoint: Annotated[str, AfterValidator(_endpoint)] = Field(
        description="of a collector that speaks OTLP over HTTP, as http://collector:4318/v1/traces"
    )
    sample: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="share of requests that are traced; a client's own traceparent decides"
    )
    service: Name = Field("vllm-sched-router", description="the name that traces show")

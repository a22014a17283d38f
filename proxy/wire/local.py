"""What the router answers itself: that it lives, that it can serve, its models, its counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from proxy.core.types import Reason, Refusal
from proxy.wire.own_answers import answer, refuse

if TYPE_CHECKING:
    from proxy.core.fleet import Fleet
    from proxy.core.tenants import Tenant
    from proxy.wire.request import Request, RequestHead
    from proxy.wire.server import Wire

METRICS = "/metrics"
PATHS = frozenset(["/health", "/ready", "/v1/models", METRICS])
METHODS = frozenset(["GET", "HEAD"])
OPENMETRICS = b"application/openmetrics-text"


def local_refusal(head: RequestHead) -> Refusal | None:
    """Refuse other methods than those that read."""
    if head.method in METHODS:
        return None
    message = f"{head.path} takes GET, not {head.method}"
    return Refusal(405, Reason.UNKNOWN_PATH, message, param="GET, HEAD")


def local_answer(wire: Wire, request: Request, *, keep_alive: bool) -> bytes:
    """Answer a request for one of `PATHS`, but for a page of metrics: see `PageVisit`."""
    fleet, head = wire.router.fleet, request.head
    bodiless = head.method == "HEAD"
    body = b""
    if head.path == "/ready":
        leaving = wire.leaving or wire.draining
        if leaving or not live(fleet):
            why = "the router is shutting down" if leaving else "no worker is up"
            refusal = Refusal(503, Reason.NO_WORKER, why, retry_after_s=1.0)
            return refuse(refusal, request, keep_alive=keep_alive)
    elif head.path == "/v1/models":
        body = models(fleet, head.tenant)
    headers = [(b"X-Request-Id", request.id)]
    return answer(200, body, headers=headers, keep_alive=keep_alive, bodiless=bodiless)


def wants_openmetrics(head: RequestHead) -> bool:
    """Whether a scrape asks for the other of the two formats."""
    return OPENMETRICS in head.special.get(b"accept", b"")


def page_answer(body: bytes, kind: str, request: Request, *, keep_alive: bool) -> bytes:
    """Answer with a page of metrics."""
    return answer(
        200,
        body,
        kind.encode(),
        headers=[(b"X-Request-Id", request.id)],
        keep_alive=keep_alive,
        bodiless=request.head.method == "HEAD",
    )


def live(fleet: Fleet) -> bool:
    """Whether anything can be served."""
    return any(worker.live for worker in fleet)


def models(fleet: Fleet, tenant: Tenant | None = None) -> bytes:
    """List what live workers serve, each model once, with the longest context that one offers.

    To a tenant, those that it may use.
    """
    cards: list[dict[str, Any]] = [
        {
            "id": model,
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "root": model,
            "parent": None,
            "max_model_len": limit,
            "permission": [],
        }
        for model, limit in fleet.contexts().items()
        if tenant is None or tenant.may_use(model)
    ]
    return orjson.dumps({"object": "list", "data": cards})

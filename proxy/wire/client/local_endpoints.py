"""The router's own endpoints."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

import orjson

from proxy.core.fleet.roster import Roster
from proxy.core.model import refusals
from proxy.core.model.types import Reason, Refusal
from proxy.core.tenants.tenants import Tenant, allowed_models
from proxy.http.local_responses import refuse, respond
from proxy.http.request import Request, RequestHead
from proxy.wire.context import WireContext

METRICS, MODELS = "/metrics", "/v1/models"
ONE_MODEL = f"{MODELS}/"  # names may contain slashes
PATHS = frozenset(["/health", "/ready", MODELS, METRICS])
METHODS = "GET", "HEAD"


def is_local(path: str) -> bool:
    """Return True if the router serves this path itself."""
    return path in PATHS or (path.startswith(ONE_MODEL) and path != ONE_MODEL)


def local_refusal(head: RequestHead) -> Refusal | None:
    if head.method in METHODS:
        return None
    return refusals.wrong_method(head.path, head.method, METHODS)


def local_response(wire: WireContext, request: Request, *, keep_alive: bool) -> bytes:
    """Return the response for a local path; `MetricsRequest` serves /metrics."""
    roster, head = wire.router.fleet.roster, request.head
    bodiless = head.method == "HEAD"
    body = b""
    if head.path == "/ready":
        if wire.leaving or not any(worker.is_live for worker in roster):
            why = "the router is shutting down" if wire.leaving else "no worker is up"
            refusal = Refusal(503, Reason.NO_WORKER, why, retry_after_s=1.0)
            return refuse(refusal, request, keep_alive=keep_alive)
    elif head.path == MODELS:
        body = models(roster, head.tenant)
    elif head.path.startswith(ONE_MODEL):
        response = model(roster, _named(head.path), head.tenant)
        if isinstance(response, Refusal):
            return refuse(response, request, keep_alive=keep_alive)
        body = response
    headers = [(b"X-Request-Id", request.id)]
    return respond(200, body, headers=headers, keep_alive=keep_alive, bodiless=bodiless)


def models(roster: Roster, tenant: Tenant | None = None) -> bytes:
    """Return the tenant's live models, each with its longest context."""
    cards = [
        _card(roster, name, limit)
        for name, limit in roster.contexts().items()
        if tenant is None or tenant.may_use(name)
    ]
    return orjson.dumps({"object": "list", "data": cards})


def model(roster: Roster, name: str, tenant: Tenant | None = None) -> bytes | Refusal:
    models = allowed_models(roster.models(), tenant)
    if not roster.serves(name):
        return refusals.model_not_served(name, models, all_listed=roster.all_listed())
    if name not in models:
        return refusals.not_allowed(name, models)
    served = roster.contexts()
    if name not in served:
        return refusals.no_worker(name)
    return orjson.dumps(_card(roster, name, served[name]))


def _named(path: str) -> str:
    """Return the model name; slashes may be escaped."""
    return unquote_to_bytes(path.removeprefix(ONE_MODEL).encode("latin-1")).decode(errors="replace")


def _card(roster: Roster, name: str, limit: int | None) -> dict[str, Any]:
    root, parent = roster.origin(name)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "vllm",
        "root": root or name,
        "parent": parent,
        "max_model_len": limit,
        "permission": [],
    }

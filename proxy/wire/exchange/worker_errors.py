"""Errors of workers that the router reads before the client gets them."""

from __future__ import annotations

import re

from proxy.core.fleet.leases import Lease
from proxy.core.model import refusals
from proxy.core.model.types import Refusal
from proxy.core.tenants.tenants import allowed_models
from proxy.http.response_parser import OK
from proxy.wire.exchange.owner import AttemptOwner
from proxy.wire.exchange.response_writer import ResponseWriter
from proxy.wire.handover.first_token import begins_with_error

BAD_REQUEST, UNAUTHORIZED, NOT_FOUND = 400, 401, 404
MAX_ERROR_BYTES = 1 << 16  # that are read
# vLLM's message for an exceeded context length.
TOO_LONG = re.compile(rb"maximum (?:context|model) length")
# vLLM's whole response to a path that its model does not have, such as embeddings.
MISSING_ROUTE = re.compile(rb'\s*\{\s*"detail"\s*:\s*"Not Found"\s*\}\s*')

# In an error event: on another worker the request would fail again.
REQUEST_AT_FAULT = re.compile(rb'"code" ?: ?4\d\d\b')


def must_be_read(exchange: AttemptOwner, lease: Lease | None, status: int) -> bool:
    if status == BAD_REQUEST:
        return lease is not None and exchange.wire.router.leases.has_larger(lease)
    return status == NOT_FOUND


def refuses_our_key(exchange: AttemptOwner, lease: Lease | None, status: int) -> bool:
    """Return True for a 401 that is not the client's: its key was not sent."""
    if status != UNAUTHORIZED or lease is None:
        return False
    return exchange.request.head.tenant is not None or lease.worker.spec.api_key is not None


def fails_at_once(response: ResponseWriter, body: bytes) -> bool:
    """Return True if a stream's first bytes report a failure of the engine."""
    if response.has_begun or response.status != OK or not begins_with_error(body):
        return False
    return REQUEST_AT_FAULT.search(body) is None


def is_too_long(error_body: bytes) -> bool:
    return TOO_LONG.search(error_body, 0, MAX_ERROR_BYTES) is not None


def missing_route(exchange: AttemptOwner, error_body: bytes) -> Refusal | None:
    """Return a refusal with the models if the worker lacks the path."""
    info = exchange.info
    if info is None or not info.model or MISSING_ROUTE.fullmatch(error_body) is None:
        return None
    models = allowed_models(exchange.wire.router.fleet.roster.models(), info.tenant)
    return refusals.route_not_served(info.model, exchange.request.head.path, models)

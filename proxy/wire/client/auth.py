"""Tenants by key, and headers meant for the router only."""

from __future__ import annotations

from proxy.core.model import refusals
from proxy.core.model.types import Refusal
from proxy.core.request.client_fields import HEADERS, KEYS
from proxy.core.tenants.tenants import Tenants
from proxy.http.request import RequestHead

BEARER = b"bearer "
# Load balancers and scrapers need no key.
KEYLESS_PATHS = frozenset(["/health", "/ready", "/metrics"])
ROUTER_HEADERS = (*HEADERS, *KEYS)


def presented_key(head: RequestHead) -> bytes:
    """Return the key of a request; empty if there is none."""
    special = head.special
    authorization = special.get(b"authorization", b"").strip()
    if authorization[: len(BEARER)].lower() == BEARER:
        return authorization[len(BEARER) :].strip()
    return next((special[name].strip() for name in KEYS if name in special), b"")


def identify(tenants: Tenants, head: RequestHead) -> Refusal | None:
    """Set the tenant, and hide the router's headers from workers."""
    was_checked, head.edition = head.edition >= 0, tenants.edition
    head.tenant = None
    if tenants.open:
        if was_checked:
            _give_back(head)
        return None
    head.authorization = b""
    if any(name in head.special for name in ROUTER_HEADERS):
        head.withhold(ROUTER_HEADERS)
    if head.path in KEYLESS_PATHS:
        return None
    key = presented_key(head)
    if not key:
        return refusals.no_key()
    tenant = head.tenant = tenants.find_by_key(key)
    if tenant is None:
        return refusals.bad_key()
    if b"x-explain" in head.special:  # it shows the load of workers
        head.explain = tenant.spec.explain and head.wants_explanation()
    return None


def _give_back(head: RequestHead) -> None:
    special = head.special
    if (authorization := special.get(b"authorization")) is not None:
        head.authorization = b"Authorization: %b\r\n" % authorization
    present = {name.lower() for name in head.pieces[::4]}
    for name in ROUTER_HEADERS:
        if name in special and name not in present:
            head.pieces += (name, b": ", special[name], b"\r\n")
    head.lines = b"".join(head.pieces)

"""Refuses requests from web pages of other origins, for a router without keys.

A web page in a local browser can send a form, or resolve its own name to 127.0.0.1. Browsers send
`Origin` with every POST; programs do not. `Host` is not checked: local proxies may set any name.
Repeated heads on a connection are not checked again.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from proxy.config.admin import is_loopback
from proxy.core.model import refusals
from proxy.core.model.types import Refusal
from proxy.http.request import RequestHead

PAGES = ("http", "https")


def page_refusal(head: RequestHead) -> Refusal | None:
    origin = head.special.get(b"origin", b"").decode("latin-1")
    return refusals.origin_not_allowed(origin) if origin and not _may_ask(origin) else None


def _may_ask(origin: str) -> bool:
    """Return True for local pages and desktop apps."""
    scheme, colon, _ = origin.partition("://")
    if colon and scheme not in PAGES:
        return True
    try:
        name = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name.endswith(".localhost")  # browsers resolve these locally

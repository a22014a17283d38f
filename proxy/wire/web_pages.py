"""Web pages are no clients of a router that asks for no key.

Listening on loopback keeps other machines out, but not the pages in this machine's browsers. One
whose name is made to resolve to 127.0.0.1 could read what is answered: its name stands in Host. Any
other could send what needs no leave of ours, as a form does: it names itself in Origin. Clients
that are programs send no Origin, and in Host what they were told to connect to.

Asked of each head that is new on its connection: a client's next requests cost nothing.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.core import refusals

if TYPE_CHECKING:
    from proxy.core.types import Refusal
    from proxy.wire.request import RequestHead

LOCALHOST = "localhost"
PAGES = ("http", "https", "")  # the last is `null`'s: a page that won't say whose it is


def page_refusal(head: RequestHead, ours: str) -> Refusal | None:
    """Refuse what others' pages send; `ours` is the name or address of loopback listened on."""
    host, origin = (head.special.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
    if host and not _leads_here(host, ours):
        return refusals.not_by_that_name(host)
    if origin and not _may_ask(origin):
        return refusals.not_for_pages(origin)
    return None


def _leads_here(host: str, ours: str) -> bool:
    """Whether nobody else can have made that lead here: a number needs no resolving."""
    name = _name(f"//{host}")
    return name == ours.lower() or _is_local(name) or _address(name) is not None


def _may_ask(origin: str) -> bool:
    """Whether it is a page of this machine's, or a program that is built like one."""
    if origin.partition("://")[0] not in PAGES and "://" in origin:
        return True
    name = _name(origin)
    address = _address(name)
    return _is_local(name) or (address is not None and address.is_loopback)


def _is_local(name: str) -> bool:
    """Whether browsers take it for this machine without asking anybody."""
    return name == LOCALHOST or name.endswith(f".{LOCALHOST}")


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None

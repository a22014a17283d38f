"""Web pages of elsewhere are no clients of a router that asks for no key.

Listening on loopback keeps other machines out, but not the pages in this machine's browsers. A page
could send what needs no leave of ours, as a form does, or have its own name resolve to 127.0.0.1:
in either case its browser names it in Origin, as with every POST. Clients that are programs send
none. Host is not judged: proxies on this machine pass on whatever name they are known by.

Asked of each head that is new on its connection: a client's next requests cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.config.admin import is_loopback
from proxy.core.model import refusals

if TYPE_CHECKING:
    from proxy.core.model.types import Refusal
    from proxy.http.request import RequestHead

PAGES = ("http", "https")


def page_refusal(head: RequestHead) -> Refusal | None:
    """Refuse what pages from elsewhere send."""
    origin = head.special.get(b"origin", b"").decode("latin-1")
    return refusals.origin_not_allowed(origin) if origin and not _may_ask(origin) else None


def _may_ask(origin: str) -> bool:
    """Whether it is a page of this machine's, or a program that is built like one."""
    scheme, colon, _ = origin.partition("://")
    if colon and scheme not in PAGES:
        return True
    try:
        name = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name.endswith(".localhost")  # which browsers ask nobody about

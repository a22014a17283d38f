"""What a request is, once read, and what is refused of its head.

llhttp has refused what is malformed. What it lets pass and is refused here: a transfer coding other
than plain `chunked`, chunks in HTTP/1.0, other versions, no or two Hosts, too large a body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httptools

from proxy.core.model.types import Refusal
from proxy.http.head_cache import MAX_DIGITS
from proxy.http.headers import REQUEST_HEADERS, RefusedError, malformed, tokens, without

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.core.model.route_table import Route
    from proxy.core.tenants.tenants import Tenant
    from proxy.http.trace import Trace

NO = frozenset([b"", b"0", b"false", b"no", b"off"])
HANDLED_CONNECTION = frozenset([b"", b"close", b"keep-alive", b"upgrade"])
AROUND = 4  # bytes of a header, beside its name and value


class RequestHead:
    """A request line and its headers, read and judged."""

    __slots__ = (
        "authorization",
        "awaits_continue",
        "batch",
        "edition",
        "explain",
        "http_1_0",
        "id",
        "keep_alive",
        "lines",
        "lost_body",
        "method",
        "path",
        "pieces",
        "refusal",
        "route",
        "size",
        "special",
        "start",
        "target",
        "tenant",
    )

    def __init__(self) -> None:
        self.method = ""
        self.target = b""  # path and query
        self.size = 0  # bytes of its headers, those that stay behind too
        self.path = ""
        self.start = b""  # the request line for the worker, up to the name of its host
        self.pieces: list[bytes] = []  # of the headers that pass on, four for each
        self.lines = b""  # those, ready to be sent
        self.authorization = b""  # so is this one, unless the worker has a key of its own
        self.special: dict[bytes, bytes] = {}  # headers that are looked at
        self.id = b""  # the client's, if it gave one
        self.http_1_0 = False
        self.keep_alive = True
        self.explain = False
        self.awaits_continue = False
        # Set by whoever judges it: where it goes on, or why it does not; whose it is.
        self.route: Route | None = None
        self.refusal: Refusal | None = None
        self.tenant: Tenant | None = None
        self.edition = -1  # of the tenants, among whom that was found
        self.batch = False  # whether it is to be served in the gaps, whoever's it is
        self.lost_body = False  # whether a body came that was not kept, for it was refused then

    def add(self, name: bytes, value: bytes) -> None:
        """Sort a header."""
        self.size += len(name) + len(value) + AROUND
        key = name.lower()
        passes = REQUEST_HEADERS.get(key)
        if passes is not False:
            self.pieces += (name, b": ", value, b"\r\n")
        if passes is not None:
            special = self.special
            special[key] = value if key not in special else special[key] + b", " + value

    def complete(self, method: str, version: str, max_body: int) -> None:
        """Check it, and prepare what is sent on; raises `RefusedError`."""
        self.method = method
        if version != "1.1":
            if version != "1.0":
                raise malformed(f"HTTP/{version} is not spoken here", 505)
            self.http_1_0 = True
        if not self.target.startswith(b"/"):
            self.target = _origin_form(self.target, method)
        self.path = self.target.partition(b"?")[0].decode("latin-1")
        self.start = b"%b %b HTTP/1.1\r\nHost: " % (method.encode(), self.target)
        self._check_framing(max_body)
        self._check_expectation()
        special = self.special
        host = special.get(b"host")
        if (host is None and not self.http_1_0) or (host is not None and b"," in host):
            raise malformed("a request names one Host")
        if (connection := special.get(b"connection")) is not None:
            named = set(tokens(connection)) - HANDLED_CONNECTION
            if named:
                self.pieces = without(self.pieces, named)
        self.lines = b"".join(self.pieces)
        if (authorization := special.get(b"authorization")) is not None:
            self.authorization = b"Authorization: %b\r\n" % authorization
        self.id = special.get(b"x-request-id", b"")
        self.explain = b"x-explain" in special and self.asks_why()

    def keep_back(self, names: Iterable[bytes]) -> None:
        """Leave out headers of what is sent on."""
        self.pieces = without(self.pieces, names)
        self.lines = b"".join(self.pieces)

    def _check_framing(self, max_body: int) -> None:
        if (length := self.special.get(b"content-length")) is not None:
            if len(length) > MAX_DIGITS:  # Python reads no number of many thousand noughts
                raise malformed(f"a Content-Length has at most {MAX_DIGITS} digits")
            if int(length) > max_body:
                raise too_large(max_body)
        elif (coding := self.special.get(b"transfer-encoding")) is not None and (
            coding.strip().lower() != b"chunked" or self.http_1_0
        ):
            raise malformed("the only Transfer-Encoding understood is chunked")

    def asks_why(self) -> bool:
        """Whether the client wants to know which worker serves it, and why."""
        return _is_yes(self.special.get(b"x-explain", b""))

    def _check_expectation(self) -> None:
        expected = self.special.get(b"expect")
        if expected is None or self.http_1_0:
            return
        if expected.strip().lower() != b"100-continue":
            raise malformed("the only expectation met is 100-continue", 417)
        self.awaits_continue = True


class Request:
    """One request, read."""

    __slots__ = ("body", "head", "id", "trace")

    def __init__(self, head: RequestHead, body: bytes) -> None:
        self.head = head
        self.body = body
        self.id = head.id
        self.trace: Trace | None = None  # where requests are traced


def _is_yes(value: bytes) -> bool:
    return value.strip().lower() not in NO


def too_large(max_body: int) -> RefusedError:
    """Describe a body beyond the limit."""
    return malformed(f"a body has at most {max_body} bytes here", 413)


def _origin_form(target: bytes, method: str) -> bytes:
    """Turn `http://host/path?query`, as sent to a proxy, into path and query."""
    if method == "CONNECT" or target == b"*":
        return target
    try:
        url: Any = httptools.parse_url(target)  # a part is None where the URL has none, not `bytes`
    except httptools.HttpParserError:
        url = None
    if url is None or not url.schema or not url.host:
        raise malformed("the target is no path and no URL")
    path: bytes = url.path or b"/"
    query: bytes | None = url.query
    return path + b"?" + query if query else path

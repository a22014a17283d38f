"""A parsed request, and the checks of its head that llhttp does not make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httptools

from proxy.core.model.refusals import RefusedError
from proxy.core.model.route_table import Route
from proxy.core.model.types import Refusal
from proxy.core.tenants.tenants import Tenant
from proxy.http.head_cache import MAX_DIGITS
from proxy.http.headers import REQUEST_HEADERS, malformed, remove_headers, tokens
from proxy.http.trace import Trace

FALSE_VALUES = frozenset([b"", b"0", b"false", b"no", b"off"])
HANDLED_CONNECTION = frozenset([b"", b"close", b"keep-alive", b"upgrade"])
HEADER_OVERHEAD_BYTES = 4  # colon, space, CRLF


class RequestHead:
    """A request line and its headers."""

    __slots__ = (
        "authorization", "awaits_continue", "batch", "edition", "explain", "http_1_0", "id",
        "keep_alive", "lines", "lost_body", "method", "path", "pieces", "refusal", "route", "size",
        "special", "start", "target", "tenant",
    )  # fmt: skip

    def __init__(self) -> None:
        self.method = ""
        self.target = b""  # path and query
        self.size = 0  # bytes of all headers
        self.path = ""
        self.start = b""  # the worker's head up to the value of Host
        self.pieces: list[bytes] = []  # of the forwarded headers, four each
        self.lines = b""  # the joined `pieces`
        self.authorization = b""  # forwarded unless the worker has its own key
        self.special: dict[bytes, bytes] = {}  # headers that the router reads
        self.id = b""  # the client's X-Request-Id
        self.http_1_0 = False
        self.keep_alive = True
        self.explain = False
        self.awaits_continue = False
        # Set by the parser's `check_head`.
        self.route: Route | None = None
        self.refusal: Refusal | None = None
        self.tenant: Tenant | None = None
        self.edition = -1  # of the tenants that `tenant` is from
        self.batch = False  # served from spare capacity
        self.lost_body = False  # a refused request's body was discarded

    def add(self, name: bytes, value: bytes) -> None:
        self.size += len(name) + len(value) + HEADER_OVERHEAD_BYTES
        key = name.lower()
        passes = REQUEST_HEADERS.get(key)
        if passes is not False:
            self.pieces += (name, b": ", value, b"\r\n")
        if passes is not None:
            special = self.special
            special[key] = value if key not in special else special[key] + b", " + value

    def complete(self, method: str, version: str, max_body: int) -> None:
        """Check the head and prepare the forwarded bytes."""
        self.method = method
        if version != "1.1":
            if version != "1.0":
                raise malformed(f"HTTP/{version} is not supported; use HTTP/1.1", 505)
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
            raise malformed("a request must have exactly one Host header")
        if (connection := special.get(b"connection")) is not None:
            named = set(tokens(connection)) - HANDLED_CONNECTION
            if named:
                self.pieces = remove_headers(self.pieces, named)
        self.lines = b"".join(self.pieces)
        if (authorization := special.get(b"authorization")) is not None:
            self.authorization = b"Authorization: %b\r\n" % authorization
        self.id = special.get(b"x-request-id", b"")
        self.explain = b"x-explain" in special and self.wants_explanation()

    def withhold(self, names: Iterable[bytes]) -> None:
        self.pieces = remove_headers(self.pieces, names)
        self.lines = b"".join(self.pieces)

    def _check_framing(self, max_body: int) -> None:
        if (length := self.special.get(b"content-length")) is not None:
            if len(length) > MAX_DIGITS:  # `int` refuses thousands of digits
                raise malformed(f"Content-Length must have at most {MAX_DIGITS} digits")
            if int(length) > max_body:
                raise too_large(max_body)
        elif (coding := self.special.get(b"transfer-encoding")) is not None and (
            coding.strip().lower() != b"chunked" or self.http_1_0
        ):
            raise malformed("the only supported Transfer-Encoding is chunked, in HTTP/1.1")

    def wants_explanation(self) -> bool:
        return self.special.get(b"x-explain", b"").strip().lower() not in FALSE_VALUES

    def _check_expectation(self) -> None:
        expected = self.special.get(b"expect")
        if expected is None or self.http_1_0:
            return
        if expected.strip().lower() != b"100-continue":
            raise malformed("the only supported Expect value is 100-continue", 417)
        self.awaits_continue = True


class Request:
    __slots__ = ("body", "head", "id", "trace")

    def __init__(self, head: RequestHead, body: bytes) -> None:
        self.head = head
        self.body = body
        self.id = head.id
        self.trace: Trace | None = None


def too_large(max_body: int) -> RefusedError:
    return malformed(f"the body is too large: this server accepts at most {max_body} bytes", 413)


def _origin_form(target: bytes, method: str) -> bytes:
    """Reduce a URL, as sent to a proxy, to path and query."""
    if method == "CONNECT" or target == b"*":
        return target
    try:
        url: Any = httptools.parse_url(target)  # its missing parts are None
    except httptools.HttpParserError:
        url = None
    if url is None or not url.schema or not url.host:
        raise malformed("the request target is neither a path nor a URL")
    path: bytes = url.path or b"/"
    query: bytes | None = url.query
    return path + b"?" + query if query else path

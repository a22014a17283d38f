"""The parser of workers' responses, on top of llhttp."""

from __future__ import annotations

import httptools

from proxy.http.head_cache import MAX_DIGITS, HeadPattern, learn_head
from proxy.http.headers import RESPONSE_HEADERS, remove_headers, seconds, status_line, tokens

# Bytes of head or framing; more than one read of the transport.
MAX_UNPARSED_BYTES = 1 << 19
OK, NO_CONTENT, NOT_MODIFIED = 200, 204, 304
HANDLED_CONNECTION = frozenset([b"", b"close", b"keep-alive"])
VERSIONS = frozenset(["1.1", "1.0"])
FRAMING = frozenset([b"content-length", b"transfer-encoding"])


class ResponseError(Exception):
    """An invalid response of a worker."""


class ResponseHead:
    """A status line and its headers."""

    __slots__ = ("_top", "length", "lines", "special", "status", "until_close")

    def __init__(self) -> None:
        self.status = 0
        self.lines: list[bytes] = []  # forwarded headers, four pieces each
        self.special: dict[bytes, bytes] = {}  # headers that the router reads
        self.length: bytes | None = None  # None: chunked or until close
        self.until_close = False
        self._top = b""

    @property
    def top(self) -> bytes:
        """The status line and the forwarded headers."""
        if not self._top:
            self._top = status_line(self.status) + b"".join(self.lines)
        return self._top

    def with_length(self, length: bytes) -> ResponseHead:
        head = ResponseHead()
        head.status = self.status
        head.lines = self.lines
        head.special = self.special
        head.length = length
        head._top = self.top
        return head

    @property
    def retry_after_s(self) -> float | None:
        value = self.special.get(b"retry-after")
        return seconds(value.strip()) if value is not None else None


class ResponseParser:
    """The responses of one connection, one at a time."""

    __slots__ = (
        "_in_chunk", "_interim", "_matched_head", "_parser", "_pattern", "_reading", "_surplus",
        "_unparsed", "between_chunks", "ended", "head", "pieces", "reusable",
    )  # fmt: skip

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pattern: HeadPattern | None = None
        self._matched_head = ResponseHead()
        self.expect()

    def expect(self) -> None:
        self.head: ResponseHead | None = None  # set once complete
        self.pieces: list[bytes] = []  # the caller removes them
        self.ended = False
        self.reusable = False  # after `ended`, for another request
        self.between_chunks = False  # the last bytes ended with a chunk
        self._in_chunk = True
        self._interim = False
        self._surplus = False
        self._unparsed = 0

    @property
    def untouched(self) -> bool:
        """True before the first byte of a response."""
        return self.head is None and not self._unparsed

    def feed(self, data: bytes) -> None:
        """Parse bytes; a `ResponseError` is final."""
        fresh = self.head is None and not self._unparsed
        if fresh and self._pattern is not None and self._feed_matching(self._pattern, data):
            return
        self._parse(data)
        if fresh and self.ended and self.reusable:
            self._remember_head(data)

    def _feed_matching(self, pattern: HeadPattern, data: bytes) -> bool:
        """Return True if these bytes are a whole response with a matching head."""
        digits = pattern.digits_in(data)
        size = pattern.size(digits)
        if not digits or len(data) - size != int(digits):
            return False
        self.head = self._matched_head.with_length(digits)
        self.pieces.append(data[size:])
        self.ended = self.reusable = True
        return True

    def _remember_head(self, data: bytes) -> None:
        head, self._pattern = self.head, None
        if head is not None and head.status == OK and head.length is not None:
            pattern = learn_head(data, head.length)
            if pattern is not None and len(data) - pattern.size(head.length) == int(head.length):
                self._pattern, self._matched_head = pattern, head

    def _parse(self, data: bytes) -> None:
        self._unparsed += len(data)
        self._in_chunk = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise ResponseError("the worker switched protocols") from None
        except httptools.HttpParserError as error:
            if not self.ended:
                raise ResponseError(str(error)) from None
            self._surplus = True
        self.between_chunks = not self._in_chunk and data.endswith(b"\r\n")
        if self._unparsed > MAX_UNPARSED_BYTES:
            raise ResponseError(f"headers or framing without end: over {MAX_UNPARSED_BYTES} bytes")
        if self._surplus:
            self.reusable = False

    def finish(self) -> bool:
        """Return True if the end of the connection completes the response."""
        if self.head is not None and self.head.until_close:
            self.ended = True
        return self.ended

    def on_message_begin(self) -> None:
        """Start a new head, unsolicited if a response has ended."""
        self._reading = ResponseHead()
        self._surplus = self.ended

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; trailers are dropped."""
        if self.head is not None:
            return
        head = self._reading
        key = name.lower()
        passes = RESPONSE_HEADERS.get(key)
        if passes is None or passes:
            head.lines += (name, b": ", value, b"\r\n")
        if passes is not None:
            special = head.special
            special[key] = value if key not in special else special[key] + b", " + value

    def on_headers_complete(self) -> None:
        if self.ended:
            return
        self._unparsed = 0
        status = self._parser.get_status_code()
        head = self._reading
        special = head.special
        if status < OK:
            if not FRAMING.isdisjoint(special):
                raise ResponseError("the worker sent a 1xx response with a body")
            self._interim = True
            return
        if self._parser.get_http_version() not in VERSIONS:
            raise ResponseError("the worker's HTTP version is neither 1.1 nor 1.0")
        head.status = status
        head.length = special.get(b"content-length")
        if head.length is not None and len(head.length) > MAX_DIGITS:
            raise ResponseError(f"the response's Content-Length has more than {MAX_DIGITS} digits")
        coding = special.get(b"transfer-encoding")
        if coding is not None and coding.strip().lower() != b"chunked":
            raise ResponseError("the response's Transfer-Encoding is not chunked")
        if head.length is None and coding is None:
            head.until_close = status not in (NO_CONTENT, NOT_MODIFIED)
        if (connection := special.get(b"connection")) is not None:
            named = set(tokens(connection)) - HANDLED_CONNECTION
            if named:
                head.lines = remove_headers(head.lines, named)
        self.head = head

    def on_body(self, piece: bytes) -> None:
        self._unparsed = 0
        if not self.ended:
            self.pieces.append(piece)

    def on_chunk_header(self) -> None:
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        self._in_chunk = False

    def on_message_complete(self) -> None:
        """Note the end of the response; skip a 1xx."""
        self._unparsed = 0
        if self._interim:
            self._interim = False
        elif not self.ended:
            self.ended = True
            self.reusable = self._parser.should_keep_alive()

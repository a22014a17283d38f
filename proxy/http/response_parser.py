"""Reading a worker's answers: bytes in; a head, pieces of body and an end out.

A head whose answer came in one piece is read once: see `known_head`.
"""

from __future__ import annotations

import httptools

from proxy.http.head_cache import MAX_DIGITS, KnownHead, get_to_know
from proxy.http.headers import RESPONSE_HEADERS, seconds, status_line, tokens, without

# More than one read of the transport, which may hold a small head and the body's beginning.
MAX_QUIET = 1 << 19
OK, NO_CONTENT, NOT_MODIFIED = 200, 204, 304
HANDLED_CONNECTION = frozenset([b"", b"close", b"keep-alive"])
VERSIONS = frozenset(["1.1", "1.0"])
FRAMING = frozenset([b"content-length", b"transfer-encoding"])


class ResponseError(Exception):
    """A worker that does not speak HTTP, or not to us."""


class ResponseHead:
    """How an answer begins."""

    __slots__ = ("_top", "length", "lines", "special", "status", "until_close")

    def __init__(self) -> None:
        self.status = 0
        self.lines: list[bytes] = []  # headers that pass on, four pieces each
        self.special: dict[bytes, bytes] = {}  # headers that are looked at
        self.length: bytes | None = None  # None: only its framing, or the end, will tell
        self.until_close = False
        self._top = b""

    @property
    def top(self) -> bytes:
        """Its first line, and the headers that pass on."""
        if not self._top:
            self._top = status_line(self.status) + b"".join(self.lines)
        return self._top

    def with_length(self, length: bytes) -> ResponseHead:
        """Return another that differs in its length alone."""
        head = ResponseHead()
        head.status = self.status
        head.lines = self.lines
        head.special = self.special
        head.length = length
        head._top = self.top
        return head

    @property
    def retry_after_s(self) -> float | None:
        """For how long it asks to be left alone."""
        value = self.special.get(b"retry-after")
        return seconds(value.strip()) if value is not None else None


class ResponseParser:
    """The answers of one connection, one at a time."""

    __slots__ = (
        "_in_chunk",
        "_interim",
        "_known",
        "_known_as",
        "_parser",
        "_quiet",
        "_reading",
        "_surplus",
        "between_chunks",
        "ended",
        "head",
        "pieces",
        "reusable",
    )

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._known: KnownHead | None = None
        self._known_as = ResponseHead()
        self.expect()

    def expect(self) -> None:
        """Get ready for the next answer."""
        self.head: ResponseHead | None = None  # set once it is whole
        self.pieces: list[bytes] = []  # of the body; the owner takes them
        self.ended = False
        self.reusable = False  # whether the connection may serve another request, once ended
        self.between_chunks = False  # the bytes fed last ended with a chunk
        self._in_chunk = True
        self._interim = False
        self._surplus = False
        self._quiet = 0  # bytes since anything came of them

    @property
    def untouched(self) -> bool:
        """Whether nothing came of an answer yet."""
        return self.head is None and not self._quiet

    def feed(self, data: bytes) -> None:
        """Take in bytes; raises `ResponseError`, after which nothing more may be fed."""
        fresh = self.head is None and not self._quiet
        if fresh and self._known is not None and self._feed_known(self._known, data):
            return
        self._parse(data)
        if fresh and self.ended and self.reusable:
            self._get_to_know(data)

    def _feed_known(self, known: KnownHead, data: bytes) -> bool:
        """Take in a whole answer with the head that is known; False if these bytes are none."""
        digits = known.digits_in(data)
        size = known.size(digits)
        if not digits or len(data) - size != int(digits):
            return False
        self.head = self._known_as.with_length(digits)
        self.pieces.append(data[size:])
        self.ended = self.reusable = True
        return True

    def _get_to_know(self, data: bytes) -> None:
        """Remember the head of the one answer in these bytes."""
        head, self._known = self.head, None
        if head is not None and head.status == OK and head.length is not None:
            known = get_to_know(data, head.length)
            if known is not None and len(data) - known.size(head.length) == int(head.length):
                self._known, self._known_as = known, head

    def _parse(self, data: bytes) -> None:
        self._quiet += len(data)
        self._in_chunk = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise ResponseError("it switched protocols") from None
        except httptools.HttpParserError as error:
            if not self.ended:
                raise ResponseError(str(error)) from None
            self._surplus = True
        self.between_chunks = not self._in_chunk and data.endswith(b"\r\n")
        if self._quiet > MAX_QUIET:
            raise ResponseError("headers, or framing, without end")
        if self._surplus:
            # Said after its answer: whose would that be?
            self.reusable = False

    def finish(self) -> bool:
        """Take in the end of the connection; tells whether it is a proper end of the answer."""
        if self.head is not None and self.head.until_close:
            self.ended = True
        return self.ended

    def on_message_begin(self) -> None:
        """Start anew, and notice what nobody asked for."""
        self._reading = ResponseHead()
        self._surplus = self.ended

    def on_header(self, name: bytes, value: bytes) -> None:
        """Sort a header; trailers are dropped."""
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
        """Hand the head over, unless it is a 1xx."""
        if self.ended:
            return
        self._quiet = 0
        status = self._parser.get_status_code()
        head = self._reading
        special = head.special
        if status < OK:
            if not FRAMING.isdisjoint(special):
                raise ResponseError("an interim answer with a body")
            self._interim = True
            return
        if self._parser.get_http_version() not in VERSIONS:
            raise ResponseError("it speaks another HTTP")
        head.status = status
        head.length = special.get(b"content-length")
        if head.length is not None and len(head.length) > MAX_DIGITS:
            raise ResponseError(f"its Content-Length has more than {MAX_DIGITS} digits")
        coding = special.get(b"transfer-encoding")
        if coding is not None and coding.strip().lower() != b"chunked":
            raise ResponseError("its Transfer-Encoding is not chunked")
        if head.length is None and coding is None:
            head.until_close = status not in (NO_CONTENT, NOT_MODIFIED)
        if (connection := special.get(b"connection")) is not None:
            named = set(tokens(connection)) - HANDLED_CONNECTION
            if named:
                head.lines = without(head.lines, named)
        self.head = head

    def on_body(self, piece: bytes) -> None:
        """Collect a piece of the body."""
        self._quiet = 0
        if not self.ended:
            self.pieces.append(piece)

    def on_chunk_header(self) -> None:
        """Note that a chunk begins, the last one too."""
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        """Note that it ends; what follows it in the same bytes may be part of the next size."""
        self._in_chunk = False

    def on_message_complete(self) -> None:
        """Note the end, unless it is that of a 1xx."""
        self._quiet = 0
        if self._interim:
            self._interim = False
        elif not self.ended:
            self.ended = True
            self.reusable = self._parser.should_keep_alive()

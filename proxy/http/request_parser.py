"""The parser of requests, on top of llhttp.

Unlike llhttp, it ignores `Upgrade`: Java's client asks for h2c with its first POST.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto

import httptools

from proxy.core.model.refusals import RefusedError
from proxy.http.body_budget import BodyBudget, BodyCharge
from proxy.http.head_cache import HeadPattern, learn_head
from proxy.http.headers import malformed
from proxy.http.request import Request, RequestHead, too_large

MAX_PIECES = 1024  # of a body before they are joined
PIPELINED_REQUEST_BYTES = 1 << 10  # in memory, besides the body
MAX_REQUEST_ID_BYTES = 256  # in the response to a refused head
UNCACHED_HEADERS = frozenset([b"expect", b"transfer-encoding", b"upgrade"])


class ParserState(Enum):
    """The part of a request being read."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class HttpRequestParser:
    """The requests of one connection; `check_head` gets each head."""

    __slots__ = (
        "_blocks", "_body_charge", "_body_left", "_check_head", "_framing", "_head", "_is_last",
        "_matched_body_left", "_matched_head", "_max_body", "_max_head", "_parser", "_pattern",
        "_pieces", "_ready_charge", "_requests_begun", "_unparsed", "ready", "state",
    )  # fmt: skip

    def __init__(
        self,
        check_head: Callable[[RequestHead], None],
        *,
        max_head: int,
        max_body: int,
        body_budget: BodyBudget | None = None,
    ) -> None:
        self.ready: deque[Request] = deque()
        self.state = ParserState.NOTHING
        self._check_head = check_head
        self._max_head = max_head
        self._max_body = max_body
        self._parser = httptools.HttpRequestParser(self)
        self._head = RequestHead()
        self._blocks: list[bytes] = []  # each MAX_PIECES pieces, joined
        self._pieces: list[bytes] = []  # those after `_blocks`
        budget = body_budget or BodyBudget(max_body)
        self._body_charge = BodyCharge(budget)
        self._ready_charge = BodyCharge(budget)
        self._requests_begun = 0  # in the last bytes fed
        self._body_left = 0
        self._unparsed = 0  # bytes since the last parsed part
        self._is_last = False
        self._framing = b""  # set while an upgrade's head is parsed again
        self._pattern: HeadPattern | None = None  # of the last head
        self._matched_head = self._head
        self._matched_body_left = 0

    def limit(self, max_head: int, max_body: int) -> None:
        self._max_head, self._max_body = max_head, max_body
        self._pattern = None  # may exceed the limit

    @property
    def request_id(self) -> bytes:
        """The id of the request being read, if known."""
        if self.state is ParserState.NOTHING:
            return b""
        request_id = self._head.special.get(b"x-request-id", b"")
        return request_id if len(request_id) <= MAX_REQUEST_ID_BYTES else b""

    @property
    def path(self) -> str:
        """The path of the request being read, if known."""
        return "" if self.state is ParserState.NOTHING else self._head.path

    def owes_continue(self) -> bool:
        """Return True, once per request, if the client waits for 100 Continue."""
        awaits = self.state is ParserState.BODY and self._head.awaits_continue
        if awaits:
            self._head.awaits_continue = False
        return awaits

    def feed(self, data: bytes) -> None:
        """Parse bytes; a `RefusedError` is final."""
        pattern = self._pattern if self.state is ParserState.NOTHING else None
        if self._matched_body_left:
            self._feed_body(data)
        elif pattern is not None and (digits := pattern.digits_in(data)):
            self._feed_matching(int(digits), data[pattern.size(digits) :])
        else:
            self._parse(data)

    def _feed_matching(self, length: int, data: bytes) -> None:
        head = self._head = self._matched_head
        if length > self._max_body:
            self.state = ParserState.BODY  # makes `request_id` valid
            raise too_large(self._max_body)
        if len(data) == length:
            self.ready.append(Request(head, data))
            return
        self.state = ParserState.BODY
        self._discard_body()
        self._matched_body_left = length
        self._feed_body(data)

    def _feed_body(self, data: bytes) -> None:
        left = self._matched_body_left - len(data)
        rest = b""
        if left < 0:
            rest = data[self._matched_body_left :]
            data = data[: self._matched_body_left]
        self._add_piece(data)
        self._matched_body_left = max(left, 0)
        if left <= 0:
            self.state = ParserState.NOTHING
            self.ready.append(Request(self._head, self._take_body()))
            if rest:  # pipelined requests
                self._parse(rest)

    def _add_piece(self, piece: bytes) -> None:
        # Pieces are joined, because each costs 40 bytes.
        try:
            self._body_charge.add(len(piece), self._head.tenant)
        except RefusedError:
            self._discard_body()
            raise
        pieces = self._pieces
        pieces.append(piece)
        if len(pieces) == MAX_PIECES:
            self._blocks.append(b"".join(pieces))
            pieces.clear()

    def _take_body(self) -> bytes:
        body = b"".join(self._blocks + self._pieces if self._blocks else self._pieces)
        self._discard_body()
        return body

    def drop(self) -> None:
        """Discard all requests, complete or not."""
        self.ready.clear()
        self._ready_charge.release(self._ready_charge.size)
        self._discard_body()

    def charge_ready(self) -> None:
        """Count `ready` in the budget, or raise `RefusedError`."""
        if (ready := self.ready) and not self._ready_charge.size:
            size = sum(PIPELINED_REQUEST_BYTES + len(request.body) for request in ready)
            head = ready[0].head
            try:
                self._ready_charge.add(size, head.tenant)
            except RefusedError:
                self._head, self.state = head, ParserState.BODY  # makes `request_id` valid
                raise

    def request_taken(self, request: Request) -> None:
        """Subtract a request of `ready`."""
        charge = self._ready_charge
        charge.release(min(PIPELINED_REQUEST_BYTES + len(request.body), charge.size))

    def _discard_body(self) -> None:
        self._body_charge.release(self._body_charge.size)
        self._pieces = []
        if self._blocks:
            self._blocks = []

    def _parse(self, data: bytes) -> None:
        starts = self.state is ParserState.NOTHING
        self._requests_begun = 0
        rest: memoryview | bytes = data
        while rest and not (self._is_last and self.state is ParserState.NOTHING):
            rest = self._parse_some(rest)
        if self._unparsed > self._max_head:
            raise self._head_too_large()
        if starts and self._requests_begun == 1 and self.state is not ParserState.HEAD:
            self._remember_head(data)

    def _parse_some(self, data: memoryview | bytes) -> memoryview | bytes:
        """Parse up to an upgrade; return the bytes after it."""
        self._unparsed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            read = stop.args[0]
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            if not (self._is_last and self.state is ParserState.NOTHING):
                raise malformed(f"malformed HTTP: {error}") from None
            return b""
        else:
            return b""
        # Outside the handler, so that no error gets the upgrade as its context.
        self._ignore_upgrade()
        return memoryview(data)[read:]

    def _remember_head(self, data: bytes) -> None:
        head = self._head
        self._pattern = None
        if head.keep_alive and head.refusal is None and UNCACHED_HEADERS.isdisjoint(head.special):
            self._pattern = learn_head(data, head.special.get(b"content-length", b""))
            self._matched_head = head

    def _head_too_large(self) -> RefusedError:
        message = (
            f"the request head is too large: this server accepts at most {self._max_head} bytes"
        )
        return malformed(message, 431)

    def on_message_begin(self) -> None:
        self._requests_begun += 1
        if not self._framing:
            self._head = RequestHead()
            self.state = ParserState.HEAD

    def on_url(self, url: bytes) -> None:
        if not self._framing:
            self._head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; trailers are dropped."""
        if self.state is ParserState.HEAD:
            self._head.add(name, value)

    def on_headers_complete(self) -> None:
        if self._framing:
            return
        head, parser = self._head, self._parser
        # `_unparsed` does not bound a head that arrives at once.
        if len(head.target) + head.size > self._max_head:
            raise self._head_too_large()
        self._unparsed = 0
        self.state = ParserState.BODY
        self._discard_body()
        self._body_left = self._max_body
        head.keep_alive = parser.should_keep_alive()
        self._is_last = not head.keep_alive
        head.complete(parser.get_method().decode(), parser.get_http_version(), self._max_body)
        self._check_head(head)
        if head.awaits_continue and head.refusal is not None:
            # The client may send the body or the next request.
            raise RefusedError(head.refusal)

    def on_body(self, piece: bytes) -> None:
        self._unparsed = 0
        self._body_left -= len(piece)
        if self._body_left < 0:
            raise too_large(self._max_body)
        if self._head.refusal is None:
            self._add_piece(piece)
        else:
            self._head.lost_body = True

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # llhttp ends here, but the body follows
        self._unparsed = 0
        self._framing = b""
        self.state = ParserState.NOTHING
        self.ready.append(Request(self._head, self._take_body()))

    def _ignore_upgrade(self) -> None:
        """Continue with a new parser that knows only the framing."""
        special = self._head.special
        if self._head.method == "CONNECT":
            raise malformed("CONNECT is not supported: this server is not a tunnel", 405)
        if (length := special.get(b"content-length")) is not None:
            self._framing = b"Content-Length: %d\r\n" % int(length)
        elif b"transfer-encoding" in special:
            self._framing = b"Transfer-Encoding: chunked\r\n"
        else:
            self._framing = b"Content-Length: 0\r\n"
        if self._is_last:
            self._framing += b"Connection: close\r\n"
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + self._framing + b"\r\n")

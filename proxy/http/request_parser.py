"""The parser of requests, on top of llhttp.

Unlike llhttp, it ignores `Upgrade`: Java's client asks for h2c with its first POST.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto

import httptools

from proxy.http.body_budget import BodyBudget
from proxy.http.head_cache import KnownHead, get_to_know
from proxy.http.headers import RefusedError, malformed
from proxy.http.request import Request, RequestHead, too_large

MANY = 1024  # pieces of a body that are joined
AHEAD_BYTES = 1 << 10  # memory of a pipelined request besides its body
LONGEST_ID = 256  # bytes of an id in the response to a refused head
# Heads with these are always parsed.
NEVER_KNOWN = frozenset([b"expect", b"transfer-encoding", b"upgrade"])


class ParserState(Enum):
    """The part of a request being read."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class HttpRequestParser:
    """The requests of one connection; `judge` gets each head."""

    __slots__ = (
        "_begun",
        "_blocks",
        "_body_left",
        "_collecting",
        "_framing",
        "_head",
        "_held",
        "_judge",
        "_known",
        "_known_as",
        "_last",
        "_max_body",
        "_max_head",
        "_missing",
        "_parser",
        "_pieces",
        "_quiet",
        "_waiting",
        "_waiting_of",
        "_whose",
        "ready",
        "state",
    )

    def __init__(
        self,
        judge: Callable[[RequestHead], None],
        *,
        max_head: int,
        max_body: int,
        collecting: BodyBudget | None = None,
    ) -> None:
        self.ready: deque[Request] = deque()
        self.state = ParserState.NOTHING
        self._judge = judge
        self._max_head = max_head
        self._max_body = max_body
        self._parser = httptools.HttpRequestParser(self)
        self._head = RequestHead()
        self._blocks: list[bytes] = []  # of MANY pieces each
        self._pieces: list[bytes] = []  # those after `_blocks`
        self._held = 0  # bytes in both
        self._collecting = collecting or BodyBudget(max_body)
        self._whose: str | None = None  # account of `_held`
        self._waiting = 0  # counted bytes of `ready`
        self._waiting_of: str | None = None
        self._begun = 0  # requests begun in the last bytes
        self._body_left = 0
        self._quiet = 0  # bytes of a head or framing
        self._last = False  # no request follows this one
        self._framing = b""  # set while an upgrade's head is parsed again
        self._known: KnownHead | None = None
        self._known_as = self._head
        self._missing = 0  # bytes of a known head's body

    def limit(self, max_head: int, max_body: int) -> None:
        """Set new limits."""
        self._max_head, self._max_body = max_head, max_body
        self._known = None  # may exceed the limit

    @property
    def request_id(self) -> bytes:
        """The id of the request being read, if known."""
        if self.state is ParserState.NOTHING:
            return b""
        said = self._head.special.get(b"x-request-id", b"")
        return said if len(said) <= LONGEST_ID else b""

    @property
    def path(self) -> str:
        """The path of the request being read, if known."""
        return "" if self.state is ParserState.NOTHING else self._head.path

    def owes_continue(self) -> bool:
        """Return True, once per request, if the client waits for 100 Continue."""
        owes = self.state is ParserState.BODY and self._head.awaits_continue
        if owes:
            self._head.awaits_continue = False
        return owes

    def feed(self, data: bytes) -> None:
        """Parse bytes; a `RefusedError` is final."""
        if self._missing:
            self._feed_body(data)
        elif self.state is ParserState.NOTHING and self._known is not None:
            known = self._known
            if digits := known.digits_in(data):
                self._feed_known(int(digits), data[known.size(digits) :])
            else:
                self._parse(data)
        else:
            self._parse(data)

    def _feed_known(self, length: int, data: bytes) -> None:
        head = self._head = self._known_as
        if length > self._max_body:
            self.state = ParserState.BODY  # for `request_id`
            raise too_large(self._max_body)
        if len(data) == length:
            self.ready.append(Request(head, data))
            return
        self.state = ParserState.BODY
        self._forget()
        self._missing = length
        self._feed_body(data)

    def _feed_body(self, data: bytes) -> None:
        left = self._missing - len(data)
        rest = b""
        if left < 0:
            rest = data[self._missing :]
            data = data[: self._missing]
        self._keep(data)
        self._missing = max(left, 0)
        if left <= 0:
            self.state = ParserState.NOTHING
            self.ready.append(Request(self._head, self._whole()))
            if rest:  # pipelined requests
                self._parse(rest)

    def _keep(self, piece: bytes) -> None:
        # Pieces are joined, because each costs 40 bytes.
        if not self._held:
            self._whose = self._collecting.account(self._head.tenant)
        try:
            self._collecting.take(len(piece), self._whose, self._held)
        except RefusedError:
            self._forget()
            raise
        self._held += len(piece)
        pieces = self._pieces
        pieces.append(piece)
        if len(pieces) == MANY:
            self._blocks.append(b"".join(pieces))
            pieces.clear()

    def _whole(self) -> bytes:
        body = b"".join(self._blocks + self._pieces if self._blocks else self._pieces)
        self._forget()
        return body

    def drop(self) -> None:
        """Discard all requests, complete or not."""
        self.ready.clear()
        self._lighter(self._waiting)
        self._forget()

    def wait(self) -> None:
        """Count `ready` in the budget, or raise `RefusedError`."""
        if (ready := self.ready) and not self._waiting:
            size = sum(AHEAD_BYTES + len(request.body) for request in ready)
            head = ready[0].head
            whose = self._collecting.account(head.tenant)
            try:
                self._collecting.take(size, whose)
            except RefusedError:
                self._head, self.state = head, ParserState.BODY  # for `request_id`
                raise
            self._waiting, self._waiting_of = size, whose

    def waits_no_more(self, request: Request) -> None:
        """Subtract a request of `ready`."""
        self._lighter(min(AHEAD_BYTES + len(request.body), self._waiting))

    def _lighter(self, size: int) -> None:
        self._collecting.give(size, self._waiting_of)
        self._waiting -= size

    def _forget(self) -> None:
        self._collecting.give(self._held, self._whose)
        self._held = 0
        self._pieces = []
        if self._blocks:
            self._blocks = []

    def _parse(self, data: bytes) -> None:
        starts = self.state is ParserState.NOTHING
        self._begun = 0
        rest: memoryview | bytes = data
        while rest and not (self._last and self.state is ParserState.NOTHING):
            rest = self._parse_some(rest)
        if self._quiet > self._max_head:
            raise malformed(f"more than {self._max_head} bytes of header", 431)
        if starts and self._begun == 1 and self.state is not ParserState.HEAD:
            self._get_to_know(data)

    def _parse_some(self, data: memoryview | bytes) -> memoryview | bytes:
        """Return the bytes after an upgrade."""
        self._quiet += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            read = stop.args[0]
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            if not (self._last and self.state is ParserState.NOTHING):
                raise malformed(f"malformed HTTP: {error}") from None
            return b""
        else:
            return b""
        # Outside the handler, so that no error gets the upgrade as its context.
        self._ignore_upgrade()
        return memoryview(data)[read:]

    def _get_to_know(self, data: bytes) -> None:
        head = self._head
        self._known = None
        if head.keep_alive and head.refusal is None and NEVER_KNOWN.isdisjoint(head.special):
            self._known = get_to_know(data, head.special.get(b"content-length", b""))
            self._known_as = head

    def on_message_begin(self) -> None:
        """Start a new head."""
        self._begun += 1
        if not self._framing:
            self._head = RequestHead()
            self.state = ParserState.HEAD

    def on_url(self, url: bytes) -> None:
        """Append a piece of the target."""
        if not self._framing:
            self._head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; trailers are dropped."""
        if self.state is ParserState.HEAD:
            self._head.add(name, value)

    def on_headers_complete(self) -> None:
        """Check the head and prepare for the body."""
        if self._framing:
            return
        head, parser = self._head, self._parser
        # `_quiet` does not bound a head that arrives at once.
        if len(head.target) + head.size > self._max_head:
            raise malformed(f"more than {self._max_head} bytes of header", 431)
        self._quiet = 0
        self.state = ParserState.BODY
        self._forget()
        self._body_left = self._max_body
        head.keep_alive = parser.should_keep_alive()
        self._last = not head.keep_alive
        head.complete(parser.get_method().decode(), parser.get_http_version(), self._max_body)
        self._judge(head)
        if head.awaits_continue and head.refusal is not None:
            # The client may send the body or the next request.
            raise RefusedError(head.refusal)

    def on_body(self, piece: bytes) -> None:
        """Append a piece of the body."""
        self._quiet = 0
        self._body_left -= len(piece)
        if self._body_left < 0:
            raise too_large(self._max_body)
        if self._head.refusal is None:
            self._keep(piece)
        else:
            self._head.lost_body = True

    def on_message_complete(self) -> None:
        """Append the request to `ready`."""
        if self._parser.should_upgrade():
            return  # llhttp ends here, but the body follows
        self._quiet = 0
        self._framing = b""
        self.state = ParserState.NOTHING
        self.ready.append(Request(self._head, self._whole()))

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
        if self._last:
            self._framing += b"Connection: close\r\n"
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + self._framing + b"\r\n")

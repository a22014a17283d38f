"""A worker's answer on its way to the client: the head rewritten, the body framed anew.

Nothing is written before the body's first byte is there: until then another worker can still be
asked, and a stream's head comes long before its first token.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from proxy.core.model.route_table import route_names
from proxy.http.headers import EVENT_STREAM, JSON, LAST_CHUNK
from proxy.http.local_responses import decision_header
from proxy.http.response_parser import NO_CONTENT, NOT_MODIFIED, OK
from proxy.http.sse import TAIL, USAGE, EventStream, recounted, usage_in, without_usage

if TYPE_CHECKING:
    from proxy.core.fleet.leases import Decision
    from proxy.core.model.types import Usage
    from proxy.http.request import Request
    from proxy.http.response_parser import ResponseHead

LENGTH = re.compile(rb"\r\nContent-Length: \d+\r\n")
RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,200})"')
RESPONSE_ID_BYTES = 8192
MOST_HELD = 1 << 20
ENDS_WITH_DONE = route_names(lambda route: route.ends_with_done)


class ResponseWriter:
    """The answer to one request."""

    __slots__ = (
        "_cached",
        "_chunked",
        "_head",
        "_held",
        "_hides",
        "_stream",
        "_tail",
        "_until_close",
        "has_begun",
        "keep_alive",
        "status",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        head: ResponseHead,
        decision: Decision | None,
        *,
        keep_alive: bool,
        cached_tokens: int | None = None,
        hides_usage: bool = False,
    ) -> None:
        self.status = head.status
        self.keep_alive = keep_alive
        self.has_begun = False  # the client has part of it
        self.tokens = 0  # carried by what `take` returned last
        self._stream: EventStream | None = None
        self._tail: bytes | None = None  # of a JSON body, where usage will be
        self._chunked = False
        self._until_close = head.until_close
        self._cached = cached_tokens  # to be told in place of what the worker says
        self._hides = hides_usage  # whether a stream's usage was not asked for by the client
        self._held = b""
        self._head = self._compose(request, head, decision)
        kind = head.special.get(b"content-type", b"")
        if self.status == OK and b"content-encoding" not in head.special:
            if kind.startswith(EVENT_STREAM) and head.length is None:
                self._stream = EventStream()
            elif kind.startswith(JSON):
                self._tail = b""

    def take(self, body: bytes, ended: bool) -> bytes:
        """Take in a piece of body; returns what the client is to be sent, perhaps nothing yet."""
        stream = self._stream
        if stream is not None:
            body = stream.feed(body)
            self.tokens = stream.tokens
            if ended:
                body += stream.rest()
            if self._cached is not None:
                body = recounted(body, self._cached)
            if self._hides and USAGE in body:
                body = without_usage(body)
        elif self._cached is not None and self._tail is not None:
            body = self._whole(body, self._cached, ended)
        elif self._tail is not None:
            self._tail = (self._tail + body)[-TAIL:]
        if not self._chunked:
            data = body
        elif body:
            data = b"%x\r\n%b\r\n" % (len(body), body)
            if ended:
                data += LAST_CHUNK
        else:
            data = LAST_CHUNK if ended else b""
        if not self.has_begun and (data or ended):
            self.has_begun = True
            return self._head + data
        return data

    def _whole(self, body: bytes, cached: int, ended: bool) -> bytes:
        """Hold a JSON body back until its usage is there."""
        self._held += body
        if not ended and len(self._held) <= MOST_HELD:
            return b""
        body, self._held = self._held, b""
        if ended:
            told = recounted(body, cached)
            if len(told) != len(body):  # of an answer whose length is told, in a head not yet sent
                length = b"\r\nContent-Length: %d\r\n" % len(told)
                self._head = LENGTH.sub(length, self._head, 1)
            body = told
        else:
            self._cached = None  # an answer this long: its count has to do
        self._tail = body[-TAIL:]
        return body

    def is_cut(self, route: str, body: bytes) -> bool:
        """Whether a stream ends without its last word, where nothing else tells its end.

        Its end is that of the connection then, and so is the death of its worker. `body`: its last
        piece, not taken yet.
        """
        stream = self._stream
        if stream is None or not self._until_close or route not in ENDS_WITH_DONE:
            return False
        return not stream.says_done(body)

    @property
    def flowing(self) -> EventStream | None:
        """The stream, while whole chunks of it are what the client is to be sent, as they come."""
        stream = self._stream
        return stream if stream is not None and self._chunked and stream.flows else None

    @property
    def recounts(self) -> bool:
        """Whether its usage is not to pass as it is."""
        return self._cached is not None or self._hides

    @property
    def is_whole(self) -> bool:
        """Whether the client has the last event of a stream, whatever ends the connection."""
        return self._stream is not None and self._stream.is_whole

    @property
    def end(self) -> bytes:
        """The framing that ends a body after whole events."""
        return LAST_CHUNK if self._chunked else b""

    def last_words(self, message: str, code: str) -> bytes | None:
        """Write the end of an answer that fails midway; None if it can only be broken off."""
        stream = self._stream
        if stream is None or stream.torn:
            return None
        event = stream.error_event(message, code)
        return b"%x\r\n%b\r\n%b" % (len(event), event, self.end) if self._chunked else event

    def usage(self) -> Usage | None:
        """Return what the worker says it computed."""
        if self._stream is not None:
            return self._stream.usage()
        return usage_in(self._tail) if self._tail else None

    def _compose(self, request: Request, head: ResponseHead, decision: Decision | None) -> bytes:
        pieces = [head.top, b"X-Request-Id: ", request.id, b"\r\n"]
        if decision is not None and request.head.explain:
            route = decision_header(decision)
            pieces += (b"X-Route: ", route, b"\r\n")
        if head.status == NO_CONTENT:
            pass  # RFC 9110, 8.6: it must have no Content-Length
        elif head.length is not None:
            pieces += (b"Content-Length: ", head.length, b"\r\n")
        elif head.status != NOT_MODIFIED:
            if request.head.http_1_0:
                self.keep_alive = False
            else:
                self._chunked = True
                pieces.append(b"Transfer-Encoding: chunked\r\n")
        if not self.keep_alive:
            pieces.append(b"Connection: close\r\n")
        elif request.head.http_1_0:
            pieces.append(b"Connection: keep-alive\r\n")
        pieces.append(b"\r\n")
        return b"".join(pieces)


def response_id_in(data: bytes) -> str | None:
    """Read the id of a stored response from an answer's first bytes."""
    found = RESPONSE_ID.search(data, 0, RESPONSE_ID_BYTES)
    return found[1].decode("latin-1") if found else None


def usage_of(head: ResponseHead, body: bytes) -> Usage | None:
    """Read what a whole answer says was computed, if that can be read."""
    special = head.special
    if b"content-encoding" in special or not special.get(b"content-type", b"").startswith(JSON):
        return None
    return usage_in(body)

"""A worker's response with a new head and new framing.

Nothing is written before the first byte of the body, so that a retry stays possible.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from proxy.core.fleet.leases import Decision
from proxy.core.model.route_table import route_names
from proxy.core.model.types import RequestInfo, Usage
from proxy.http.headers import EVENT_STREAM, JSON, LAST_CHUNK
from proxy.http.local_responses import decision_header
from proxy.http.request import Request
from proxy.http.response_parser import NO_CONTENT, NOT_MODIFIED, OK, ResponseHead
from proxy.http.sent_text import SentText
from proxy.http.sse import (
    TAIL,
    USAGE,
    EventStream,
    move_to_output,
    remove_usage,
    replace_cached_tokens,
    usage_in,
    usage_with_output,
)
from proxy.wire.handover.first_token import find_result

CONTENT_LENGTH = re.compile(rb"\r\nContent-Length: \d+\r\n")
RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,200})"')
RESPONSE_ID_BYTES = 8192
MAX_HELD_BYTES = 1 << 20
ENDS_WITH_DONE = route_names(lambda route: route.ends_with_done)


class BodyEdits(NamedTuple):
    """What the client's body shows other than the worker's."""

    cached_tokens: int | None = None  # replaces the worker's count
    hides_usage: bool = False  # the client asked for none
    holds_opening: bool = False  # until the first output, so that a stream can be retried


NO_EDITS = BodyEdits()


class ResponseWriter:
    __slots__ = (
        "_cached_tokens", "_chunked", "_head", "_held", "_hides_usage", "_stream", "_tail",
        "_until_close", "has_begun", "holds_opening", "keep_alive", "output_in_prompt", "status",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        head: ResponseHead,
        decision: Decision | None,
        *,
        keep_alive: bool,
        edits: BodyEdits = NO_EDITS,
    ) -> None:
        self.status = head.status
        self.keep_alive = keep_alive
        self.has_begun = False
        self.tokens = 0  # in the last result of `feed`
        self.output_in_prompt = 0  # tokens of the output that the worker counts as prompt
        self._stream: EventStream | None = None
        self._tail: bytes | None = None  # of a JSON body, with the usage
        self._chunked = False
        self._until_close = head.until_close
        self._cached_tokens = edits.cached_tokens
        self._hides_usage = edits.hides_usage
        self.holds_opening = False
        self._held = b""
        self._head = self._compose(request, head, decision)
        kind = head.special.get(b"content-type", b"")
        if self.status == OK and b"content-encoding" not in head.special:
            if kind.startswith(EVENT_STREAM) and head.length is None:
                self._stream = EventStream()
                self.holds_opening = edits.holds_opening
            elif kind.startswith(JSON):
                self._tail = b""

    def feed(self, body: bytes, ended: bool) -> bytes:
        """Return the bytes to send; may be empty."""
        stream = self._stream
        if stream is not None:
            body = stream.feed(body)
            self.tokens = stream.tokens
            if ended:
                body += stream.rest()
            if self.holds_opening:
                body = self._hold_opening(body, ended)
            if self._cached_tokens is not None:
                body = replace_cached_tokens(body, self._cached_tokens)
            if self.output_in_prompt:
                body = move_to_output(body, self.output_in_prompt)
            if self._hides_usage and USAGE in body:
                body = remove_usage(body)
        elif self._cached_tokens is not None and self._tail is not None:
            body = self._hold_json(body, self._cached_tokens, ended)
        elif self._tail is not None:
            self._tail = (self._tail + body)[-TAIL:]
        data = _in_chunks(body, ended=ended) if self._chunked else body
        if not self.has_begun and (data or ended):
            self.has_begun = True
            return self._head + data
        return data

    def _hold_opening(self, body: bytes, ended: bool) -> bytes:
        body = self._held + body
        self.holds_opening = not ended and len(body) <= MAX_HELD_BYTES and find_result(body) < 0
        self._held = body if self.holds_opening else b""
        return b"" if self.holds_opening else body

    def _hold_json(self, body: bytes, cached: int, ended: bool) -> bytes:
        """Hold back a JSON body to correct its usage."""
        self._held += body
        if not ended and len(self._held) <= MAX_HELD_BYTES:
            return b""
        body, self._held = self._held, b""
        if ended:
            recounted_body = replace_cached_tokens(body, cached)
            if len(recounted_body) != len(body):  # correct Content-Length in the unsent head
                length = b"\r\nContent-Length: %d\r\n" % len(recounted_body)
                self._head = CONTENT_LENGTH.sub(length, self._head, 1)
            body = recounted_body
        else:
            self._cached_tokens = None  # too long
        self._tail = body[-TAIL:]
        return body

    def is_truncated(self, route: str, body: bytes) -> bool:
        """Return True if an unframed stream lacks its last event; `body` is its last piece."""
        stream = self._stream
        if stream is None or not self._until_close:
            return False
        if route in ENDS_WITH_DONE:
            return not stream.has_done(body)
        return stream.lacks_typed_end

    @property
    def unchanged_stream(self) -> EventStream | None:
        """The stream, while its chunks can pass unchanged."""
        stream = self._stream
        return stream if stream is not None and self._chunked and stream.can_bypass_feed else None

    def collect_text(self, *, keeps_content: bool) -> SentText | None:
        """Count the text of a stream from now on; None if the response is none."""
        stream = self._stream
        if stream is None or not self._chunked:
            return None
        return stream.collect_text(keeps_content=keeps_content)

    @property
    def ends_inside_event(self) -> bool:
        """True if half an event was sent."""
        return self._stream is None or self._stream.torn

    @property
    def partial_event(self) -> bytes:
        """The beginning of an event that is not complete."""
        return self._stream.rest() if self._stream is not None else b""

    def drop_partial_event(self) -> None:
        if self._stream is not None:
            self._stream.drop_partial_event()

    @property
    def changes_usage(self) -> bool:
        return self._cached_tokens is not None or self._hides_usage or self.output_in_prompt > 0

    @property
    def is_complete(self) -> bool:
        """True if the client has the last event of a stream."""
        return self._stream is not None and self._stream.is_complete

    def missing_end(self, info: RequestInfo | None) -> bytes | None:
        """Return the bytes that end a stream if the client lacks only these; else None."""
        if self._stream is None:
            return None
        # Of several samples each has a finish reason, and the first ones are no longer kept.
        if info is None or info.samples > 1 or not info.generates:
            return self._last_chunk(b"") if self._stream.is_complete else None
        event = self._stream.missing_end(needs_usage=info.asks_usage)
        return None if event is None else self._last_chunk(event)

    def _last_chunk(self, event: bytes) -> bytes:
        return _in_chunks(event, ended=True) if self._chunked else event

    def final_error_event(self, message: str, code: str) -> bytes | None:
        """Return an error event that ends a failed stream; None if not possible."""
        stream = self._stream
        if stream is None or stream.torn:
            return None
        return self._last_chunk(stream.error_event(message, code))

    def usage(self) -> Usage | None:
        if self._stream is not None:
            usage = self._stream.usage()
            if usage is None or not self.output_in_prompt:
                return usage
            return usage_with_output(usage, self.output_in_prompt)
        return usage_in(self._tail) if self._tail else None

    def _compose(self, request: Request, head: ResponseHead, decision: Decision | None) -> bytes:
        pieces = [head.top, b"X-Request-Id: ", request.id, b"\r\n"]
        if decision is not None and request.head.explain:
            route = decision_header(decision)
            pieces += (b"X-Route: ", route, b"\r\n")
        if head.status == NO_CONTENT:
            pass  # RFC 9110, 8.6 forbids Content-Length
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


def _in_chunks(body: bytes, *, ended: bool) -> bytes:
    data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return data + LAST_CHUNK if ended else data


def response_id_in(data: bytes) -> str | None:
    match = RESPONSE_ID.search(data, 0, RESPONSE_ID_BYTES)
    return match[1].decode("latin-1") if match else None


def usage_of(head: ResponseHead, body: bytes) -> Usage | None:
    """Return the usage in a whole response, if readable."""
    special = head.special
    if b"content-encoding" in special or not special.get(b"content-type", b"").startswith(JSON):
        return None
    return usage_in(body)

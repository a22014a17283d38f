"""Whether our readers take bytes as the reference does, however they are cut.

The rule: what we take must be, to the reference, the same messages with the same ends; what is sent
on of a request must be one request to whoever reads it, and the same one. What we refuse ends its
connection, so that it does not matter how others would read it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Refusal
from proxy.core.request.routes import find
from proxy.http.headers import REQUEST_HEADERS, RESPONSE_HEADERS, RefusedError
from proxy.http.request import Request, RequestHead
from proxy.http.request_parser import HttpRequestParser, ParserState
from proxy.http.response_parser import ResponseError, ResponseParser
from proxy.wire.settings import WireSettings
from proxy.wire.worker.pool import ConnectionPool
from proxy.wire.worker.request_bytes import to_worker
from proxy.wire.write_batch import WriteBatch
from tests.fuzz import reference
from tests.fuzz.reference import Message, RejectedError

MAX_HEAD, MAX_BODY = 1 << 16, 1 << 20
ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
TRAILING = re.compile(rb"[ \t]+\r\n")
POOL = ConnectionPool(
    WorkerSpec("w", "http://worker:1", Role.GENERAL, "tiny"),
    WireSettings(),
    lambda: 0.0,
    WriteBatch(),
)


class DifferError(AssertionError):
    """We and the reference read it differently."""


@dataclass
class Tally:
    """What came of many streams."""

    streams: int = 0
    messages: int = 0  # as they were made
    taken: int = 0
    refused: int = 0
    waiting: int = 0
    why: dict[str, int] = field(default_factory=dict)  # the refusals, by their words

    def refuses(self, message: str) -> None:
        """Count a refusal."""
        self.refused += 1
        self.why[message] = self.why.get(message, 0) + 1


def judged(head: RequestHead) -> None:
    """Judge a head as the router does."""
    found = find(head.method, head.path)
    if isinstance(found, Refusal):
        head.refusal = found
    else:
        head.route = found


def read(pieces: list[bytes]) -> tuple[list[Request], ParserState, str | None]:
    """Read pieces of a stream; say what came, in the middle of what it ends, why it was refused."""
    reader = HttpRequestParser(judged, max_head=MAX_HEAD, max_body=MAX_BODY)
    why = None
    try:
        for piece in pieces:
            reader.feed(piece)
    except RefusedError as error:
        status, why = error.refusal.status, error.refusal.message
        if not 400 <= status < 600:
            raise DifferError(f"refused with {status}") from None
    return list(reader.ready), reader.state, why


def shown(requests: list[Request]) -> list[tuple[Any, ...]]:
    """Say all that matters of requests."""
    return [
        (r.head.start, r.head.lines, r.head.authorization, r.id, r.head.keep_alive, r.body)
        for r in requests
    ]


def requests(made: list[bytes], pieces: list[bytes], tally: Tally) -> None:
    """Compare what is read of requests, whole and in pieces, with what the reference reads."""
    data = b"".join(made)
    got, state, why = read([data])
    cut, cut_state, cut_why = read(pieces)
    again, again_state, again_why = read(made)  # each in a piece of its own: heads get known
    for other, other_state, other_why in (
        (cut, cut_state, cut_why),
        (again, again_state, again_why),
    ):
        if shown(other) != shown(got) or (other_why is None) != (why is None):
            raise DifferError(f"cut otherwise it is {shown(other)} {other_why}, not {shown(got)}")
        if why is None and other_state is not state:
            raise DifferError(f"cut otherwise it ends in {other_state}, not {state}")
    at = 0
    for request in got:
        at += _same(request, data[at:])
        _forwarded(request)
        if not request.head.keep_alive:
            break
    else:
        if why is None:
            _nothing_more(data[at:], state)
    tally.streams += 1
    tally.messages += len(made)
    tally.taken += len(got)
    if why is not None:
        tally.refuses(why)
    elif state is not ParserState.NOTHING:
        tally.waiting += 1


def _same(request: Request, data: bytes) -> int:
    """Compare one request; return how many bytes it took."""
    try:
        other = reference.request(data)
    except RejectedError as error:
        raise DifferError(f"taken, but {error}: {data!r}") from None
    if other is None:
        raise DifferError(f"taken, but not whole: {data!r}")
    head = request.head
    target = b" ".join(head.start.split(b" ")[1:-2])
    body = request.body if head.refusal is None else other.body  # which is not kept
    ours = (head.method.encode(), target, body)
    theirs = (other.start[0], origin_form(*other.start), other.body)
    if ours != theirs:
        raise DifferError(f"{ours} is {theirs} to the reference: {data!r}")
    if head.keep_alive and not other.stays and other.version != b"1.0":
        raise DifferError(f"the reference ends the connection after {data!r}")
    expected = passing(other, REQUEST_HEADERS, b"connection")
    if trimmed(head.lines) != expected:
        raise DifferError(f"headers {head.lines!r}, not {expected!r}")
    return other.size


def origin_form(method: bytes, target: bytes) -> bytes:
    """Say what a target is to a server that is no proxy."""
    if target.startswith(b"/") or target == b"*" or method == b"CONNECT":
        return target
    found = ABSOLUTE.match(target)
    if found is None:
        raise DifferError(f"taken, but {target!r} is no target")
    path = target[found.end() :].partition(b"#")[0]
    path, mark, query = path.partition(b"?")
    return (path or b"/") + (mark + query if query else b"")


def passing(message: Message, known: dict[bytes, bool], hop: bytes) -> bytes:
    """Write the headers that pass on, names in the spelling that came."""
    named = {hop}
    for name, value in message.headers:
        if name == hop:
            named |= {each.strip(b" \t").lower() for each in value.split(b",")}
    named -= {b"close", b"keep-alive", b"upgrade"} - {hop}
    lines = [
        b"%b: %b\r\n" % (name, value)
        for name, value in message.headers.raw_items()
        if known.get(name.lower()) is not False and name.lower() not in named
    ]
    return trimmed(b"".join(lines))


def trimmed(lines: bytes) -> bytes:
    """Leave out white space before the end of each line; it is no part of a value."""
    return TRAILING.sub(b"\r\n", lines)


def forwarded(request: Request) -> bytes:
    """Write what a worker would be sent."""
    return b"".join(to_worker(request, POOL, request.body, request.id or b"id"))


def _forwarded(request: Request) -> None:
    """Read what a worker would be sent: one request, the same, and nothing after it."""
    if request.head.route is None:
        return
    sent = forwarded(request)
    try:
        other = reference.request(sent)
    except RejectedError as error:
        raise DifferError(f"sent on, but {error}: {sent!r}") from None
    if other is None or other.size != len(sent) or not other.stays:
        raise DifferError(f"sent on, but not one request: {sent!r}")
    if other.body != request.body or other.start[0] != request.head.method.encode():
        raise DifferError(f"sent on as another: {sent!r}")
    _, state, why = read([sent])
    if why is not None or state is not ParserState.NOTHING:
        raise DifferError(f"sent on, but we would not take it ourselves ({why}): {sent!r}")


def _nothing_more(rest: bytes, state: ParserState) -> None:
    """See that the reference waits where we wait."""
    try:
        other = reference.request(rest)
    except RejectedError:
        if state is ParserState.NOTHING and rest.strip(b"\r\n"):
            raise DifferError(f"passed over: {rest!r}") from None
        return
    if other is not None and other.start[0] != b"PRI":  # HTTP/2's, of which llhttp wants more
        raise DifferError(f"not taken yet ({state}), but whole to the reference: {rest!r}")


def answers(made: list[bytes], pieces: list[bytes], tally: Tally) -> None:
    """Compare what is read of a worker's answers, one after the other, with the reference."""
    reader, fresh = ResponseParser(), ResponseParser()
    tally.streams += 1
    tally.messages += len(made)
    for data in made:
        reader.expect()
        got, head, why = answered(reader, [data])
        fresh = ResponseParser()
        again = answered(fresh, pieces if made == [data] else [data[:9], data[9:]])
        if (got, why is None) != (again[0], again[2] is None):
            raise DifferError(f"cut otherwise it is {again}, not {got} {why}")
        if why is not None:
            tally.refuses(why)
            return
        if head is None or not reader.ended:
            tally.waiting += 1
            _compare_answer(reader, data, tally)
            return
        _compare_answer(reader, data, tally)
        if not reader.reusable:
            return


def answered(reader: ResponseParser, pieces: list[bytes]) -> tuple[Any, Any, str | None]:
    """Read pieces of an answer; return what is known of it, its head, and why it was refused."""
    try:
        for piece in pieces:
            reader.feed(piece)
    except ResponseError as error:
        return None, None, str(error)
    head = reader.head
    shown = None if head is None else (head.status, b"".join(head.lines), head.length)
    body = b"".join(reader.pieces)
    return (shown, body, reader.ended, reader.reusable), head, None


def _compare_answer(reader: ResponseParser, data: bytes, tally: Tally) -> None:
    head = reader.head
    ended = reader.ended or reader.finish()
    if not ended or head is None:
        return
    tally.taken += 1
    try:
        other = reference.answer(data, ended=head.until_close)
    except RejectedError as error:
        raise DifferError(f"taken, but {error}: {data!r}") from None
    if other is None:
        raise DifferError(f"taken, but not whole: {data!r}")
    body = b"".join(reader.pieces)
    if (b"%d" % head.status, body) != (other.start[0], other.body):
        raise DifferError(f"{head.status} {body!r} is {other} to the reference: {data!r}")
    # llhttp heeds Proxy-Connection too, which makes HTTP/1.0 stay; h11 never lets that.
    closes = not other.stays and other.version != b"1.0"
    if reader.reusable and (closes or data[other.size :].strip(b"\r\n")):
        raise DifferError(f"kept, though bytes are left or it closes: {data!r}")
    expected = passing(other, RESPONSE_HEADERS, b"connection")
    if trimmed(b"".join(head.lines)) != expected:
        raise DifferError(f"headers {head.lines!r}, not {expected!r}")

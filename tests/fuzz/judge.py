"""Compare the router's parsers with the reference parser, for any cuts.

Messages that the router accepts must be the same messages, with the same ends, to the reference.
The bytes sent on must be the same single request. A refused message ends its connection, so that
other readings of it do not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from proxy.core.model.refusals import RefusedError
from proxy.core.model.role import Role
from proxy.core.model.specs import WorkerSpec
from proxy.core.model.types import Refusal
from proxy.core.request.route_lookup import find
from proxy.http.headers import REQUEST_HEADERS, RESPONSE_HEADERS
from proxy.http.request import Request, RequestHead
from proxy.http.request_parser import HttpRequestParser, ParserState
from proxy.http.response_parser import ResponseError, ResponseParser
from proxy.wire.settings import WireSettings
from proxy.wire.worker.connection import ConnectionPool
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


class DifferenceError(AssertionError):
    """The router and the reference read bytes differently."""


@dataclass
class Tally:
    """The results of many streams."""

    streams: int = 0
    messages: int = 0  # generated
    taken: int = 0
    refused: int = 0
    waiting: int = 0
    refusals: dict[str, int] = field(default_factory=dict)  # refusals by message

    def refuse(self, message: str) -> None:
        self.refused += 1
        self.refusals[message] = self.refusals.get(message, 0) + 1


def set_route(head: RequestHead) -> None:
    """Set a head's route or refusal as the router does."""
    found = find(head.method, head.path)
    if isinstance(found, Refusal):
        head.refusal = found
    else:
        head.route = found


def read(pieces: list[bytes]) -> tuple[list[Request], ParserState, str | None]:
    """Parse pieces of a stream; return the requests, the parser's state and the refusal."""
    parser = HttpRequestParser(set_route, max_head=MAX_HEAD, max_body=MAX_BODY)
    refusal = None
    try:
        for piece in pieces:
            parser.feed(piece)
    except RefusedError as error:
        status, refusal = error.refusal.status, error.refusal.message
        if not 400 <= status < 600:
            raise DifferenceError(f"refused with {status}") from None
    return list(parser.ready), parser.state, refusal


def fields_of(requests: list[Request]) -> list[tuple[Any, ...]]:
    """Return the parts of requests that are compared."""
    return [
        (r.head.start, r.head.lines, r.head.authorization, r.id, r.head.keep_alive, r.body)
        for r in requests
    ]


def requests(messages: list[bytes], pieces: list[bytes], tally: Tally) -> None:
    """Compare requests parsed whole and in pieces with the reference's."""
    data = b"".join(messages)
    got, state, refusal = read([data])
    cut, cut_state, cut_why = read(pieces)
    again, again_state, again_why = read(messages)  # one piece each: heads get cached
    for other, other_state, other_why in (
        (cut, cut_state, cut_why),
        (again, again_state, again_why),
    ):
        if fields_of(other) != fields_of(got) or (other_why is None) != (refusal is None):
            raise DifferenceError(
                f"cut differently: {fields_of(other)} {other_why}, not {fields_of(got)}"
            )
        if refusal is None and other_state is not state:
            raise DifferenceError(f"cut differently it ends in {other_state}, not {state}")
    at = 0
    for request in got:
        at += compare_request(request, data[at:])
        check_forwarded(request)
        if not request.head.keep_alive:
            break
    else:
        if refusal is None:
            check_rest(data[at:], state)
    tally.streams += 1
    tally.messages += len(messages)
    tally.taken += len(got)
    if refusal is not None:
        tally.refuse(refusal)
    elif state is not ParserState.NOTHING:
        tally.waiting += 1


def compare_request(request: Request, data: bytes) -> int:
    """Compare one request; return how many bytes it took."""
    try:
        other = reference.request(data)
    except RejectedError as error:
        raise DifferenceError(f"taken, but {error}: {data!r}") from None
    if other is None:
        raise DifferenceError(f"taken, but not whole: {data!r}")
    head = request.head
    target = b" ".join(head.start.split(b" ")[1:-2])
    body = request.body if head.refusal is None else other.body  # a refused body is not kept
    parsed = (head.method.encode(), target, body)
    expected_parts = (other.start[0], origin_form(*other.start), other.body)
    if parsed != expected_parts:
        raise DifferenceError(f"{parsed} is {expected_parts} to the reference: {data!r}")
    if head.keep_alive and not other.keep_alive and other.version != b"1.0":
        raise DifferenceError(f"the reference ends the connection after {data!r}")
    expected = forwarded_headers(other, REQUEST_HEADERS, b"connection")
    if trim_lines(head.lines) != expected:
        raise DifferenceError(f"headers {head.lines!r}, not {expected!r}")
    return other.size


def origin_form(method: bytes, target: bytes) -> bytes:
    if target.startswith(b"/") or target == b"*" or method == b"CONNECT":
        return target
    found = ABSOLUTE.match(target)
    if found is None:
        raise DifferenceError(f"taken, but {target!r} is no target")
    path = target[found.end() :].partition(b"#")[0]
    path, mark, query = path.partition(b"?")
    return (path or b"/") + (mark + query if query else b"")


def forwarded_headers(message: Message, known: dict[bytes, bool], hop: bytes) -> bytes:
    """Return the headers that are sent on, in their original spelling."""
    named = {hop}
    for name, value in message.headers:
        if name == hop:
            named |= {token.strip(b" \t").lower() for token in value.split(b",")}
    named -= {b"close", b"keep-alive", b"upgrade"} - {hop}
    lines = [
        b"%b: %b\r\n" % (name, value)
        for name, value in message.headers.raw_items()
        if known.get(name.lower()) is not False and name.lower() not in named
    ]
    return trim_lines(b"".join(lines))


def trim_lines(lines: bytes) -> bytes:
    return TRAILING.sub(b"\r\n", lines)


def worker_bytes(request: Request) -> bytes:
    return b"".join(to_worker(request, POOL, request.body, request.id or b"id"))


def check_forwarded(request: Request) -> None:
    """Check that the bytes for a worker are exactly this one request."""
    if request.head.route is None:
        return
    sent = worker_bytes(request)
    try:
        other = reference.request(sent)
    except RejectedError as error:
        raise DifferenceError(f"sent on, but {error}: {sent!r}") from None
    if other is None or other.size != len(sent) or not other.keep_alive:
        raise DifferenceError(f"sent on, but not one request: {sent!r}")
    if other.body != request.body or other.start[0] != request.head.method.encode():
        raise DifferenceError(f"sent on as another request: {sent!r}")
    _, state, refusal = read([sent])
    if refusal is not None or state is not ParserState.NOTHING:
        raise DifferenceError(f"sent on, but the router would refuse it ({refusal}): {sent!r}")


def check_rest(rest: bytes, state: ParserState) -> None:
    """Check that the reference waits where the router waits."""
    try:
        other = reference.request(rest)
    except RejectedError:
        if state is ParserState.NOTHING and rest.strip(b"\r\n"):
            raise DifferenceError(f"skipped: {rest!r}") from None
        return
    if other is not None and other.start[0] != b"PRI":  # HTTP/2's preface
        raise DifferenceError(f"not taken yet ({state}), but whole to the reference: {rest!r}")


def answers(messages: list[bytes], pieces: list[bytes], tally: Tally) -> None:
    """Compare a worker's answers, parsed in sequence, with the reference's."""
    parser, fresh = ResponseParser(), ResponseParser()
    tally.streams += 1
    tally.messages += len(messages)
    for data in messages:
        parser.expect()
        got, head, refusal = parse_answer(parser, [data])
        fresh = ResponseParser()
        again = parse_answer(fresh, pieces if messages == [data] else [data[:9], data[9:]])
        if (got, refusal is None) != (again[0], again[2] is None):
            raise DifferenceError(f"cut differently it is {again}, not {got} {refusal}")
        if refusal is not None:
            tally.refuse(refusal)
            return
        if head is None or not parser.ended:
            tally.waiting += 1
            compare_answer(parser, data, tally)
            return
        compare_answer(parser, data, tally)
        if not parser.reusable:
            return


def parse_answer(parser: ResponseParser, pieces: list[bytes]) -> tuple[Any, Any, str | None]:
    """Parse pieces of an answer; return its compared parts, its head and the refusal."""
    try:
        for piece in pieces:
            parser.feed(piece)
    except ResponseError as error:
        return None, None, str(error)
    head = parser.head
    fields_of = None if head is None else (head.status, b"".join(head.lines), head.length)
    body = b"".join(parser.pieces)
    return (fields_of, body, parser.ended, parser.reusable), head, None


def compare_answer(parser: ResponseParser, data: bytes, tally: Tally) -> None:
    head = parser.head
    ended = parser.ended or parser.finish()
    if not ended or head is None:
        return
    tally.taken += 1
    try:
        other = reference.answer(data, ended=head.until_close)
    except RejectedError as error:
        raise DifferenceError(f"taken, but {error}: {data!r}") from None
    if other is None:
        raise DifferenceError(f"taken, but not whole: {data!r}")
    body = b"".join(parser.pieces)
    if (b"%d" % head.status, body) != (other.start[0], other.body):
        raise DifferenceError(f"{head.status} {body!r} is {other} to the reference: {data!r}")
    # llhttp also reads Proxy-Connection, which keeps HTTP/1.0 open; h11 never does.
    closes = not other.keep_alive and other.version != b"1.0"
    if parser.reusable and (closes or data[other.size :].strip(b"\r\n")):
        raise DifferenceError(f"kept open, but bytes are left or it closes: {data!r}")
    expected = forwarded_headers(other, RESPONSE_HEADERS, b"connection")
    if trim_lines(b"".join(head.lines)) != expected:
        raise DifferenceError(f"headers {head.lines!r}, not {expected!r}")

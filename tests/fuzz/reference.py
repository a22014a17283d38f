"""The reference parser: h11, independent of llhttp.

h11 is laxer than the router (bare LF, folded lines, two equal lengths). Messages that both accept
must mean the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import h11

STATUS = re.compile(rb"(HTTP/1\.[01] (\d)\d\d)[^\r\n]*(?=\r\n)")
SPACES = re.compile(rb" +")
NO_LIMIT = 1 << 30


class RejectedError(Exception):
    """h11 rejects the bytes."""


@dataclass(frozen=True)
class Message:
    """A request or an answer, and its size in bytes."""

    start: tuple[bytes, bytes]  # method and target; or status and nothing
    version: bytes
    headers: h11._headers.Headers  # lower-case names; `raw_items` has the original spelling
    body: bytes
    size: int
    keep_alive: bool  # whether another message may follow


def request(data: bytes) -> Message | None:
    """Return the first request in the bytes; None if it is not whole."""
    if not data.strip(b"\r\n"):
        return None
    spare = len(data) - len(data.lstrip(b"\r\n"))  # leading blank lines, which h11 rejects
    # h11 also rejects several spaces in the first line, which RFC 9112, 3 allows.
    line, end, rest = data[spare:].partition(b"\r\n")
    data = (words := SPACES.sub(b" ", line)) + end + rest
    spare += len(line) - len(words)
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=NO_LIMIT)
    try:
        connection.receive_data(data)
        event = connection.next_event()
        if not isinstance(event, h11.Request):
            return None
        head = event
        body = _body(connection)
    except h11.RemoteProtocolError as error:
        raise RejectedError(str(error)) from None
    if body is None:
        return None
    rest, _ = connection.trailing_data
    start = (head.method, head.target)
    headers = head.headers
    keep_alive = connection.their_state is not h11.MUST_CLOSE
    size = spare + len(data) - len(rest)
    return Message(start, head.http_version, headers, body, size, keep_alive)


def answer(data: bytes, *, ended: bool) -> Message | None:
    """Return the answer to a POST; `ended` if the connection closed after these bytes."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=NO_LIMIT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "a")]))
    connection.send(h11.EndOfMessage())
    size = len(data)
    data = _plain_starts(data)
    spare = size - len(data)
    try:
        connection.receive_data(data)
        if ended:
            connection.receive_data(b"")
        event = connection.next_event()
        while isinstance(event, h11.InformationalResponse):
            event = connection.next_event()
        if event is h11.NEED_DATA:
            return None
        if not isinstance(event, h11.Response):
            raise RejectedError(f"{event!r}")
        head = event
        body = _body(connection)
    except h11.RemoteProtocolError as error:
        raise RejectedError(str(error)) from None
    if body is None:
        return None
    rest, _ = connection.trailing_data
    start = (b"%d" % head.status_code, b"")
    headers = head.headers
    keep_alive = connection.their_state is h11.DONE
    size = spare + len(data) - len(rest)
    return Message(start, head.http_version, headers, body, size, keep_alive)


def _body(connection: h11.Connection) -> bytes | None:
    pieces = []
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Data):
            pieces.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            return b"".join(pieces)
        elif event is h11.NEED_DATA:
            return None
        else:
            raise RejectedError(f"{event!r}")


def _plain_starts(data: bytes) -> bytes:
    """Remove what llhttp skips and h11 rejects: leading blank lines and reasons."""
    plain = b""
    while found := STATUS.match(data := data.lstrip(b"\r\n")):
        plain += found[1]
        data = data[found.end() :]
        end = data.find(b"\r\n\r\n") + 4
        if found[2] != b"1" or end < 4:
            break
        plain += data[:end]
        data = data[end:]
    return plain + data

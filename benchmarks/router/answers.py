"""Strict parsers of HTTP answers, which refuse anything a router cut or changed."""

from __future__ import annotations

from benchmarks.router.mock import DONE, END_OF_HEAD, EVENT, LENGTH

MAX_HELD_BYTES = 1 << 20
CRLF = b"\r\n"
EVENT_END = b"\n\n"


class BadAnswerError(Exception):
    """The bytes are not a complete and correct answer."""


class Answer:
    """An incremental parser of one answer."""

    __slots__ = ("_chunked", "_held", "_left", "closes", "complete", "status")

    def __init__(self) -> None:
        self.status = 0  # until the head has been read
        self.complete = False
        self.closes = False  # the connection, after this answer
        self._chunked = False
        self._held = b""
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body in this piece; `complete` is set with the last one."""
        if self.complete:
            raise BadAnswerError("bytes after the end of an answer")
        if self._held:
            data, self._held = self._held + data, b""
        if not self.status:
            end = data.find(END_OF_HEAD) + len(END_OF_HEAD)
            if end < len(END_OF_HEAD):
                self._hold(data)
                return b""
            self._read_head(data[:end])
            data = data[end:]
        return self._feed_chunks(data) if self._chunked else self._feed_fixed(data)

    def _read_head(self, head: bytes) -> None:
        try:
            self.status = int(head[9:12])
        except ValueError:
            raise BadAnswerError(f"not HTTP: {head[:20]!r}") from None
        fields = head.lower()
        self.closes = b"\r\nconnection: close\r\n" in fields
        if length := LENGTH.search(head):
            self._left = int(length[1])
        elif b"\r\ntransfer-encoding: chunked\r\n" in fields:
            self._chunked = True
        else:
            raise BadAnswerError("answer without a length")

    def _feed_fixed(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise BadAnswerError("bytes after the end of an answer")
        self.complete = not self._left
        return data

    def _feed_chunks(self, data: bytes) -> bytes:
        pieces, at = [], 0
        while not self.complete and (begin := data.find(CRLF, at) + len(CRLF)) >= len(CRLF):
            size = _chunk_size(data[at : begin - len(CRLF)])
            end = begin + size
            if len(data) < end + len(CRLF):
                break
            if data[end : end + len(CRLF)] != CRLF:
                raise BadAnswerError("chunk longer than its size")
            pieces.append(data[begin:end])
            at = end + len(CRLF)
            self.complete = not size
        if self.complete and at < len(data):
            raise BadAnswerError("bytes after the end of an answer")
        self._hold(data[at:])
        return b"".join(pieces)

    def _hold(self, data: bytes) -> None:
        if len(data) > MAX_HELD_BYTES:
            raise BadAnswerError("head or chunk without an end")
        self._held = data


def _chunk_size(line: bytes) -> int:
    try:
        return int(line, 16)
    except ValueError:
        raise BadAnswerError(f"bad chunk size: {line[:20]!r}") from None


class Events:
    """Counts a stream's events, which must be exactly those of the mock."""

    __slots__ = ("_held", "count", "done")

    def __init__(self) -> None:
        self.count = 0
        self.done = False
        self._held = b""

    def feed(self, data: bytes) -> int:
        """Return the number of events that end in this piece of the body."""
        before = self.count
        *complete, self._held = (self._held + data).split(EVENT_END)
        for event in complete:
            if self.done:
                raise BadAnswerError("event after the last one")
            if event == EVENT[:-2]:
                self.count += 1
            elif event == DONE[:-2]:
                self.done = True
            else:
                raise BadAnswerError(f"unknown event: {event[:80]!r}")
        return self.count - before

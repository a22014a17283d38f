"""The answer parser: answers in any pieces, and invalid ones."""

from __future__ import annotations

import pytest

from benchmarks.router.answers import Answer, BadAnswerError, Events
from benchmarks.router.mock import DONE, EVENT, LAST_CHUNKS, STREAM_HEAD, answer, chunk

WHOLE = answer(b'{"a": 1}')
CHUNKED = STREAM_HEAD + chunk(EVENT) + chunk(EVENT + EVENT[:9]) + chunk(EVENT[9:]) + LAST_CHUNKS


def read(raw: bytes, size: int) -> tuple[Answer, bytes]:
    found, body = Answer(), b""
    for begin in range(0, len(raw), size):
        assert not found.complete
        body += found.feed(raw[begin : begin + size])
    return found, body


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
def test_answer_in_pieces_of_any_size_is_read(size: int) -> None:
    found, body = read(WHOLE, size)
    assert (found.status, found.complete, found.closes, body) == (200, True, False, b'{"a": 1}')
    found, body = read(CHUNKED, size)
    assert (found.complete, body) == (True, EVENT * 3 + DONE)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (WHOLE + b"x", "after the end"),
        (CHUNKED + b"x", "after the end"),
        (b"SSH-2.0-OpenSSH_9.6 \r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "without a length"),
        (STREAM_HEAD + b"zz\r\n", "bad chunk size"),
        (STREAM_HEAD + b"2\r\nabcd\r\n", "longer than its size"),
        (b"x" * (2 << 20), "without an end"),
    ],
)
def test_invalid_answer_raises(raw: bytes, why: str) -> None:
    with pytest.raises(BadAnswerError, match=why):
        Answer().feed(raw)


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_events_are_counted_however_they_are_split(size: int) -> None:
    events, raw = Events(), EVENT * 5 + DONE
    new = [events.feed(raw[begin : begin + size]) for begin in range(0, len(raw), size)]
    assert (events.count, sum(new), events.done) == (5, 5, True)


@pytest.mark.parametrize(
    "raw", [b'data: {"error": {"message": "gone"}}\n\n', EVENT[:30] + b"\n\n", DONE + EVENT]
)
def test_unexpected_event_raises(raw: bytes) -> None:
    with pytest.raises(BadAnswerError, match="event"):
        Events().feed(raw)

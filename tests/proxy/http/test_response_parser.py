"""The response parser: workers' bytes in pieces of any size."""

from __future__ import annotations

import pytest

from proxy.http.response_parser import MAX_UNPARSED_BYTES, ResponseError, ResponseParser

FIXED = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX-Y: z\r\n\r\nabc"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nT: 1\r\n\r\n"


def parsed(data: bytes, size: int | None = None) -> ResponseParser:
    parser = ResponseParser()
    for at in range(0, len(data), size or len(data)):
        parser.feed(data[at : at + (size or len(data))])
    return parser


@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize("data", [FIXED, CHUNKED])
def test_whole_answer_is_parsed(data: bytes, size: int | None) -> None:
    parser = parsed(data, size)
    assert parser.head is not None
    assert parser.head.status == 200
    assert b"".join(parser.pieces) == b"abc"
    assert parser.ended
    assert parser.reusable


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("status", [100, 102, 103])
def test_interim_answers_are_skipped(status: int, size: int | None) -> None:
    parser = parsed(b"HTTP/1.1 %d X\r\nLink: x\r\n\r\n" % status + FIXED, size)
    assert parser.head is not None
    assert parser.head.lines == [b"X-Y", b": ", b"z", b"\r\n"]
    assert parser.ended


def test_a_connection_serves_several_answers() -> None:
    parser = parsed(FIXED)
    parser.expect()
    assert parser.untouched
    parser.feed(CHUNKED)
    assert parser.ended
    assert parser.reusable


@pytest.mark.parametrize("surplus", [b"x", b"HTTP/1.1 200 OK\r\n\r\n", FIXED])
def test_surplus_bytes_make_the_connection_unusable(surplus: bytes) -> None:
    parser = parsed(FIXED + surplus)
    assert b"".join(parser.pieces) == b"abc"
    assert parser.ended
    assert not parser.reusable


def test_closing_worker_connection_is_not_reusable() -> None:
    assert not parsed(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n").reusable
    assert not parsed(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n").reusable


def test_unframed_body_ends_with_the_connection() -> None:
    parser = parsed(b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert not parser.ended
    assert parser.finish()


@pytest.mark.parametrize("data", [FIXED, CHUNKED, b"HTTP/1.1 103 E\r\n\r\nHTTP/1.1"])
def test_framed_answer_is_incomplete_at_connection_end(data: bytes) -> None:
    assert not parsed(data[:-1]).finish()


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_a_body_end_at_the_head(status: int) -> None:
    parser = parsed(b"HTTP/1.1 %d X\r\n\r\n" % status)
    assert parser.ended
    assert parser.head is not None
    assert not parser.head.until_close


def test_hop_headers_are_removed() -> None:
    parser = parsed(
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nX-Hop: 1\r\nConnection: x-hop\r\n"
        b"Keep-Alive: 5\r\nContent-Type: a/b\r\nX-Request-Id: theirs\r\nX-Route: theirs\r\n"
        b"Content-Length: 0\r\n\r\n"
    )
    assert parser.head is not None
    assert parser.head.lines == [b"Content-Type", b": ", b"a/b", b"\r\n"]


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\nX: ", CHUNKED.partition(b"0\r\n")[0] + b"0\r\nX: "]
)
def test_endless_headers_and_trailers_raise(start: bytes) -> None:
    with pytest.raises(ResponseError, match="without end"):
        parsed(start + b"x" * (MAX_UNPARSED_BYTES + 20_000), 10_000)


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"7", 7.0), (b"soon", None), (b"Thu, 01 Jan 1970 00:00:00 GMT", 0.0)]
)
def test_retry_after_is_parsed(value: bytes, seconds: float | None) -> None:
    head = parsed(b"HTTP/1.1 429 X\r\nRetry-After: " + value + b"\r\n\r\n").head
    assert head is not None
    assert head.retry_after_s == seconds

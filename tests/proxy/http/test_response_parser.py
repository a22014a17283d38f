"""Answers of workers from bytes, in pieces of any size."""

from __future__ import annotations

import pytest

from proxy.http.response_parser import MAX_UNPARSED_BYTES, ResponseError, ResponseParser

FIXED = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX-Y: z\r\n\r\nabc"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nT: 1\r\n\r\n"


def fed(data: bytes, size: int | None = None) -> ResponseParser:
    reader = ResponseParser()
    for at in range(0, len(data), size or len(data)):
        reader.feed(data[at : at + (size or len(data))])
    return reader


@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize("data", [FIXED, CHUNKED])
def test_a_whole_answer(data: bytes, size: int | None) -> None:
    reader = fed(data, size)
    assert reader.head is not None
    assert reader.head.status == 200
    assert b"".join(reader.pieces) == b"abc"
    assert reader.ended
    assert reader.reusable


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("status", [100, 102, 103])
def test_interim_answers_are_skipped(status: int, size: int | None) -> None:
    reader = fed(b"HTTP/1.1 %d X\r\nLink: x\r\n\r\n" % status + FIXED, size)
    assert reader.head is not None
    assert reader.head.lines == [b"X-Y", b": ", b"z", b"\r\n"]
    assert reader.ended


def test_a_connection_serves_several_answers() -> None:
    reader = fed(FIXED)
    reader.expect()
    assert reader.untouched
    reader.feed(CHUNKED)
    assert reader.ended
    assert reader.reusable


@pytest.mark.parametrize("surplus", [b"x", b"HTTP/1.1 200 OK\r\n\r\n", FIXED])
def test_what_follows_an_answer_spoils_the_connection(surplus: bytes) -> None:
    reader = fed(FIXED + surplus)
    assert b"".join(reader.pieces) == b"abc"
    assert reader.ended
    assert not reader.reusable


def test_a_worker_that_closes_is_not_used_again() -> None:
    assert not fed(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n").reusable
    assert not fed(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n").reusable


def test_a_body_may_end_with_its_connection() -> None:
    reader = fed(b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert not reader.ended
    assert reader.finish()


@pytest.mark.parametrize("data", [FIXED, CHUNKED, b"HTTP/1.1 103 E\r\n\r\nHTTP/1.1"])
def test_the_end_of_a_connection_does_not_end_a_framed_answer(data: bytes) -> None:
    assert not fed(data[:-1]).finish()


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body(status: int) -> None:
    reader = fed(b"HTTP/1.1 %d X\r\n\r\n" % status)
    assert reader.ended
    assert reader.head is not None
    assert not reader.head.until_close


def test_headers_of_the_hop_stay_behind() -> None:
    reader = fed(
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nX-Hop: 1\r\nConnection: x-hop\r\n"
        b"Keep-Alive: 5\r\nContent-Type: a/b\r\nX-Request-Id: theirs\r\nX-Route: theirs\r\n"
        b"Content-Length: 0\r\n\r\n"
    )
    assert reader.head is not None
    assert reader.head.lines == [b"Content-Type", b": ", b"a/b", b"\r\n"]


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\nX: ", CHUNKED.partition(b"0\r\n")[0] + b"0\r\nX: "]
)
def test_headers_and_trailers_without_end_are_cut_off(start: bytes) -> None:
    with pytest.raises(ResponseError, match="without end"):
        fed(start + b"x" * (MAX_UNPARSED_BYTES + 20_000), 10_000)


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"7", 7.0), (b"soon", None), (b"Thu, 01 Jan 1970 00:00:00 GMT", 0.0)]
)
def test_retry_after(value: bytes, seconds: float | None) -> None:
    head = fed(b"HTTP/1.1 429 X\r\nRetry-After: " + value + b"\r\n\r\n").head
    assert head is not None
    assert head.retry_after_s == seconds

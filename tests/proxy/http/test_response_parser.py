"""The response parser: workers' bytes in pieces of any size."""

from __future__ import annotations

import pytest

from proxy.http.head_cache import learn_head
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
    parser = parsed(b"HTTP/1.1 %d X\r\nLink: x\r\n\r\n" % status * 100 + FIXED, size)
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
    assert not parser.reusable


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
    hop = b"Keep-Alive", b"Proxy-Authenticate", b"Proxy-Connection", b"TE", b"Trailer", b"Upgrade"
    parser = parsed(
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, X-First\r\nX-Hop: 1\r\nX-First: 1\r\n"
        b"Connection: x-hop\r\n%bContent-Type: a/b\r\nX-Request-Id: theirs\r\n"
        b"X-Route: theirs\r\nContent-Length: 0\r\n\r\n"
        % b"".join(b"%b: 5\r\n" % name for name in hop)
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


# Cached heads, which differ only in the digits of Content-Length

HEAD = b"HTTP/1.1 200 OK\r\ncontent-LENGTH: %b\r\nX-Y: z\r\n\r\n"


def test_digits_of_a_cached_head_are_found() -> None:
    cached = learn_head(HEAD % b"3" + b"abc", b"3")
    assert cached is not None
    data = HEAD % b"12" + b"x" * 12
    assert cached.digits_in(data) == b"12"
    assert data[cached.size(b"12") :] == b"x" * 12


@pytest.mark.parametrize(
    "data",
    [
        b"",
        *((HEAD % b"3")[:end] for end in range(1, len(HEAD % b"3"))),
        HEAD % b"",
        HEAD % b"+3",
        HEAD % b"3 ",
        HEAD % b"1\r\nX: 3",
        HEAD % (b"9" * 19),
        (HEAD % b"3").replace(b"z", b"y"),
        (HEAD % b"3").replace(b"200", b"201"),
    ],
)
def test_other_bytes_do_not_match_a_cached_head(data: bytes) -> None:
    cached = learn_head(HEAD % b"3" + b"abc", b"3")
    assert cached is not None
    assert cached.digits_in(data) == b""


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: 3\r\n", b""])
def test_head_without_content_length_is_not_cached(head: bytes) -> None:
    assert learn_head(head, b"3") is None


def outcome(parser: ResponseParser, *pieces: bytes) -> tuple[object, ...]:
    """Parse one answer and return everything that was parsed."""
    parser.expect()
    for piece in pieces:
        parser.feed(piece)
    head = parser.head
    assert head is not None
    body = b"".join(parser.pieces)
    return head.status, head.lines, head.length, body, parser.ended, parser.reusable


SECOND_ANSWERS = [
    (HEAD % b"5" + b"hello",),
    (HEAD % b"5" + b"he", b"llo"),
    (HEAD % b"5", b"hello"),
    ((HEAD % b"5")[:25], (HEAD % b"5")[25:] + b"hello"),
    (HEAD % b"0",),
    (HEAD % b"5" + b"hello" + HEAD % b"0",),
    (HEAD % b"5" + b"hello!",),
    (b"HTTP/1.1 103 E\r\n\r\n", HEAD % b"5" + b"hello"),
    (HEAD.replace(b"200", b"500") % b"5" + b"hello",),
    ((HEAD % b"5").replace(b"X-Y: z", b"Connection: close") + b"hello",),
]


@pytest.mark.parametrize("pieces", SECOND_ANSWERS)
def test_answer_parses_the_same_after_a_similar_one(pieces: tuple[bytes, ...]) -> None:
    parser = ResponseParser()
    for size in (3, 700):
        assert outcome(parser, HEAD % b"%d" % size + b"x" * size)[3] == b"x" * size
    assert outcome(parser, *pieces) == outcome(ResponseParser(), *pieces)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_status_without_a_body_has_none_with_a_cached_head(status: bytes) -> None:
    parser, head = ResponseParser(), HEAD.replace(b"200 OK", status)
    assert outcome(parser, head % b"0")[4]
    assert outcome(parser, head % b"3")[3:] == (b"", True, True)


def test_cached_head_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = ResponseParser()
    first = outcome(parser, HEAD % b"3" + b"abc")
    monkeypatch.delattr(ResponseParser, "_parse")
    assert outcome(parser, HEAD % b"3" + b"abc") == first

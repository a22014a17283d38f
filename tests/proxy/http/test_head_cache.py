"""Cached heads that differ only in the digits of Content-Length."""

from __future__ import annotations

import pytest

from proxy.http.head_cache import learn_head
from proxy.http.response_parser import ResponseParser

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


def parsed(parser: ResponseParser, *pieces: bytes) -> tuple[object, ...]:
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
        assert parsed(parser, HEAD % b"%d" % size + b"x" * size)[3] == b"x" * size
    assert parsed(parser, *pieces) == parsed(ResponseParser(), *pieces)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_status_without_a_body_has_none_with_a_cached_head(status: bytes) -> None:
    parser, head = ResponseParser(), HEAD.replace(b"200 OK", status)
    assert parsed(parser, head % b"0")[4]
    assert parsed(parser, head % b"3")[3:] == (b"", True, True)


def test_cached_head_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = ResponseParser()
    first = parsed(parser, HEAD % b"3" + b"abc")
    monkeypatch.delattr(ResponseParser, "_parse")
    assert parsed(parser, HEAD % b"3" + b"abc") == first

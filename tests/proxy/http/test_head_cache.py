"""Heads that differ in the digits of their length alone."""

from __future__ import annotations

import pytest

from proxy.http.head_cache import learn_head
from proxy.http.response_parser import ResponseParser

HEAD = b"HTTP/1.1 200 OK\r\ncontent-LENGTH: %b\r\nX-Y: z\r\n\r\n"


def test_the_digits_of_a_known_head_are_found() -> None:
    known = learn_head(HEAD % b"3" + b"abc", b"3")
    assert known is not None
    data = HEAD % b"12" + b"x" * 12
    assert known.digits_in(data) == b"12"
    assert data[known.size(b"12") :] == b"x" * 12


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
def test_anything_else_is_another_head(data: bytes) -> None:
    known = learn_head(HEAD % b"3" + b"abc", b"3")
    assert known is not None
    assert known.digits_in(data) == b""


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: 3\r\n", b""])
def test_a_head_without_a_length_is_not_known(head: bytes) -> None:
    assert learn_head(head, b"3") is None


def answer(reader: ResponseParser, *pieces: bytes) -> tuple[object, ...]:
    """Read one answer, and say all that came of it."""
    reader.expect()
    for piece in pieces:
        reader.feed(piece)
    head = reader.head
    assert head is not None
    body = b"".join(reader.pieces)
    return head.status, head.lines, head.length, body, reader.ended, reader.reusable


SECOND = [
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


@pytest.mark.parametrize("pieces", SECOND)
def test_an_answer_means_the_same_after_one_like_it(pieces: tuple[bytes, ...]) -> None:
    reader = ResponseParser()
    for size in (3, 700):
        assert answer(reader, HEAD % b"%d" % size + b"x" * size)[3] == b"x" * size
    assert answer(reader, *pieces) == answer(ResponseParser(), *pieces)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_a_status_without_a_body_keeps_none(status: bytes) -> None:
    reader, head = ResponseParser(), HEAD.replace(b"200 OK", status)
    assert answer(reader, head % b"0")[4]
    assert answer(reader, head % b"3")[3:] == (b"", True, True)


def test_a_known_head_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ResponseParser()
    first = answer(reader, HEAD % b"3" + b"abc")
    monkeypatch.delattr(ResponseParser, "_parse")
    assert answer(reader, HEAD % b"3" + b"abc") == first

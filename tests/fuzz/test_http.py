"""The HTTP parsers against h11, over mutated messages: see `judge`.

`python -m benchmarks.fuzz` does the same for any number of messages.
"""

from __future__ import annotations

import itertools
import tracemalloc

import pytest

from proxy.core.model.refusals import RefusedError
from proxy.http.request_parser import HttpRequestParser
from tests.fuzz import corpus, judge
from tests.fuzz.judge import Tally
from tests.fuzz.mutate import Mutator

SEED, STREAMS = 8, 4_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"


def test_requests_parse_as_in_the_reference() -> None:
    tally = Tally()
    for number in range(STREAMS):
        mutator = Mutator(SEED, number)
        messages = mutator.requests()
        judge.requests(messages, mutator.cuts(b"".join(messages)), tally)
    # The mutations must give accepted and refused requests.
    assert tally.taken > STREAMS / 2
    assert tally.refused > STREAMS / 2
    assert tally.waiting > STREAMS / 50
    assert len(tally.refusals) > 20


def test_answers_parse_as_in_the_reference() -> None:
    tally = Tally()
    for number in range(STREAMS):
        mutator = Mutator(SEED, number)
        messages = mutator.answers()
        judge.answers(messages, mutator.cuts(b"".join(messages)), tally)
    assert tally.taken > STREAMS / 2
    assert tally.refused > STREAMS / 3
    assert len(tally.refusals) > 20


def test_mutator_is_deterministic() -> None:
    assert Mutator(1, 2).requests() == Mutator(1, 2).requests()
    assert Mutator(1, 2).requests() != Mutator(1, 3).requests()


def test_valid_requests_are_accepted() -> None:
    for data in corpus.REQUESTS:
        got, _, refusal = judge.read([data])
        assert (len(got), refusal) == (1, None), data


@pytest.mark.parametrize("line", corpus.LINES, ids=lambda line: repr(line[:40]))
def test_each_header_line_with_either_framing(line: bytes) -> None:
    """Every line, before and after the framing, not only random ones."""
    tally = Tally()
    for framing, body in (
        (b"Content-Length: 15\r\n", corpus.SHORT),
        (b"Transfer-Encoding: chunked\r\n", b"f\r\n" + corpus.SHORT + b"\r\n0\r\n\r\n"),
        (b"", b""),
    ):
        for lines in (line + b"\r\n" + framing, framing + line + b"\r\n"):
            data = HEAD + lines + b"\r\n" + body + corpus.INNER
            judge.requests([data], [data[:50], data[50:]], tally)
    assert tally.streams == 6


# Regressions found by fuzzing


def test_length_with_thousands_of_zeros_is_refused() -> None:
    """Python refuses to read such a number."""
    _, _, refusal = judge.read([HEAD + b"Content-Length: " + b"0" * 5000 + b"2\r\n\r\n{}"])
    assert refusal is not None
    assert "digits" in refusal


@pytest.mark.parametrize(
    "message",
    [
        HEAD + b"Content-Length: 2\r\n\r\n{}",
        HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["known", "upgrade"],
)
def test_thousands_of_pipelined_requests_are_parsed(message: bytes) -> None:
    got, _, refusal = judge.read([message, message * 5000])
    assert (len(got), refusal) == (5001, None)


def test_invalid_request_after_an_upgrade_is_refused() -> None:
    upgrade = HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}"
    got, _, refusal = judge.read([upgrade + HEAD + b"Expect: more\r\n\r\n"])
    assert len(got) == 1
    assert refusal is not None


def test_bytes_after_a_closing_upgrade_are_ignored() -> None:
    last = HEAD + b"Connection: Upgrade, close\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}"
    got, _, refusal = judge.read([last + corpus.INNER])
    assert (len(got), refusal) == (1, None)


# Memory of endless messages


@pytest.mark.parametrize(
    ("begin", "piece", "status"),
    [
        (b"GET /", b"x" * 997, 431),
        (HEAD, b"X: " + b"y" * 997 + b"\r\n", 431),
        (HEAD + b"X: ", b"y" * 997, 431),
        (HEAD, b"x" * 997, 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x" * 997, 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0" * 997, 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: " + b"y" * 997 + b"\r\n", 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 200, 413),
        (HEAD + b"Content-Length: 9999999\r\n\r\n", b"x" * 997, 413),
        (b"", b"\r\n" * 500, 431),
    ],
)
def test_endless_message_is_refused_at_the_limit(begin: bytes, piece: bytes, status: int) -> None:
    parser = HttpRequestParser(judge.set_route, max_head=20_000, max_body=50_000)
    # Chunks of one byte take six; anything else is refused at the limit.
    max_bytes = 50_000 * 7

    def feed_endlessly() -> None:
        for data in (begin, *itertools.repeat(piece, max_bytes // len(piece))):
            parser.feed(data)

    with pytest.raises(RefusedError) as refused:
        feed_endlessly()
    assert refused.value.refusal.status == status


@pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "segments"])
def test_body_in_tiny_pieces_takes_less_than_twice_its_size(chunked: bool) -> None:
    size = 1 << 16
    parser = HttpRequestParser(judge.set_route, max_head=20_000, max_body=size)
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
    parser.feed(HEAD + framing + b"\r\n\r\n")
    piece = b"2\r\n{}\r\n" if chunked else b"{}"
    tracemalloc.start()
    try:
        for _ in range(size // 2 - 1):
            parser.feed(piece)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * size
    parser.feed(piece + b"0\r\n\r\n" if chunked else piece)
    [request] = parser.ready
    assert len(request.body) == size
